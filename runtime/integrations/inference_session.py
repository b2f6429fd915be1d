"""A package with the interface of ONNX Runtime's InferenceSession, for programs written for that."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument

from splitc.runtime.arrays.array import Array
from splitc.runtime.arrays.onnx_types import write_type
from splitc.runtime.arrays.ort_values import host_array, host_value
from splitc.runtime.errors import EngineError, FeedError, MisuseError
from splitc.runtime.integrations.io_binding import IoBinding
from splitc.runtime.package.manifest import Tensor
from splitc.runtime.session.session import Session

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
# A serialized ONNX model of one Identity.
_IDENTITY = (
    b'\x08\x08:9\n\x12\n\x01x\x12\x01y"\x08Identity:\x00\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)


@dataclass(frozen=True)
class NodeArg:
    """An input or output: its name, its type such as `tensor(float)`, and its shape of numbers, symbols and None."""

    name: str
    type: str
    shape: list[int | str | None]


@dataclass(frozen=True)
class ModelMeta:
    """The description of a model's file, with ONNX Runtime's attributes."""

    graph_name: str
    producer_name: str = "splitc"
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int = 0
    custom_metadata_map: dict[str, str] = field(default_factory=dict)


class InferenceSession(onnxruntime.InferenceSession):  # type: ignore[misc]
    """A package in place of an ONNX file in a program that uses ONNX Runtime.

        session = InferenceSession("package")
        (logits,) = session.run(["logits"], {"input_ids": ids})

    - `path_or_bytes`: the package's folder, or an open Session.
    - `sess_options`: only the number of threads is used.
    - `providers`: if given, they must include that of the package's devices.
    - `options`: arguments of Session; `devices` changes the devices.

    The attribute `session` is the Session behind it, for sequences and streams.

    `run` raises ONNX Runtime's errors: ValueError for missing inputs, InvalidArgument for names, types and shapes that
    do not fit, Fail for an engine that fails. Anything that a package does not support raises MisuseError. A package
    that can't be opened raises as Session does.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | Session,
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Mapping[Any, Any]] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(path_or_bytes, bytes):
            raise MisuseError("a package is a folder: give its path, not the bytes of a model")
        threads = getattr(sess_options, "intra_op_num_threads", 0)
        if threads:
            options.setdefault("threads", threads)
        if isinstance(path_or_bytes, Session):
            self.session, self._model_path = path_or_bytes, str(path_or_bytes.package)
        else:
            self.session = Session(Path(path_or_bytes), **options)
            self._model_path = os.fspath(path_or_bytes)
        self._sess_options = sess_options
        try:
            self._check_providers(providers)
        except BaseException:
            if self.session is not path_or_bytes:  # which is the caller's own
                self.session.close()
            raise

    def _check_providers(self, providers: Sequence[Any] | None) -> None:
        named = [provider if isinstance(provider, str) else provider[0] for provider in providers or ()]
        if named and (lacking := [own for own in self.get_providers()[:1] if own not in named]):
            devices = ", ".join(map(str, self.session.devices))
            raise MisuseError(
                f"the package runs on {devices}, by {lacking[0]}, and providers are {', '.join(named)}: leave "
                "providers out, or name other devices, as in devices=['cpu0', 'cpu1']"
            )

    @cached_property
    def _sess(self) -> Any:
        """ONNX Runtime's own session, of an identity: some programs make a binding of it and never use it."""
        return onnxruntime.InferenceSession(_IDENTITY, providers=[CPU])._sess

    def get_inputs(self) -> list[NodeArg]:
        """The inputs that must be fed."""
        return [_node_arg(tensor) for tensor in self.session.inputs]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """The inputs that may be fed, but have default values in the model."""
        return [_node_arg(tensor) for tensor in self.session.manifest.optional]

    def get_outputs(self) -> list[NodeArg]:
        """The outputs, in the order in which `run` returns them."""
        return [_node_arg(tensor) for tensor in self.session.outputs]

    def get_modelmeta(self) -> ModelMeta:
        """The name of the file that the package was compiled from; a package keeps no other metadata."""
        return ModelMeta(self.session.manifest.source.name)

    def get_providers(self) -> list[str]:
        """The providers of the package's devices, and the CPU's."""
        return [CUDA, CPU] if any(device.kind == "cuda" for device in self.session.devices) else [CPU]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """The options of these providers: none but the number of the first GPU."""
        options: dict[str, dict[str, str]] = {name: {} for name in self.get_providers()}
        gpus = [device.index for device in self.session.devices if device.kind == "cuda"]
        return options if not gpus else {**options, CUDA: {"device_id": str(gpus[0])}}

    def get_session_options(self) -> Any:
        """The given options, or ONNX Runtime's defaults."""
        return self._sess_options or onnxruntime.SessionOptions()

    def set_providers(self, providers: Sequence[Any] | None = None, provider_options: Any = None) -> None:
        """Accept the providers of the package's devices, without effect; raise MisuseError for others."""
        self._check_providers(providers)

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[Array]:
        """The outputs of these names, or all. `run_options` are ONNX Runtime's, and have no effect."""
        names = self._named(output_names)
        try:
            outputs = self.session.run(self._checked(input_feed))
        except (FeedError, EngineError) as error:
            raise _as_there(error) from error
        return [outputs[name] for name in names]

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[list[Array], Any, str], object],
        user_data: Any,
        run_options: Any = None,
    ) -> None:
        """As `run`, but return at once. The callback gets the outputs, `user_data`, and the error's text or ""."""
        names = self._named(output_names)
        try:
            future = self.session.submit(self._checked(input_feed))
        except FeedError as error:
            raise _as_there(error) from error

        def done(ended: Future[dict[str, Array]]) -> None:
            if (error := ended.exception()) is not None:
                callback([], user_data, str(error))
            else:
                outputs = ended.result()
                callback([outputs[name] for name in names], user_data, "")

        future.add_done_callback(done)

    def io_binding(self) -> IoBinding:
        """A binding of inputs and outputs. Its arrays are on the host."""
        return IoBinding(self.session.outputs)

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        """Run with a binding. Raises MisuseError for one that `io_binding()` did not make."""
        if not isinstance(iobinding, IoBinding):
            raise MisuseError("onnxruntime.IOBinding is for one engine, and a package has several: use io_binding()")
        names = list(iobinding.outputs)
        iobinding.fill(dict(zip(names, self.run(names, iobinding.feeds), strict=True)))

    def run_with_ort_values(
        self, output_names: Sequence[str] | None, input_dict_ort_values: Mapping[str, Any], run_options: Any = None
    ) -> list[Any]:
        """As `run`, with OrtValues."""
        feeds = {name: host_array(value) for name, value in input_dict_ort_values.items()}
        return list(map(host_value, self.run(output_names, feeds)))

    def _named(self, output_names: Sequence[str] | None) -> list[str]:
        known = [tensor.name for tensor in self.session.outputs]
        if output_names and (unknown := [name for name in output_names if name not in known]):
            raise InvalidArgument(f"Invalid output name:{unknown[0]} (there are {', '.join(known)})")
        return list(output_names or known)

    def _checked(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """The feeds. As in ONNX Runtime all inputs must be given, and a list takes its input's type."""
        inputs = {tensor.name: tensor for tensor in (*self.session.inputs, *self.session.optional)}
        if missing := [tensor.name for tensor in self.session.inputs if tensor.name not in feeds]:
            raise ValueError(f"Required inputs ({missing}) are missing from input feed ({list(feeds)}).")
        return {
            name: np.asarray(feed, inputs[name].dtype) if isinstance(feed, list) and name in inputs else feed
            for name, feed in feeds.items()
        }


def _refuse_the_rest() -> None:
    """Make all other methods raise an error that packages lack them: they would act on the identity."""

    def refusing(name: str) -> Callable[..., None]:
        def refuse(self: InferenceSession, *_: Any, **__: Any) -> None:
            raise MisuseError(f"a package has no '{name}', which an InferenceSession of one ONNX file has")

        return refuse

    for base in onnxruntime.InferenceSession.__mro__[:-1]:
        for name in vars(base).keys() - vars(InferenceSession).keys():
            if not name.startswith("_"):
                setattr(InferenceSession, name, refusing(name))


_refuse_the_rest()


def _node_arg(tensor: Tensor) -> NodeArg:
    return NodeArg(tensor.name, write_type(tensor.dtype), list(tensor.shape or ()))


def _as_there(error: FeedError | EngineError) -> Exception:
    """ONNX Runtime's error for the same fault."""
    kind = InvalidArgument if isinstance(error, FeedError) else Fail
    return kind(str(error))  # type: ignore[no-any-return]
