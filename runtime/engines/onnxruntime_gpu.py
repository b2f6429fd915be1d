"""Engines that are ONNX files, run by ONNX Runtime's CUDA provider on the rank's own stream."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnxruntime as ort

from splitc.runtime.arrays.array import number_type
from splitc.runtime.arrays.onnx_types import CODES, read_type
from splitc.runtime.arrays.ort_values import host_array, host_value
from splitc.runtime.engines import Backend, LoadOptions
from splitc.runtime.engines.convolution_plans import NO_PLAN, NO_WAY_BACK, SEARCHES
from splitc.runtime.engines.fused_kernels import FusedOperators, compile_fused
from splitc.runtime.engines.kept_binding import KeptBinding
from splitc.runtime.engines.kind import BackendOptions
from splitc.runtime.engines.onnx_session import open_onnx, output_names
from splitc.runtime.engines.onnxruntime_cpu import ERRORS, Registered, failed, register_operators, run_overridden
from splitc.runtime.engines.product_kernels import ProductKernels
from splitc.runtime.engines.variables import attention_for, set_workspace
from splitc.runtime.errors import EngineError, PackageError
from splitc.runtime.gpu.array import GpuArray, Use
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.gpu.weight_places import SwapBuffer, can_share
from splitc.runtime.gpu.weights import SwappedWeights, place_weights
from splitc.runtime.hardware.devices import Device
from splitc.runtime.log import LOG
from splitc.runtime.package.fused import Fused

PROVIDER = "CUDAExecutionProvider"
# The first ONNX Runtime that takes an array on a GPU as a value, as weights are shared. For Python 3.11 and later.
NEEDED = "onnxruntime-gpu>=1.26"
# The number of previously seen input shapes whose output shapes an engine remembers. A choice: one that is forgotten is
# prepared again before it is captured, and one that is kept takes a few hundred bytes.
REMEMBERED = 64
# What ONNX Runtime would do. To rows that are counted and picked: its Unsqueeze nodes run on the GPU, and sizes come
# and go between it and the CPU. Such a graph is not captured. To GroupQueryAttention whose queries and keys are rotated
# before it: it drops the mask, and takes tables of this request's rows for those of all positions. To a Softmax and the
# addition before it: if that adds one column to all, SIGFPE ends the process (contrib_ops/cuda/math/bias_softmax.cc).
# To a bias in single precision beside quantized weights: it becomes an int32, whose DequantizeLinear runs on the CPU.
# To Slices that take all of an axis: one Split. Replayed on an H200, unequal parts take 15 us in place of 5, equal ones
# 3.7 in place of 4.7.
NOT_ON_GPUS = (
    "GatherToSliceFusion",
    "GroupQueryAttentionFusion",
    "BiasSoftmaxFusion",
    "WeightBiasQuantization",
    "GatherSliceToSplitFusion",
)


class OnnxRuntimeGpuEngine:
    """One ONNX file. `run` launches work on the GPU's stream and does not wait for it.

    The first of its `sessions` runs most requests, the last one captured requests. They share `weights`. The `others`
    are opened when they are asked for, with other searches for plans of convolutions.
    """

    def __init__(
        self,
        name: str,
        sessions: Sequence[ort.InferenceSession],
        gpu: GpuDevice,
        options: Sequence[ort.RunOptions],
        sizes_only: Collection[str],
        capture_blocker: str | None,
        weights: Mapping[str, ort.OrtValue],
        limit: int | None,
        others: Iterator[Sequence[ort.InferenceSession]],
    ) -> None:
        self._name = name
        self._limit = limit
        self.capture_blocker = capture_blocker
        self._gpu = gpu
        self._options = options
        self._weights = weights
        self._others = others
        # Those of earlier searches whose captured requests use their memory.
        self._former: list[Sequence[KeptBinding]] = []
        self._bind(sessions)
        session = sessions[0]
        self.inputs = [value.name for value in session.get_inputs()]
        self.optional = frozenset(value.name for value in session.get_overridable_initializers())
        self.outputs = output_names(session)
        places = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
        on_host = {value.name for value, place in places if "cuda" not in place.name.lower()}
        self._on_host = on_host.difference(sizes_only)
        self._sizes_on_host = on_host.intersection(sizes_only)
        if self._on_host:
            self.capture_blocker = f"{name} takes '{min(self._on_host)}' on the host"
        self._types = {value.name: read_type(value.type) for value in session.get_outputs()}
        # By the shapes of the inputs, the latest last.
        self._seen: OrderedDict[Any, _Seen] = OrderedDict()

    def _bind(self, sessions: Sequence[ort.InferenceSession]) -> None:
        self._session = sessions[0]
        self._bindings = [KeptBinding(opened, ("cuda", self._gpu.index)) for opened in sessions]

    def run(self, values: Mapping[str, Any], into: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        if not self.optional.isdisjoint(values):
            return self._run_overridden(values, into)
        shapes = tuple(values[name].shape for name in self.inputs)
        seen, captured = self._seen.get(shapes), self._gpu.use is Use.CAPTURED
        if self._gpu.tape is not None:
            into = {**into, **self._allocate_outputs(seen, into)}
        # ONNX Runtime would copy these to the host itself, but hold Python's global lock while it waits for the stream.
        # The stream may wait for another rank, whose thread needs the lock.
        on_host = self._gpu.download({name: values[name] for name in self._on_host})
        for name in self._sizes_on_host:
            on_host[name] = np.empty(values[name].shape, number_type(values[name].dtype))
        inputs = {name: values[name] for name in self.inputs if name not in on_host}
        plain, shrinking = self._options
        try:
            how = shrinking if self._gpu.use is Use.LAST and len(self._bindings) > 1 else plain
            given = self._bindings[-1 if captured else 0].run(inputs, on_host, into, how)
        except ERRORS as error:
            if NO_PLAN in str(error) and self._search_on():
                return self.run(values, into)
            why = f"{NO_WAY_BACK}{error}" if NO_PLAN in str(error) else str(error)
            raise failed(f"{self._name} on {self._gpu.name}", why, self._limit, values) from error
        outputs = [_shape_of(name, given, into) for name in self.outputs] if seen is None else seen.outputs
        self._remember(shapes, _Seen(outputs, captured or (seen is not None and seen.prepared)))
        return {name: into[name] if name in into else self._own(name, given[name]) for name in self.outputs}

    def _search_on(self) -> bool:
        """Open the engine with the next search for plans of convolutions. Returns whether there was one."""
        sessions = next(self._others, None)
        if sessions is None:
            return False
        if any(seen.prepared for seen in self._seen.values()):
            self._former.append(self._bindings)
        self._bind(sessions)
        self._seen.clear()
        LOG.info("%s on %s: another search for plans of convolutions, since one has none", self._name, self._gpu.name)
        return True

    def _remember(self, shapes: Any, seen: _Seen) -> None:
        self._seen[shapes] = seen
        self._seen.move_to_end(shapes)
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def _run_overridden(self, values: Mapping[str, GpuArray], into: Mapping[str, GpuArray]) -> dict[str, GpuArray]:
        """Run on values, some of which replace weights. They pass through the host: an IO binding can't take them."""
        fed = {name: host_value(array) for name, array in self._gpu.download(values).items()}
        outputs = run_overridden(f"{self._name} on {self._gpu.name}", self._session, fed)
        made = {name: self._gpu.upload(host_array(value)) for name, value in outputs.items()}
        for name, value in into.items():
            self._gpu.copy_over(value, made[name])
        return {**made, **into}

    def _allocate_outputs(self, seen: _Seen | None, into: Collection[str]) -> dict[str, GpuArray]:
        """Buffers of our own for outputs that are not in `into`: the arena may reuse its memory after the run."""
        if seen is None or not seen.prepared:
            raise EngineError(f"{self._name} has not run with these shapes to be captured")
        known = zip(self.outputs, seen.outputs, strict=True)
        return {name: self._gpu.empty(shape, self._types[name]) for name, shape in known if name not in into}

    def _own(self, name: str, value: ort.OrtValue) -> GpuArray:
        """An output, through DLPack. As an OrtValue it would keep all outputs of its run alive, through the binding."""
        dtype, owner = self._types[name], value
        passed_on = dtype != "bool" and dtype not in CODES  # the types that both DLPack and CuPy support
        if passed_on and math.prod(value.shape()):
            owner = self._gpu.cupy.from_dlpack(value)
        return GpuArray(value.data_ptr(), tuple(value.shape()), dtype, owner)


