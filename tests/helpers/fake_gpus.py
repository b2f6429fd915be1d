"""Engines on simulated GPUs (`fake_cupy`).

Ranks' processes import this module, so it imports neither the compiler nor pytest, which take three times as long as
all else.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnxruntime as ort

from splitc.runtime.engines import Backend, LoadOptions
from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeBackend
from splitc.runtime.errors import EngineError
from splitc.runtime.gpu.array import GpuArray
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.gpu.weight_places import SwapBuffer, size_of
from splitc.runtime.gpu.weights import SwappedWeights
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import Weight
from tests.helpers import fake_cupy, fake_gpu_arrays

# The environment variable that names the engine that fails. Ranks' processes inherit it.
FAILING = "SPLITC_TEST_FAILING"
# The environment variable that names the rank's folder whose engines give other numbers in a replay than eagerly.
WRONG = "SPLITC_TEST_WRONG"
# The environment variable that names the engine that copies from host memory.
FROM_HOST = "SPLITC_TEST_FROM_HOST"
# `NAME` of the compiler's `kept_rows`, which would be most of what a rank's process imports.
TOKEN = "logits_to_keep"
# A weight that must be on the GPU: its value, the folder of its file, and its entry.
Needed = tuple[ort.OrtValue, Path, Weight]


def _is_there(needed: Needed) -> bool:
    """Whether the weight on the GPU is equal to that in its file."""
    held, folder, weight = needed
    content = np.memmap(folder / weight.file, np.uint8, "r", weight.offset, (size_of(weight),))
    return ctypes.string_at(held.data_ptr(), content.size) == content.tobytes()


class HostEngine:
    """An ONNX Runtime engine on the CPU that is enqueued on a fake stream, and runs when the stream reaches it."""

    optional: frozenset[str] = frozenset()
    capture_blocker: str | None = None

    def __init__(self, gpu: GpuDevice, path: Path) -> None:
        self._gpu = gpu
        self._backend = OnnxRuntimeBackend(1)
        self._engine = self._backend.load(path)
        self.inputs, self.outputs = self._engine.inputs, self._engine.outputs
        # Weights on the GPU, which it does not read itself. If they are not there while it runs, its outputs are wrong.
        self.needed: list[Needed] = []
        self._errs = path.parent.name == os.environ.get(WRONG)
        self._copies = path.match(os.environ.get(FROM_HOST, "no engine"))

    def run(self, values: Mapping[str, Any], into: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        shapes = self._shapes(values)
        made = {n: into[n] if n in into else self._gpu.empty(*shapes[n]) for n in self.outputs}
        if self._copies:
            host, copied = np.ones(3), self._gpu.empty((3,), "float64")
            fake_cupy.copy_async(copied.pointer, host.ctypes.data, host.nbytes, 1, self._gpu.stream.ptr)
            self._gpu.keep(host)
        # Without owners that keep the memory: the stream comes to this work before it comes to what frees the memory.
        places = {name: replace(value, owner=None) for name, value in values.items()}
        targets = {name: (value.pointer, value.nbytes) for name, value in made.items()}

        errs = self._errs and self._gpu.tape is not None

        def work() -> None:
            for name, array in self._compute(places, errs).items():
                pointer, size = targets[name]
                if array.nbytes != size:  # or else it would be written beyond its memory
                    os.write(2, f"'{name}' has a size that depends on data: a fake GPU has no memory for it\n".encode())
                    os._exit(70)
                ctypes.memmove(pointer, array.ctypes.data, array.nbytes)

        fake_cupy.STREAMS[self._gpu.stream.ptr].put(work)
        return made

    def _compute(self, values: Mapping[str, GpuArray], errs: bool) -> dict[str, np.ndarray[Any, Any]]:
        feeds = {}
        for name in self.inputs:
            value = values[name]
            raw = np.ctypeslib.as_array((ctypes.c_uint8 * max(1, value.nbytes)).from_address(value.pointer))
            feeds[name] = self._backend.upload(raw[: value.nbytes].copy().view(value.dtype).reshape(value.shape))
        made = {n: np.ascontiguousarray(a) for n, a in self._backend.download(self._engine.run(feeds)).items()}
        wrong = errs or not all(map(_is_there, self.needed))
        return {name: ~array.view(np.uint8) for name, array in made.items()} if wrong else made

    def _shapes(self, values: Mapping[str, GpuArray]) -> dict[str, tuple[tuple[int, ...], str]]:
        """The shapes that TensorRT's inference would give. Ids are 1, which is within the table, and the token is 0."""
        made = {name: np.full(values[name].shape, name != TOKEN, values[name].dtype) for name in self.inputs}
        feeds = {name: self._backend.upload(array) for name, array in made.items()}
        found = self._backend.download(self._engine.run(feeds))
        return {name: (array.shape, str(array.dtype)) for name, array in found.items()}


