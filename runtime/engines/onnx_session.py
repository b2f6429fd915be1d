"""Open ONNX files in ONNX Runtime, after a check of their size and external data."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from splitc.runtime.engines.operator_library import library_path
from splitc.runtime.engines.widened import in_float32
from splitc.runtime.errors import MisuseError, PackageError
from splitc.runtime.units import format_bytes

# ONNX Runtime has some operators on GPUs only. In an engine's file each is a function of other operators, in the first
# domain, which a session on the CPU runs. One on a GPU calls those of the same names in the second, which go before it.
# Equally long, so that one can take the other's place in a file: protobuf writes strings with their lengths.
FUNCTIONS, OPERATORS = "splitc.on.gpu", "com.microsoft"


def call_operators(content: bytes) -> bytes | None:
    """An ONNX file's content that calls operators in place of these functions; None if it has none of them."""
    functions, operators = FUNCTIONS.encode(), OPERATORS.encode()
    return content.replace(functions, operators) if functions in content else None


# The most bytes that protobuf reads or writes.
LARGEST = (1 << 31) - 1
# The option that names the folder of external data, for a model that is no file.
DATA_FOLDER = "session.model_external_initializers_file_folder_path"
# The optimizer of ONNX Runtime (1.31 and 1.32) that ends the process (SIGSEGV) on some Transposes. It moves a Cast that
# follows one to the front of it, as there is on CPUs for any product of 16 bits. If the product's factors then turn out
# to have different numbers of axes, it leaves the product, and does not say that it changed the graph
# (optimizer/matmul_transpose_fusion.cc).
CRASHES = "MatmulTransposeFusion"


def open_onnx(
    path: Path,
    options: ort.SessionOptions,
    providers: Sequence[Any],
    trusts_data: bool = False,
    disabled_optimizers: Sequence[str] = (),
    on_gpu: bool = False,
) -> ort.InferenceSession:
    """A session of an ONNX file, without the disabled optimizers of ONNX Runtime.

    With `trusts_data`, the model's external data may lie outside its folder. A session `on_gpu` calls the operators of
    ONNX Runtime that are functions in the file (`call_operators`). One on the CPU computes bfloat16 in float32.

    Raises what ONNX Runtime raises, such as RuntimeError for a file that is too large; MisuseError if `onnx` is needed
    and missing.
    """
    if (reason := too_large(path)) is not None:
        raise RuntimeError(reason)
    source: str | bytes = _openable(path)
    folder, content = path.resolve().parent, _from_the_root(path) if trusts_data else None
    if content is not None:
        # ONNX Runtime reads data below one folder only. For a model in memory, that may be the root of the file system.
        folder = Path(folder.anchor)
    if on_gpu:
        content = call_operators(content or path.read_bytes()) or content
    if content is not None:
        source = content
        options.add_session_config_entry(DATA_FOLDER, str(folder))
    disabled = [*disabled_optimizers, *[CRASHES] * _moves_first_axis(path)]

    def read() -> bytes:
        options.add_session_config_entry(DATA_FOLDER, str(folder))
        return content or path.read_bytes()

    return _open(source, None if on_gpu else read, options, providers, disabled)


def open_in_memory(content: bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    """A CPU session of an ONNX file's content. Raises what ONNX Runtime raises."""
    return _open(content, lambda: content, options, ["CPUExecutionProvider"])


def _open(
    source: str | bytes,
    read: Callable[[], bytes] | None,
    options: ort.SessionOptions,
    providers: Sequence[Any],
    disabled: Sequence[str] = (),
) -> ort.InferenceSession:
    """A session of a file or its content. If it lacks kernels for bfloat16, it has what `read` returns, in float32."""
    how = {"providers": providers, "enable_fallback": 0, "disabled_optimizers": disabled}
    try:
        return ort.InferenceSession(source, options, **how)
    except ort_errors.NotImplemented:
        wide = None if read is None else in_float32(read())
        if wide is None:
            raise
        return ort.InferenceSession(wide, options, **how)


def open_content(content: bytes, folder: Path) -> ort.InferenceSession:
    """A CPU session of an ONNX file's content, with external data in this folder."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(DATA_FOLDER, str(folder.resolve()))
    return open_in_memory(content, options)


def output_names(session: ort.InferenceSession) -> list[str]:
    """The names of a session's outputs. A model may list one of them twice."""
    return list(dict.fromkeys(value.name for value in session.get_outputs()))


def too_large(path: Path) -> str | None:
    """The reason why an ONNX file is too large to read; None if it is not."""
    if not path.is_file() or (size := path.stat().st_size) <= LARGEST:
        return None
    return (
        f"it has {format_bytes(size)} ({size:,} bytes), and an ONNX file, which is protobuf, must have less than 2 GiB "
        f"({LARGEST + 1:,} bytes): export it with its weights in a file beside it, as external data "
        "(onnx.save_model(model, path, save_as_external_data=True))"
    )


def has_data_outside(path: Path) -> bool:
    """Whether a model's external data lie outside its folder. False if the package onnx is missing."""
    if find_spec("onnx") is None or too_large(path) is not None:
        return False
    from google.protobuf.message import DecodeError

    try:
        return _from_the_root(path) is not None
    except (DecodeError, OSError):  # it is no model
        return False


def data_files(path: Path) -> list[Path]:
    """The files of a model's external data; empty if it is no model, or if the package onnx is missing."""
    if find_spec("onnx") is None or too_large(path) is not None:
        return []
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, OSError):
        return []
    return [path.parent / name for name in dict.fromkeys(entry.value for entry in _locations(model))]


