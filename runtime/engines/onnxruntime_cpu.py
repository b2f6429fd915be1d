"""Engines that are ONNX files, run by ONNX Runtime on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from splitc.runtime.arrays.array import Allocate, Zeros, bytes_of, number_type
from splitc.runtime.arrays.ort_values import host_array, host_value
from splitc.runtime.engines import Backend, Communicator, LoadOptions
from splitc.runtime.engines.arena_limit import beyond_limit, host_limit, limited_arena, take_limited_arena
from splitc.runtime.engines.kind import BackendOptions, release
from splitc.runtime.engines.onnx_session import open_onnx, output_names
from splitc.runtime.errors import EngineError, FollowingError, HandOverError, PackageError
from splitc.runtime.gpu.weight_places import SwapBuffer
from splitc.runtime.hardware.devices import host_memory
from splitc.runtime.hardware.heap import compact_heap
from splitc.runtime.hardware.memory_use import MemoryUse, process_memory
from splitc.runtime.units import format_bytes

# ONNX Runtime's errors, which have no common base but Exception. All of them: the system's errors come as any of these,
# by their numbers.
ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    UnicodeDecodeError,  # of a message with a name in it that is no UTF-8
    *(error for error in vars(ort_errors).values() if isinstance(error, type) and issubclass(error, Exception)),
)


# Earlier ones don't replace the process's arena, which has the limit of a rank's memory (arena_limit.py).
OLDEST = (1, 23)
# States from this many bytes on are compared with the free memory, whose look-up takes 0.2 ms
# where to fill as many bytes takes 5 (measured on two cores).
LARGE = 1 << 26
# Messages of operators if another rank has failed, or is in another request.
_GIVEN_UP, _APART = "was given up", "ranks were not given the same requests"


def failed(
    name: str, message: str, limit: int | None = None, values: Mapping[str, Any] = MappingProxyType({})
) -> EngineError:
    """The EngineError for ONNX Runtime's message about an engine that failed on these values."""
    message = f"{name} failed: {beyond_limit(message, limit, values) or message}"
    kind = FollowingError if _GIVEN_UP in message else HandOverError if _APART in message else EngineError
    return kind(message)


def open_session(
    path: Path,
    threads: int,
    communicator: Communicator | None = None,
    trusts_data: bool = False,
    stays_mapped: bool = False,
    limited: bool = False,
) -> ort.InferenceSession:
    """An ONNX Runtime session on the CPU with `threads` threads. Raises PackageError if the file can't be loaded.

    - `limited`: use the arena of `limited_arena`.
    - `stays_mapped`: read weights from their mapped files, without a copy that is packed for matmuls.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Patterns of allocations would be kept for all shapes that were ever seen, each in a block of its own beside what
    # the first run left in the arena: up to twice the memory, for at most 2 % of the time.
    options.enable_mem_pattern = False
    # Buffers that are planned for several values stay taken between these: a third of a denoiser's activations. Without
    # them a token takes up to 5 % longer in models of a few megabytes.
    options.enable_mem_reuse = False
    options.log_severity_level = 4  # errors are raised as exceptions, and warnings are about its optimizer
    # The stages of one process take turns: threads of a finished stage must not keep spinning on the next one's cores.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.disable_prepacking", str(int(stays_mapped)))
    register_operators(options, communicator)
    if limited:
        take_limited_arena(options)
    try:
        return open_onnx(path, options, ["CPUExecutionProvider"], trusts_data)
    except ERRORS as error:
        raise PackageError(f"ONNX Runtime can't load {path}: {error}") from error


class Registered(Protocol):
    """Operators of splitc's C library."""

    def registered(self) -> AbstractContextManager[Path]:
        """The library's path. Sessions that this thread makes inside the context have these operators."""


def register_operators(options: ort.SessionOptions, *owners: Registered | None) -> None:
    """Register the operators of these owners, if there are any, with a session.

    Raises PackageError without the library.
    """
    with ExitStack() as stack:
        for library in [stack.enter_context(owner.registered()) for owner in owners if owner is not None][:1]:
            options.register_custom_ops_library(str(library))


