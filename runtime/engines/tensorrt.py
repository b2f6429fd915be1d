"""TensorRT engines, TensorRT-RTX's included, on the rank's own stream."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Optional

import numpy as np

from splitc.runtime.engines.gpu import Gpu, GpuArray
from splitc.runtime.engines.kinds import MODULES, need_installed
from splitc.runtime.errors import EngineError, PackageError
from splitc.runtime.manifest import BuildOptions

# TensorRT's names of number types, where they are not numpy's in upper case.
TYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}


class TensorrtEngine:
    """One engine and its context. Its scratch memory is the backend's, which all engines of a rank use in turn."""

    def __init__(self, name: str, engine: Any, backend: TensorrtBackend) -> None:
        self._name = name
        self._engine = engine
        self._backend = backend
        trt = backend.trt
        names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
        self.inputs = [each for each in names if engine.get_tensor_mode(each) == trt.TensorIOMode.INPUT]
        self.outputs = [each for each in names if each not in self.inputs]
        self._types = {each: _type_name(engine.get_tensor_dtype(each)) for each in names}
        self._on_host = {each for each in names if engine.get_tensor_location(each) == trt.TensorLocation.HOST}
        if given := [each for each in self.outputs if each in self._on_host]:
            raise PackageError(
                f"{name} gives '{given[0]}', a list of sizes, on the host, where no other engine takes it"
            )
        self.context = _make_context(trt, engine)
        if self.context is None:
            raise PackageError(f"TensorRT can't make a context for {name} on cuda{backend.index}: {backend.said()}")
        # Version 10 renamed it.
        v2 = hasattr(engine, "device_memory_size_v2")
        self.scratch_bytes = int(engine.device_memory_size_v2 if v2 else engine.device_memory_size)

    def connect(self, communicator: Any) -> None:
        """Hand NCCL's communicator to the context. All ranks of the group do so at the same time: it is a handshake."""
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        if not self.context.set_communicator(new(communicator.comm, b"ncclComm_t", None)):
            raise PackageError(f"{self._name} does not take its communicator: {self._backend.said()}")

    def run(self, values: Mapping[str, Any], into: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        context = self.context
        self._backend.lend_scratch(self)
        held: list[Any] = []  # what the stream reads of, until it has
        for name in self.inputs:
            value = self._fit(name, values[name])
            held.append(value)
            if name in self._on_host:
                array = np.ascontiguousarray(self._backend.download({name: value})[name])
                held.append(array)
                context.set_tensor_address(name, array.ctypes.data)
            else:
                context.set_tensor_address(name, value.pointer)
            if not context.set_input_shape(name, value.shape):
                raise EngineError(f"{self._name} was not built for the shape {value.shape} of '{name}'")
        if missing := context.infer_shapes():
            raise EngineError(f"{self._name} lacks the sizes of {', '.join(missing)}")
        made = {name: into[name] if name in into else self._make(name) for name in self.outputs}
        for name, value in made.items():
            context.set_tensor_address(name, value.pointer)
        if not context.execute_async_v3(self._backend.stream.ptr):
            raise EngineError(f"{self._name} failed on cuda{self._backend.index}: {self._backend.said()}")
        self._backend.keep(*held)
        return made

    def _fit(self, name: str, value: GpuArray) -> GpuArray:
        """The value in the engine's number type: before version 10 TensorRT has no int64, and takes int32 for it."""
        return value if value.dtype == self._types[name] else self._backend.cast(value, self._types[name])

    def _make(self, name: str) -> GpuArray:
        shape = tuple(self.context.get_tensor_shape(name))
        if min(shape, default=0) < 0:
            raise EngineError(f"the size of '{name}' depends on data, which splitc's TensorRT engines can't give")
        return self._backend.empty(shape, self._types[name])


class TensorrtBackend(Gpu):
    """TensorRT, or TensorRT-RTX, on one GPU."""

    def __init__(self, kind: str, index: int, options: BuildOptions) -> None:
        super().__init__(index)
        need_installed(kind)
        self.trt: ModuleType = importlib.import_module(MODULES[kind])
        self._options = options
        self._errors: list[str] = []
        self._logger = _make_logger(self.trt, self._errors)
        if hasattr(self.trt, "init_libnvinfer_plugins"):
            self.trt.init_libnvinfer_plugins(self._logger, "")
        self._runtime = self.trt.Runtime(self._logger)
        self._runtime.engine_host_code_allowed = options.version_compatible  # such engines hold code for the host
        self._scratch: Optional[GpuArray] = None

    def load(self, path: Path, source: Optional[Path] = None) -> TensorrtEngine:
        engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise PackageError(f"TensorRT can't load {path} on cuda{self.index}: {self.said()}")
        if self._options.weight_streaming:
            engine.weight_streaming_budget_v2 = engine.get_weight_streaming_automatic_budget()
        if self._options.strip_weights:
            self._refit(engine, path, source)
        return TensorrtEngine(path.name, engine, self)

    def _refit(self, engine: Any, path: Path, source: Optional[Path]) -> None:
        """Give an engine that was built without weights those of its ONNX file."""
        refitter = self.trt.Refitter(engine, self._logger)
        parser = self.trt.OnnxParserRefitter(refitter, self._logger)
        if source is None or not parser.refit_from_file(str(source)) or not refitter.refit_cuda_engine():
            raise PackageError(f"{path} has no weights, and can't be given those of {source}: {self.said()}")

    def lend_scratch(self, engine: TensorrtEngine) -> None:
        """Let the engine work in the memory that all engines of the rank have together: one runs at a time."""
        if self._scratch is None or self._scratch.nbytes < engine.scratch_bytes:
            if self._scratch is not None:
                self.keep(self._scratch)
            self._scratch = self.empty((engine.scratch_bytes,), "uint8")
        if hasattr(engine.context, "set_device_memory"):
            engine.context.set_device_memory(self._scratch.pointer, self._scratch.nbytes)
        else:
            engine.context.device_memory = self._scratch.pointer

    def said(self) -> str:
        """TensorRT's last error."""
        return self._errors[-1] if self._errors else "it gave no reason"

    def stop(self) -> None:
        """An engine that is running can't be stopped; whoever waits for it is told by `interrupted`."""


def _make_context(trt: ModuleType, engine: Any) -> Any:
    """A context without scratch memory of its own. The way to ask for that changed with TensorRT 10."""
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