class FakeBackend(GpuDevice, Backend):
    """Loads HostEngines on a simulated GPU.

    The environment variable FAILING has the name of an engine's file, and the number of the run in which it fails.
    """

    error_of_capture = False
    _swap_buffer: SwapBuffer | None = None
    _swapped: SwappedWeights | None = None

    def forget_error(self) -> None:
        """Engines that failed in a capture run again only after this."""
        self.error_of_capture = False

    def swap_weights(self, buffer: SwapBuffer) -> None:
        self._swap_buffer = buffer

    def bring_in(self) -> None:
        if self._swapped is not None:
            self._swapped.bring_in()

    def load(self, path: Path, options: LoadOptions = LoadOptions()) -> HostEngine:
        engine = HostEngine(self, path)
        if self._swap_buffer is not None and options.weights:
            self._swapped = SwappedWeights(self, self._swap_buffer, path.parent, options.weights)
            engine.needed = [(self._swapped.values[weight.name], path.parent, weight) for weight in options.weights]
        name, _, number = os.environ.get(FAILING, "").partition(" ")
        if path.match(name or "no engine"):
            _fail_in(engine, int(number))
        return engine


def _fail_in(engine: HostEngine, number: int) -> None:
    run, runs = engine.run, iter(range(1 << 30))

    def fail(values: Mapping[str, Any], into: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        gpu: Any = engine._gpu
        if gpu.error_of_capture:
            raise EngineError("CUDA failure 900, which an earlier capture has left")
        if next(runs) == number:
            gpu.error_of_capture = gpu.tape is not None
            raise EngineError("an engine failed on purpose")
        return run(values, into)

    engine.run = fail  # type: ignore[method-assign]


def make_backend(engine: str, device: Device, threads: int, build: object, graphs: bool, *, replays: bool) -> object:
    """Replaces `splitc.runtime.engines.kinds.make_backend`."""
    return FakeBackend(device, graphs and replays) if device.kind == "cuda" else OnnxRuntimeBackend(threads)


def install_cupy(replace: Callable[[str, object], None]) -> None:
    """Install the fake CuPy. `replace` replaces an object by its name, as `for_good` does."""
    cupy = fake_cupy.make()
    vars(cupy).update(fake_gpu_arrays.FUNCTIONS)
    replace("splitc.runtime.hardware.gpus.find_cupy", lambda: cupy)
    replace("splitc.runtime.gpu.device.need_cupy", lambda: cupy)
    replace("splitc.runtime.tools.device_speeds.need_cupy", lambda: cupy)
    replace("splitc.runtime.gpu.device.copy", fake_cupy.copy)
    replace("splitc.runtime.ranks.recording.own_what_is_copied", fake_cupy.own_what_is_copied)


def for_good(name: str, value: object) -> None:
    """Replace `package.module.name` for the lifetime of this process."""
    module, _, attribute = name.rpartition(".")
    setattr(import_module(module), attribute, value)
