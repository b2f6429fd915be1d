"""Read adapters: safetensors of PEFT, diffusers and kohya's scripts, ONNX Runtime's .onnx_adapter, and arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from splitc.runtime.adapters.adapter import MOST_RANK, Adapter, LowRank
from splitc.runtime.adapters.peft_config import Scaling, read_scaling, scaling_of
from splitc.runtime.arrays.array import Array
from splitc.runtime.arrays.onnx_types import read_type
from splitc.runtime.arrays.torch_tensors import is_tensor, read_tensor
from splitc.runtime.errors import AdapterError, blamed, needed
from splitc.runtime.files.written import parse_json
from splitc.runtime.units import first_few

# PEFT's names of the file in an adapter's folder.
FILES = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
# The ends of the matrices' names. PEFT may have the adapter's name in them.
_ENDS = (
    re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])(?:\.\w+)?\.weight"),
    re.compile(r"(?P<module>.+)\.lora_(?P<which>down|up)\.weight"),
    re.compile(r"(?P<module>.+?)(?:\.lora|\.lora_linear_layer)\.(?P<which>down|up)\.weight"),
    re.compile(r"(?P<module>.+)_lora\.(?P<which>down|up)\.weight"),
)
_WHICH = {"A": "a", "down": "a", "B": "b", "up": "b"}
_ALPHA = re.compile(r"(?P<module>.+)\.alpha")
# Names of other kinds of adapters.
_OTHERS = {
    "lora_magnitude_vector": "DoRA",
    "dora_scale": "DoRA",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "lora_mid": "LoCon with a third matrix",
    "lora_embedding_": "LoRA of an embedding table",
    "boft_": "BOFT",
    "oft_": "OFT",
    "ia3_": "(IA)^3",
    "vera_": "VeRA",
    ".diff": "differences of whole weights",
}


# The types of matrices, by the names of safetensors and of numpy.
_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class _Stored:
    """A matrix as its file has it: its type, its shape, and how to read it."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Array]


def read_adapter(path: str | Path) -> Adapter:
    """The adapter in a file, or in PEFT's or diffusers' folder. Its matrices are read when they are asked for.

    Raises AdapterError for a file that is damaged, of another kind, or lacks one of two matrices.
    """
    file = find_file(Path(path))
    if file.suffix == ".onnx_adapter":
        return _of_onnx(file)
    if file.suffix != ".safetensors":
        raise AdapterError(f"{file} is no adapter: there are .safetensors and .onnx_adapter")
    stored, metadata = _safetensors(file)
    return Adapter(str(path), _pair(str(file), stored, _find_scaling(file, metadata)))


def adapter_of(arrays: Mapping[str, Any]) -> Adapter:
    """The adapter of arrays, or of PyTorch's tensors, by the names that they have in files of safetensors.

    Their scale is 1, where there is no `.alpha`. Raises AdapterError as `read_adapter`.
    """
    stored = {}
    for name, given in arrays.items():
        with blamed(f"the adapter's '{name}' can't be converted to an array"):
            array = read_tensor(given.cpu()) if is_tensor(given) else np.asarray(given)
        stored[str(name)] = _Stored(array.dtype.name, array.shape, partial(np.asarray, array))
    return Adapter("that was given", _pair("the adapter that was given", stored, lambda module: Scaling()))


def find_file(path: Path) -> Path:
    """The file of an adapter that is named by it or by its folder. Raises AdapterError if there is none."""
    if path.is_dir():
        there = [path / name for name in FILES if (path / name).is_file()]
        if not there:
            raise AdapterError(f"{path} has no adapter in it: there is none of {', '.join(FILES)}")
        return there[0]
    if not path.is_file():
        raise AdapterError(
            f"{path} {'is no regular file' if path.exists() else 'does not exist'}: an adapter is wanted"
        )
    return path