class OnnxRuntimeEngine:
    """One ONNX file in its own session. Values are OrtValues, which are passed between sessions without a copy."""

    capture_blocker: str | None = None

    def __init__(
        self,
        name: str,
        session: ort.InferenceSession,
        options: ort.RunOptions,
        communicator: Communicator | None,
        limit: int | None,
    ) -> None:
        self._name = name
        self._session = session
        self._limit = limit
        self._communicator = communicator  # its memory must outlive the session
        self._options = options
        self.inputs = [value.name for value in session.get_inputs()]
        self.optional = frozenset(value.name for value in session.get_overridable_initializers())
        self.outputs = output_names(session)

    def run(self, values: Mapping[str, Any], into: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        if not self.optional.isdisjoint(values):
            made = run_overridden(self._name, self._session, values)
            for name, value in into.items():
                host_array(value)[...] = host_array(made[name])
            return {**made, **into}
        # Reusing the binding would save only 2 microseconds. Inputs and outputs must be bound anew each time anyway,
        # since outputs that stay bound are overwritten.
        binding = self._session.io_binding()
        for name in self.inputs:
            binding.bind_ortvalue_input(name, values[name])
        for name in self.outputs:
            if name in into:
                binding.bind_ortvalue_output(name, into[name])
            else:
                binding.bind_output(name)
        try:
            self._session.run_with_iobinding(binding, self._options)
        except ERRORS as error:
            raise failed(self._name, str(error), self._limit, values) from error
        binding.clear_binding_inputs()  # outputs keep the binding alive, which would keep the previous states alive
        # Return bound outputs themselves: a new OrtValue on their memory would not keep it alive.
        return {name: into.get(name, value) for name, value in zip(self.outputs, binding.get_outputs(), strict=True)}


def run_overridden(
    name: str, session: ort.InferenceSession, values: Mapping[str, ort.OrtValue]
) -> dict[str, ort.OrtValue]:
    """Run on host values, some of which replace weights: an IO binding does not support that.

    Raises EngineError if the run fails.
    """
    outputs = output_names(session)
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", "-1")  # otherwise a GPU session would capture this run
    try:
        return dict(zip(outputs, session.run_with_ort_values(outputs, dict(values), options), strict=True))
    except ERRORS as error:
        raise failed(name, str(error)) from error


class OnnxRuntimeBackend(Backend):
    """ONNX Runtime's CPU provider, with a number of threads for each engine."""

    def __init__(self, threads: int, trusts_data: bool = False) -> None:
        self.notes: list[str] = []
        self._threads = threads
        self._trusts_data = trusts_data
        self._stays_mapped = False
        self._lent: Callable[[], int] | None = None  # where the process is the rank's own
        self._limit = host_limit(None)
        self._is_loading = False  # a rank's engines, which share an arena
        self._options = ort.RunOptions()
        # Without this entry, ONNX Runtime 1.31 looks for it and raises an exception inside: 40 microseconds per run.
        self._options.add_run_config_entry("gpu_graph_id", "-1")

    @classmethod
    def create(cls, options: BackendOptions) -> OnnxRuntimeBackend:
        """The backend of a CPU device. Raises PackageError if ONNX Runtime is too old."""
        if release(ort.__version__) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise PackageError(f"ONNX Runtime {ort.__version__} is too old: pip install 'onnxruntime-gpu>={oldest}'")
        return cls(options.threads, options.trusts_data)

    def load(self, path: Path, options: LoadOptions = LoadOptions()) -> OnnxRuntimeEngine:
        how = self._trusts_data, self._stays_mapped, self._limit is not None
        with compact_heap(), contextlib.nullcontext() if self._is_loading else limited_arena(self._limit):
            session = open_session(path, self._threads, options.communicator, *how)
        return OnnxRuntimeEngine(path.name, session, self._options, options.communicator, self._limit)

    def fetch(
        self, values: Mapping[str, Any], allocate: Allocate | None = None
    ) -> Callable[[], dict[str, npt.NDArray[np.generic]]]:
        return partial(self.download, values)

    def persist_state(self, value: ort.OrtValue, before: ort.OrtValue | None) -> ort.OrtValue:
        return value

    def limit(self, size: int | None) -> None:
        self._limit = host_limit(size)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        with limited_arena(self._limit):
            self._is_loading = True
            try:
                yield
            finally:
                self._is_loading = False

    def map_weights(self) -> None:
        self._stays_mapped = True

    def swap_weights(self, buffer: SwapBuffer) -> None:
        """See Backend. Does nothing for weights in mapped files: the system pages them in and out."""
        self.map_weights()

    def memory(self) -> MemoryUse | None:
        if self._lent is None:
            return None
        use = process_memory()
        return replace(use, peak=use.peak + self._lent())

    def own_process(self, lent: Callable[[], int] = lambda: 0) -> None:
        self._lent = lent

    def stop(self) -> None:
        self._options.terminate = True

    def upload(self, array: npt.NDArray[Any]) -> ort.OrtValue:
        return host_value(array)

    def zeros(self, wanted: Mapping[str, Zeros]) -> dict[str, ort.OrtValue]:
        check_free(sum(bytes_of(zeros.shape, zeros.dtype) for zeros in wanted.values()))
        return {name: host_value(np.zeros(zeros.shape, number_type(zeros.dtype))) for name, zeros in wanted.items()}

    def copy_front(self, value: ort.OrtValue, longer: ort.OrtValue, axis: int) -> None:
        front = host_array(value)
        np.moveaxis(host_array(longer), axis, 0)[: front.shape[axis]] = np.moveaxis(front, axis, 0)

    def download(self, values: Mapping[str, Any]) -> dict[str, npt.NDArray[np.generic]]:
        return {name: host_array(value) for name, value in values.items()}


def check_free(size: int) -> None:
    """Raise EngineError if less memory is free than the states need: an allocation would only fail when used."""
    if size >= LARGE and size > (free := host_memory()[1]):
        raise EngineError(f"the states of a sequence need {format_bytes(size)}, and {format_bytes(free)} is free")
