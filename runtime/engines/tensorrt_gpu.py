"""Engines of TensorRT and TensorRT-RTX, on the rank's own stream."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from splitc.runtime.engines import Backend, Communicator, LoadOptions
from splitc.runtime.engines.kind import BackendOptions, EngineKind
from splitc.runtime.errors import EngineError, PackageError
from splitc.runtime.gpu.array import GpuArray
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.gpu.weight_places import SwapBuffer
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import BuildOptions

# The most input shapes whose output shapes an engine remembers. A choice: one takes a few hundred bytes.
MOST_SHAPES = 64
# TensorRT's names of number types that are not numpy's in upper case.
TYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "FP8": "float8_e4m3fn"}


class TensorrtEngine:
    """One engine and its context. The engines of a rank share the backend's scratch memory: one runs at a time."""

    optional: frozenset[str] = frozenset()  # TensorRT has none

    def __init__(self, name: str, engine: Any, backend: TensorrtBackend) -> None:
        self._name = name
        self._engine = engine
        self._backend = backend
        trt = backend.trt
        names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
        self.inputs = [tensor for tensor in names if engine.get_tensor_mode(tensor) == trt.TensorIOMode.INPUT]
        self.outputs = [tensor for tensor in names if tensor not in self.inputs]
        self._types = {tensor: _type_name(engine.get_tensor_dtype(tensor)) for tensor in names}
        self._on_host = {tensor for tensor in names if engine.get_tensor_location(tensor) == trt.TensorLocation.HOST}
        if given := [tensor for tensor in self.outputs if tensor in self._on_host]:
            raise PackageError(
                f"{name} outputs '{given[0]}', a shape tensor, on the host, where no other engine reads it"
            )
        self.capture_blocker: str | None = f"{name} takes a shape tensor on the host" if self._on_host else None
        self.context = _make_context(trt, engine)
        if self.context is None:
            raise PackageError(f"TensorRT can't make a context for {name} on {backend.name}: {backend.said()}")
        # TensorRT 10 renamed it.
        v2 = hasattr(engine, "device_memory_size_v2")
        self.scratch_bytes = int(engine.device_memory_size_v2 if v2 else engine.device_memory_size)
        self._shapes: dict[Any, dict[str, tuple[int, ...]]] = {}

    def connect(self, communicator: Communicator) -> None:
        """Give NCCL's communicator to the context. This is a handshake: all ranks must do so at the same time.

        Raises PackageError if the context does not accept it.
        """
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        # Capturing collectives has been seen to hang.
        self.capture_blocker = f"{self._name} waits for other ranks while it runs"
        if not self.context.set_communicator(new(communicator.pointer, b"ncclComm_t", None)):
            raise PackageError(f"{self._name} does not take its communicator: {self._backend.said()}")

    def run(self, values: Mapping[str, Any], into: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        given = {name: self._fit(name, values[name]) for name in self.inputs}
        lists = self._backend.download({name: given[name] for name in self.inputs if name in self._on_host})
        arrays = {name: np.ascontiguousarray(array) for name, array in lists.items()}
        key = (*(value.shape for value in given.values()), *(array.tobytes() for array in arrays.values()))
        if key not in self._shapes:
            self._bind(given, arrays)
            if len(self._shapes) == MOST_SHAPES:
                del self._shapes[next(iter(self._shapes))]
            self._shapes[key] = self._infer()
        shapes = self._shapes[key]
        made = {n: into[n] if n in into else self._backend.empty(shapes[n], self._types[n]) for n in self.outputs}
        self._backend.lend_scratch(self)
        self._bind({**given, **made}, arrays)
        if not self.context.execute_async_v3(self._backend.stream.ptr):
            raise EngineError(f"{self._name} failed on {self._backend.name}: {self._backend.said()}")
        self._backend.keep(arrays)
        return made

    def _bind(self, values: Mapping[str, GpuArray], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Set the addresses of values and the shapes of inputs in the context."""
        for name, value in values.items():
            pointer = arrays[name].ctypes.data if name in arrays else value.pointer
            self.context.set_tensor_address(name, pointer)
            if name in self.inputs and not self.context.set_input_shape(name, value.shape):
                raise EngineError(f"{self._name} was not built for the shape {value.shape} of '{name}'")

    def _infer(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the outputs for the bound inputs."""
        if missing := self.context.infer_shapes():
            raise EngineError(f"{self._name} lacks the sizes of {', '.join(missing)}")
        shapes = {name: tuple(self.context.get_tensor_shape(name)) for name in self.outputs}
        if unknown := [name for name, shape in shapes.items() if min(shape, default=0) < 0]:
            raise EngineError(f"the size of '{unknown[0]}' depends on data, which splitc does not support in TensorRT")
        return shapes

    def _fit(self, name: str, value: GpuArray) -> GpuArray:
        """The value in the engine's number type: TensorRT before version 10 has int32 instead of int64."""
        return value if value.dtype == self._types[name] else self._backend.cast(value, self._types[name])


class TensorrtBackend(GpuDevice, Backend):
    """TensorRT, or TensorRT-RTX, on one GPU."""

    def __init__(self, kind: EngineKind, device: Device, options: BuildOptions) -> None:
        super().__init__(device)
        kind.need_installed()
        self.trt: ModuleType = importlib.import_module(kind.module)
        self._options = options
        self._errors: list[str] = []
        self._logger = _make_logger(self.trt, self._errors)
        if hasattr(self.trt, "init_libnvinfer_plugins"):
            self.trt.init_libnvinfer_plugins(self._logger, "")
        self._runtime = self.trt.Runtime(self._logger)
        self._runtime.engine_host_code_allowed = options.version_compatible  # such engines contain host code
        self._scratch: GpuArray | None = None
        self._most_scratch = 0

    @classmethod
    def create(cls, options: BackendOptions) -> TensorrtBackend:
        """The backend of a GPU. Raises PackageError if the GPU or CuPy is missing, MisuseError if TensorRT is."""
        return cls(options.kind, options.device, options.build)

    def load(self, path: Path, options: LoadOptions = LoadOptions()) -> TensorrtEngine:
        engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise PackageError(f"TensorRT can't load {path} on {self.name}: {self.said()}")
        if self._options.weight_streaming:
            engine.weight_streaming_budget_v2 = engine.get_weight_streaming_automatic_budget()
        if self._options.strip_weights:
            self._refit(engine, path, options.source)
        loaded = TensorrtEngine(path.name, engine, self)
        self._most_scratch = max(self._most_scratch, loaded.scratch_bytes)
        if options.communicator is not None:
            loaded.connect(options.communicator)
        return loaded

    def swap_weights(self, buffer: SwapBuffer) -> None:
        self.notes.append(f"weights stay on {self.name} while other modules work: TensorRT engines contain them")

    def _refit(self, engine: Any, path: Path, source: Path | None) -> None:
        """Load the weights of its ONNX file into an engine that was built without weights."""
        refitter = self.trt.Refitter(engine, self._logger)
        parser = self.trt.OnnxParserRefitter(refitter, self._logger)
        if source is None or not parser.refit_from_file(str(source)) or not refitter.refit_cuda_engine():
            raise PackageError(f"{path} has no weights, and can't be given those of {source}: {self.said()}")

    def lend_scratch(self, engine: TensorrtEngine) -> None:
        """Give the engine the scratch memory that the rank's engines share: one runs at a time."""
        if self._scratch is None:
            self._scratch = self.empty((self._most_scratch,), "uint8")
        if hasattr(engine.context, "set_device_memory"):
            engine.context.set_device_memory(self._scratch.pointer, self._scratch.nbytes)
        else:
            engine.context.device_memory = self._scratch.pointer

    def said(self) -> str:
        """TensorRT's last error."""
        return self._errors[-1] if self._errors else "it gave no reason"


def _make_context(trt: ModuleType, engine: Any) -> Any:
    """A context without its own scratch memory. TensorRT 10 changed the call for that."""
    if hasattr(trt, "ExecutionContextAllocationStrategy"):
        return engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    return engine.create_execution_context_without_device_memory()


def _make_logger(trt: ModuleType, errors: list[str]) -> Any:
    class Log(trt.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                errors.append(message.strip())

    return Log()


def _type_name(dtype: Any) -> str:
    name = str(dtype).rpartition(".")[2]
    return TYPES.get(name, name.lower())