def _safetensors(path: Path) -> tuple[dict[str, _Stored], Mapping[str, str]]:
    """The tensors of a file, and its metadata. The library checks sizes and places."""
    with needed("adapters need safetensors: pip install splitc[adapters]"):
        from safetensors import safe_open
    damaged = f"can't read the adapter {path}"
    with blamed(damaged), safe_open(path, "np") as opened:
        names = list(opened.keys())
        slices = {name: opened.get_slice(name) for name in names}
        known = {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
        metadata = opened.metadata() or {}

    def read(name: str) -> Array:
        with blamed(damaged), safe_open(path, "np") as opened:
            tensor: Array = opened.get_tensor(name)
            return tensor

    types = {name: _TYPES.get(dtype, dtype) for name, (dtype, _) in known.items()}
    return {name: _Stored(types[name], shape, partial(read, name)) for name, (_, shape) in known.items()}, metadata


def _find_scaling(path: Path, metadata: Mapping[str, str]) -> Callable[[str], Scaling]:
    """The scaling of a module, by its name: of PEFT's config beside the file, or of diffusers' metadata in it."""
    if (text := metadata.get("lora_adapter_metadata")) is None:
        scaling = read_scaling(path.parent)
        return lambda module: scaling
    content = parse_json(text.encode(), f"can't read the metadata of {path}")
    parts: dict[str, dict[str, Any]] = {}
    for key, value in (content if isinstance(content, dict) else {}).items():
        part, _, name = key.partition(".")
        parts.setdefault(part, {})[name] = value
    known = {part: scaling_of(config, f"{path} ({part})", f"{part}.") for part, config in parts.items()}
    return lambda module: known.get(module.partition(".")[0], Scaling())


def _pair(path: str, stored: Mapping[str, _Stored], scaling: Callable[[str], Scaling]) -> dict[str, LowRank]:
    """The updates of the tensors of a file. Raises AdapterError for what is none."""
    halves: dict[str, dict[str, _Stored]] = {}
    alphas: dict[str, _Stored] = {}
    unknown: list[str] = []
    for name, tensor in stored.items():
        if (kind := next((kind for part, kind in _OTHERS.items() if part in name), None)) is not None:
            raise AdapterError(f"{path} has '{name}', of the kind {kind}: only plain LoRA is known")
        if match := next(filter(None, (end.fullmatch(name) for end in _ENDS)), None):
            halves.setdefault(match["module"], {})[_WHICH[match["which"]]] = tensor
        elif alpha := _ALPHA.fullmatch(name):
            alphas[alpha["module"]] = tensor
        else:
            unknown.append(name)
    if unknown:
        raise AdapterError(f"{path} has tensors that are no part of a LoRA: {first_few(unknown)}")
    updates = {}
    for module, pair in halves.items():
        if lacking := {"a", "b"} - pair.keys():
            raise AdapterError(f"{path}: '{module}' lacks the matrix {'A (down)' if 'a' in lacking else 'B (up)'}")
        own = scaling(module)
        if module in alphas:
            own = Scaling(_number(path, module, alphas[module]), own.by_root)
        updates[module] = _update(path, module, pair["a"], pair["b"], own)
    if not updates:
        raise AdapterError(f"{path} has no matrices of an adapter in it")
    return updates


def _number(path: str, module: str, alpha: _Stored) -> float:
    if alpha.shape not in ((), (1,)):
        raise AdapterError(f"{path}: the alpha of '{module}' has the shape {alpha.shape}, and is one number")
    return float(np.asarray(alpha.read(), np.float64).reshape(()))


def _update(path: str, module: str, a: _Stored, b: _Stored, scaling: Scaling) -> LowRank:
    """The update of matrices A [rank, inputs, ...] and B [outputs, rank, ...]. Raises AdapterError for other shapes."""
    if wrong := [stored.dtype for stored in (a, b) if stored.dtype not in _TYPES.values()]:
        raise AdapterError(f"{path}: '{module}' is of type {wrong[0]}, and matrices are {', '.join(_TYPES.values())}")
    kernel = a.shape[2:]
    fits = (
        len(a.shape) == len(b.shape)
        and len(a.shape) >= 2
        and a.shape[0] == b.shape[1]
        and set(b.shape[2:]) <= {1}
        and 0 < a.shape[0] <= MOST_RANK
    )
    if not fits:
        raise AdapterError(
            f"{path}: '{module}' has the matrices A {list(a.shape)} and B {list(b.shape)}, and they are [rank, inputs] "
            "and [outputs, rank]"
        )
    rank = a.shape[0]
    scale = scaling.scale(module, rank)
    if not abs(scale) <= float(np.finfo(np.float32).max):
        raise AdapterError(f"{path}: '{module}' is scaled by {scale}, as its alpha and rank {rank} say")
    return LowRank(module, a.shape[1], b.shape[0], rank, kernel, scale, a.read, b.read)


def _of_onnx(path: Path) -> Adapter:
    """An adapter of ONNX Runtime: A is [inputs, rank] and B [rank, outputs], and the scale is in B."""
    import onnxruntime

    try:
        adapter = onnxruntime.AdapterFormat.read_adapter(str(path))
        parameters: Mapping[str, Any] = adapter.get_parameters()
    except Exception as error:  # its errors have no class of their own
        raise AdapterError(f"can't read the adapter {path}: {_last_line(error)}") from error
    stored = {}
    for name, value in parameters.items():
        of_weight = name if name.endswith(".weight") else f"{name}.weight"
        shape = tuple(value.shape())[::-1]
        stored[of_weight] = _Stored(read_type(value.data_type()), shape, partial(_transposed, adapter, value))
    updates = _pair(str(path), stored, lambda module: Scaling())
    return Adapter(str(path), {module: replace(update, for_slots=True) for module, update in updates.items()})


def _transposed(adapter: Any, value: Any) -> Array:
    """A parameter's matrix, copied out of the adapter: in older versions of ONNX Runtime no value keeps it alive."""
    from splitc.runtime.arrays.ort_values import host_array

    array: Array = host_array(value).T.copy()
    return array


def _last_line(error: Exception) -> str:
    lines: Sequence[str] = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].rpartition(") ")[2] if lines else type(error).__name__