@dataclass(frozen=True)
class _Seen:
    """The output shapes for some input shapes, in order. If `prepared`, a run can be captured."""

    outputs: Sequence[tuple[int, ...]]
    prepared: bool


def _shape_of(name: str, given: Mapping[str, ort.OrtValue], into: Mapping[str, GpuArray]) -> tuple[int, ...]:
    return into[name].shape if name in into else tuple(given[name].shape())


class OnnxRuntimeGpuBackend(GpuDevice, Backend):
    """ONNX Runtime's CUDA provider on one GPU."""

    def __init__(
        self, device: Device, cuda_graphs: bool = True, trusts_data: bool = False, replays: bool = True
    ) -> None:
        super().__init__(device, cuda_graphs and replays)
        self._cuda_graphs = cuda_graphs
        self._trusts_data = trusts_data
        self._swap_buffer: SwapBuffer | None = None
        self._limit: int | None = None
        # By their places: an engine with slots for adapters has the weights of the one without.
        self._shared: dict[Any, Mapping[str, ort.OrtValue]] = {}
        # By the names of their kernels: an engine's forms have the same ones.
        self._fused: dict[tuple[str, ...], FusedOperators | None] = {}
        self._kernels = ProductKernels(self)
        # The weights that are only on the GPU while their model is at work.
        self.swapped: SwappedWeights | None = None
        self._launching, self._waiting = (_run_options(self.index, waits) for waits in (False, True))

    @classmethod
    def create(cls, options: BackendOptions) -> OnnxRuntimeGpuBackend:
        """The backend of a GPU. Raises PackageError if the GPU or CuPy is missing, or ONNX Runtime is too old."""
        if not hasattr(ort.OrtValue, "from_dlpack"):
            raise PackageError(
                f"ONNX Runtime {ort.__version__} is too old for GPUs: pip install '{NEEDED}', which needs Python 3.11"
            )
        return cls(options.device, options.cuda_graphs, options.trusts_data, options.replays)

    def load(self, path: Path, options: LoadOptions = LoadOptions()) -> OnnxRuntimeGpuEngine:
        _load_libraries()
        shared, communicator = self._place(path, options), options.communicator
        attention = partial(attention_for, gpu=self.index, unaligned_bias=options.entry.unaligned_bias)
        operators = communicator, self._fuse(options.entry.fused)
        opened = partial(self._open, path, operators, shared or {}, attention)
        shares = shared is not None and (options.entry.attends or options.entry.convolves)
        # An engine that waits for others can't run again: they would be in the midst of the run that failed.
        searches = SEARCHES[: None if communicator is None else 1]
        tried = (self._open_sessions(path.name, partial(opened, search), shares, options) for search in searches)
        sessions, capture_blocker = next(tried)
        if communicator is not None and not communicator.capturable:
            capture_blocker = f"{path.name} waits for other ranks while it runs"
        if PROVIDER not in sessions[0].get_providers():  # it was dropped silently
            raise PackageError(
                f"ONNX Runtime dropped its {PROVIDER}, and would have run on the CPU: it needs the versions of CUDA "
                "and cuDNN that it was built for (pip install 'onnxruntime-gpu[cuda,cudnn]'), and onnxruntime and "
                "onnxruntime-gpu must not both be installed"
            )
        is_captured = self._cuda_graphs and options.replays and capture_blocker is None
        run_options = self._run_options_for(is_captured, communicator is None)
        how = run_options, options.entry.sizes_only, capture_blocker, shared or {}, self._limit
        return OnnxRuntimeGpuEngine(path.name, sessions, self, *how, (others for others, _ in tried))

    def _run_options_for(self, is_captured: bool, is_alone: bool) -> Sequence[ort.RunOptions]:
        """Those of an engine, of which a session is opened for captures or not, and which waits for no other rank.

        Usually the host does not wait: later work on the stream waits on the GPU. But without CUDA graphs, ONNX Runtime
        frees the pinned memory of a run's kernels only after such a wait. What is left when the session is deleted is
        freed in a callback of CUDA's, maybe as the last owner of the allocator, and CUDA permits no cudaFreeHost there:
        the process ends (an LSTM on an H200, ONNX Runtime 1.31). An engine that waits for other ranks would keep a
        thread in a call that nothing can end.
        """
        return self._waiting if is_alone and not is_captured else self._launching

    def _fuse(self, kernels: Sequence[Fused]) -> FusedOperators | None:
        names = tuple(kernel.name for kernel in kernels)
        if names not in self._fused:
            self._fused[names] = compile_fused(self, kernels)
        return self._fused[names]

    def _place(self, path: Path, options: LoadOptions) -> Mapping[str, ort.OrtValue] | None:
        """The weights that the engine's sessions share with each other or with other engines; None if none are."""
        weights = options.weights
        if not weights:
            return self._place_anew(path, options)
        places = path.parent, *((weight.file, weight.offset) for weight in weights)
        if places not in self._shared and (shared := self._place_anew(path, options)) is not None:
            self._shared[places] = shared
        return self._shared.get(places)

    def _place_anew(self, path: Path, options: LoadOptions) -> Mapping[str, ort.OrtValue] | None:
        weights = options.weights
        if self._swap_buffer is not None and weights and can_share(weights):
            self.swapped = SwappedWeights(self, self._swap_buffer, path.parent, weights)
            return self.swapped.values
        if self._swap_buffer is not None:
            self.notes.append(f"{path.name}: its weights stay on {self.name} while other modules work")
        if weights is None or not can_share(weights):
            return None
        load = partial(self._kernels.load, options.entry.products, limit=self._limit)
        return place_weights(self, path.parent, weights, load)

    def limit(self, size: int | None) -> None:
        self._limit = size

    def swap_weights(self, buffer: SwapBuffer) -> None:
        self._swap_buffer = buffer

    def bring_in(self) -> None:
        if self.swapped is not None:
            self.swapped.bring_in()

    def _open_sessions(
        self, name: str, opened: Callable[[bool, bool], ort.InferenceSession], shares: bool, options: LoadOptions
    ) -> tuple[list[ort.InferenceSession], str | None]:
        """The engine's sessions, and its capture blocker or None. With `shares`, there may be two sessions.

        ONNX Runtime refuses to capture control flow, and CPU nodes that exchange values with the GPU. It has no error
        code for this, so the session is opened again without CUDA graphs: if that succeeds, capture was refused. Of
        control flow that sizes decide it is not asked: the runtime captures by itself, requests of known sizes.
        """
        capture_blocker = None
        if self._cuda_graphs and options.replays:
            try:
                captured = opened(not options.entry.branches_by_sizes, shares)
                return ([opened(False, False), captured] if shares else [captured]), None
            except PackageError as error:
                capture_blocker = f"{name} can't be loaded with CUDA graphs ({error.__cause__})"
        return [opened(False, False)], capture_blocker

    def _open(
        self,
        path: Path,
        operators: Sequence[Registered | None],
        weights: Mapping[str, ort.OrtValue],
        attention: Callable[[bool], contextlib.AbstractContextManager[Mapping[str, str]]],
        search: Mapping[str, str],
        captured: bool,
        known_shapes: bool,
    ) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.log_severity_level = 4  # errors are raised as exceptions
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # only shape arithmetic runs on the CPU
        # Both take memory beside the arena's, as on CPUs.
        options.enable_mem_pattern = options.enable_mem_reuse = False
        # Weights are allocated outside the arena, which doubles its size whenever it grows.
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        for name, value in weights.items():
            options.add_initializer(name, value)
        register_operators(options, *operators)
        provider = {
            "device_id": str(self.index),
            "user_compute_stream": str(self.stream.ptr),
            "use_tf32": "0",  # float32 is computed in full precision
            "enable_cuda_graph": str(int(captured)),
            **search,
            # By doubling, an arena took 15.3 GB on an H200 where 13.6 are needed, for no gain in time.
            "arena_extend_strategy": "kSameAsRequested",
        }
        if self._limit is not None:
            # Weights that sessions share are not in the arena.
            shared = sum(value.tensor_size_in_bytes() for value in weights.values())
            provider["gpu_mem_limit"] = str(max(1, self._limit - shared))
        with attention(known_shapes) as kernels:
            try:
                providers = [(PROVIDER, {**provider, **kernels}), "CPUExecutionProvider"]
                return open_onnx(path, options, providers, self._trusts_data, NOT_ON_GPUS, on_gpu=True)
            except ERRORS as error:
                raise PackageError(f"ONNX Runtime can't load {path} on {self.name}: {error}") from error

    def begin_request(self) -> None:
        self._kernels.pause()

    def end_request(self) -> None:
        self._kernels.resume()

    def detach(self) -> None:
        self._kernels.close()
        super().detach()
        for operators in filter(None, self._fused.values()):
            operators.release()
        self._fused.clear()

    def stop(self) -> None:
        for options in (*self._launching, *self._waiting):
            options.terminate = True
        super().stop()


def _run_options(index: int, waits: bool) -> tuple[ort.RunOptions, ort.RunOptions]:
    """The options of usual runs on a GPU, and of those after which a session gives unused memory back."""
    both = ort.RunOptions(), ort.RunOptions()
    for options in both:
        options.add_run_config_entry("disable_synchronize_execution_providers", str(int(not waits)))
        options.add_run_config_entry("gpu_graph_id", "-1")  # the runtime captures graphs itself
    both[1].add_run_config_entry("memory.enable_memory_arena_shrinkage", f"gpu:{index}")
    return both


_LOADING = threading.Lock()


def _load_libraries() -> None:
    """Load CUDA and cuDNN from pip's packages, where the provider does not look for them.

    Threads of several ranks may call this at the same time: one loads, and the others wait.
    """
    with _LOADING:
        _load_libraries_once()


@cache
def _load_libraries_once() -> None:
    set_workspace()
    # Otherwise each session warns about a missing plug-in, and convolutions of new shapes say which cuDNN plans they
    # do without. What ends a request is an exception.
    ort.set_default_logger_severity(4)
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
        ort.preload_dlls()