def _moves_first_axis(path: Path) -> bool:
    """Whether an ONNX file has a Transpose that moves the first axis behind those between it and the last two.

    That is the form that `CRASHES` takes for a product's. The file is searched for the attribute's bytes.
    """
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _MOVES_FIRST_AXIS.search(content) is not None


def _orders(rank: int) -> Iterator[bytes]:
    """The attribute `perm` as protobuf writes it, each number with its tag or all after one, for a rank's orders."""
    for order in ((*range(1, rank - 1), 0, rank - 1), (*range(1, rank), 0)):
        yield b"".join(b"\x40" + bytes([axis]) for axis in order)
        yield b"\x42" + bytes([rank, *order])


_MOVES_FIRST_AXIS = re.compile(
    b"\x0a\x04perm(?:" + b"|".join(re.escape(order) for rank in range(3, 8) for order in _orders(rank)) + b")"
)


def _from_the_root(path: Path) -> bytes | None:
    """The model, with paths of external data relative to the root of the file system.

    None if all data are below the model's folder, where ONNX Runtime reads them itself.
    """
    if find_spec("onnx") is None:
        raise MisuseError("--trust-external-data needs onnx, which is not installed here: pip install onnx")
    import onnx

    model, folder, outside = onnx.load(path, load_external_data=False), path.parent, False
    for entry in _locations(model):
        file = Path(os.path.realpath(folder / entry.value))
        outside |= path.resolve().parent not in file.parents
        entry.value = str(file.relative_to(file.anchor))
    return model.SerializeToString() if outside else None


def _locations(model: Any) -> Iterator[Any]:
    """The entries of a model that name the files of its external data."""
    for tensor in _external(model):
        yield from (entry for entry in tensor.external_data if entry.key == "location")


def _external(message: Any) -> Iterator[Any]:
    """The tensors with external data anywhere in a protobuf message."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in value if field.is_repeated else [value]:
            if field.message_type.name == "TensorProto" and part.external_data:
                yield part
            elif field.message_type.name != "TensorProto":
                yield from _external(part)


def _openable(path: Path) -> str:
    """The path as ONNX Runtime takes it. Raises PackageError if it is not UTF-8."""
    text = str(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        raise PackageError(f"ONNX Runtime can't open {shown}: its name is not UTF-8, so rename it") from None
    return text


def load_unoptimized(
    model: Path | bytes, uses_operators: bool = False, trusts_data: bool = False
) -> ort.InferenceSession:
    """Load an ONNX file, or its content, in ONNX Runtime without optimizations.

    External weights are mapped into memory, not read.

    A model that `uses_operators` of splitc's library can't be run. Raises one of ERRORS: NotImplemented if the CPU
    provider has no kernel for an operator.
    """
    options = ort.SessionOptions()
    if uses_operators:
        options.register_custom_ops_library(str(library_path()))
    options.log_severity_level, options.intra_op_num_threads = 4, 1  # or a thread for each core would be started
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_mem_pattern = False  # one allocation of all weights' size, which Linux refuses above the memory's
    options.enable_mem_reuse = False  # planning the reuse takes 20 seconds for 8,000 nodes
    options.add_session_config_entry("session.disable_prepacking", "1")
    if isinstance(model, bytes):
        return open_in_memory(model, options)
    return open_onnx(model, options, ["CPUExecutionProvider"], trusts_data)
