"""A package behind the calls of ONNX Runtime's InferenceSession, for programs that were written for one."""

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
# A model of one Identity, as ONNX writes it.
_IDENTITY = (
    b'\x08\x08:9\n\x12\n\x01x\x12\x01y"\x08Identity:\x00\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)


@dataclass(frozen=True)
class NodeArg:
    """An input or output: its name, its type as in `tensor(float)`, and its shape of numbers, symbols and None."""

    name: str
    type: str
    shape: list[int | str | None]


@dataclass(frozen=True)
class ModelMeta:
    """What ONNX Runtime says of a model's file."""

    graph_name: str
    producer_name: str = "splitc"
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int = 0
    custom_metadata_map: dict[str, str] = field(default_factory=dict)


class InferenceSession(onnxruntime.InferenceSession):  # type: ignore[misc]
    """A package that takes the place of an ONNX file in a program of ONNX Runtime.

        session = InferenceSession("package")
        (logits,) = session.run(["logits"], {"input_ids": ids})

    `session` is the Session below, which has what a package can do beside: sequences and streams. One that is open
    already may be given in place of the path.
    Of `sess_options` the number of threads is taken. `providers` must have the one of the package's devices, if they
    are given: `devices`, one of the further options, which are Session's, changes devices.

    Errors are ONNX Runtime's: ValueError for inputs that are missing, InvalidArgument for names, types and ranks that
    do not fit, Fail for an engine that fails. What a package can't do raises MisuseError.
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
        """ONNX Runtime's own session, of an identity: some programs make a binding of it that they never use."""
        return onnxruntime.InferenceSession(_IDENTITY, providers=[CPU])._sess

    def get_inputs(self) -> list[NodeArg]:
        """The inputs that must be fed."""
        return [_node_arg(tensor) for tensor in self.session.inputs]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """The inputs that may be fed, since the model has default values for them."""
        return [_node_arg(tensor) for tensor in self.session.optional]

    def get_outputs(self) -> list[NodeArg]:
        """The outputs, in the order in which `run` returns them."""
        return [_node_arg(tensor) for tensor in self.session.outputs]

    def get_modelmeta(self) -> ModelMeta:
        """Of the file that the package was made from, its name: the package has nothing more."""
        return ModelMeta(self.session.manifest.source.name)

    def get_providers(self) -> list[str]:
        """The providers of the package's devices, and the CPU's."""
        return [CUDA, CPU] if any(device.kind == "cuda" for device in self.session.devices) else [CPU]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """The options of these providers: none, but for the first GPU's number."""
        options: dict[str, dict[str, str]] = {name: {} for name in self.get_providers()}
        gpus = [device.index for device in self.session.devices if device.kind == "cuda"]
        return options if not gpus else {**options, CUDA: {"device_id": str(gpus[0])}}

    def get_session_options(self) -> Any:
        """The options that were given, or ONNX Runtime's default ones."""
        return self._sess_options or onnxruntime.SessionOptions()

    def set_providers(self, providers: Sequence[Any] | None = None, provider_options: Any = None) -> None:
        """Nothing changes for providers that the package's devices have; MisuseError for others."""
        self._check_providers(providers)

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[Array]:
        """The outputs of these names, or all. `run_options` are ONNX Runtime's, and change nothing."""
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
        """As `run`, and returns at once. The callback gets the outputs, `user_data`, and the error's text or ""."""
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
        """A binding of inputs and outputs, whose arrays are on the host."""
        return IoBinding(self.session.outputs)

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        """Run on what is bound. Raises MisuseError for a binding that is not of `io_binding()`."""
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
        """The feeds. As in ONNX Runtime all inputs must be there, and a list has the type that its input has."""
        inputs = {tensor.name: tensor for tensor in (*self.session.inputs, *self.session.optional)}
        if missing := [tensor.name for tensor in self.session.inputs if tensor.name not in feeds]:
            raise ValueError(f"Required inputs ({missing}) are missing from input feed ({list(feeds)}).")
        return {
            name: np.asarray(feed, inputs[name].dtype) if isinstance(feed, list) and name in inputs else feed
            for name, feed in feeds.items()
        }


def _refuse_the_rest() -> None:
    """Have all other calls say that a package has no such thing: they would act on the identity."""

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
    """The error of ONNX Runtime for the same fault."""
    kind = InvalidArgument if isinstance(error, FeedError) else Fail
    return kind(str(error))  # type: ignore[no-any-return]
