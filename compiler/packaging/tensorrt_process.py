"""The process that builds TensorRT engines: reads an order from standard input, writes messages to standard output.

All differences between TensorRT 8.6 to 11 and TensorRT-RTX are in `_open_network` and `_config`. onnx_ir and polygraphy
take longer to import than a small engine takes to build, so they are imported where they are used.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from splitc.compiler.packaging.build_messages import BLOCK, Failed, Finished, Job, Order, Progress, Refusal
from splitc.runtime.engines.kinds import TENSORRT_RTX, find_kind
from splitc.runtime.hardware.gpus import find_cupy
from splitc.runtime.package.manifest import Built

# Seconds between two progress reports. A choice: bars are redrawn ten times a second.
REPORT_EVERY = 0.1
_PARSING = re.compile(r"Parsing node: (.*) \[\w+\]")


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    # TensorRT sometimes prints to standard output: redirect that to the log.
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def tell(message: Any) -> None:
        channel.write(msgspec.json.encode(message) + b"\n")

    trt = importlib.import_module(find_kind(order.kind).module)
    for number, job in enumerate(order.jobs):
        tell(Progress(number, 0.0))
        failed = _run_job(trt, order, number, job, tell)
        if failed is not None:
            tell(failed)
            if job.engine is not None:
                return
    tell(Finished(_describe(trt, order)))


def _run_job(trt: ModuleType, order: Order, number: int, job: Job, tell: Callable[[Any], None]) -> Failed | None:
    """Parse the job's model, and build its engine if it asks for one. Returns the failure, or None."""
    from polygraphy.backend.trt import engine_bytes_from_network
    from polygraphy.exception import PolygraphyException

    _use_gpu(job)
    log = _logger(trt)
    if hasattr(trt, "init_libnvinfer_plugins"):
        trt.init_libnvinfer_plugins(log, "")
    builder, network = _open_network(trt, log)
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(job.source):
        return Failed(number, _refused(parser, log, _nodes(job)))
    if job.engine is None:
        return None
    config = _config(trt, order, job, builder, network, lambda done: tell(Progress(number, done)))
    try:
        engine = engine_bytes_from_network((builder, network), config, save_timing_cache=order.timing_cache)
    except PolygraphyException:
        reason = log.errors[-1] if log.errors else "it gave no reason"
        named = [node for node in _nodes(job) if len(node.node) > 3 and node.node in reason]
        return Failed(number, named, reason)
    try:
        Path(job.engine).write_bytes(memoryview(engine))
    except OSError as error:
        raise SystemExit(f"can't write {job.engine}: {error.strerror}") from error
    return None


def _use_gpu(job: Job) -> None:
    """Build on the job's own GPU, or on the last one if this machine has fewer: all are assumed to be of one kind."""
    cupy = find_cupy()
    if cupy is not None and job.engine is not None:
        with suppress(cupy.cuda.runtime.CUDARuntimeError):
            cupy.cuda.Device(min(job.gpu, cupy.cuda.runtime.getDeviceCount() - 1)).use()


def _logger(trt: ModuleType) -> Any:
    """A logger that keeps errors and the name of the node that is being parsed."""

    class Log(trt.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.parsing = ""

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self.errors.append(message.strip())
            elif match := _PARSING.match(message):
                self.parsing = match[1]

    return Log()


def _open_network(trt: ModuleType, log: Any) -> tuple[Any, Any]:
    """A builder and an empty network, strongly typed (with the graph's number types) if TensorRT supports that."""
    flags = trt.NetworkDefinitionCreationFlag
    builder = trt.Builder(log)
    # TensorRT has strongly typed networks since 9, and always an explicit batch since 10.
    wanted = ("STRONGLY_TYPED",) if hasattr(flags, "STRONGLY_TYPED") else ("EXPLICIT_BATCH",)
    return builder, builder.create_network(sum(1 << int(getattr(flags, name)) for name in wanted))


def _config(
    trt: ModuleType, order: Order, job: Job, builder: Any, network: Any, report: Callable[[float], None]
) -> Any:
    """TensorRT's configuration of a build, with one optimization profile."""
    from polygraphy.backend.trt import Profile, create_config

    options = order.options
    profile = Profile()
    for tensor in map(network.get_input, range(network.num_inputs)):
        sizes = job.sizes[tensor.name]
        if tensor.is_shape_tensor and sizes.values is None:
            raise SystemExit(f"the sizes in '{tensor.name}' depend on data, and an engine is built for known ones")
        profile.add(tensor.name, *(sizes.values if tensor.is_shape_tensor and sizes.values else sizes.shapes))
    wanted: dict[str, Any] = {
        "profiles": [profile],
        "builder_optimization_level": options.optimization_level,
        "version_compatible": options.version_compatible,
        "weight_streaming": options.weight_streaming,
        "strip_plan": options.strip_weights,
    }
    if options.workspace is not None:
        wanted["memory_pool_limits"] = {trt.MemoryPoolType.WORKSPACE: options.workspace}
    if options.hardware_compatible:
        wanted["hardware_compatibility_level"] = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if options.tactic_sources is not None:
        sources = trt.TacticSource.__members__
        if unknown := [name for name in options.tactic_sources if name.upper() not in sources]:
            raise SystemExit(
                f"--tactic-sources: there is no '{unknown[0]}', but {', '.join(sources).lower() or 'none'}"
            )
        wanted["tactic_sources"] = [sources[name.upper()] for name in options.tactic_sources]
    if order.timing_cache and Path(order.timing_cache).exists():
        wanted["load_timing_cache"] = order.timing_cache
    if hasattr(trt, "IProgressMonitor"):
        wanted["progress_monitor"] = _monitor(trt, report)
    if order.kind == TENSORRT_RTX:
        from polygraphy.backend.tensorrt_rtx import create_config_rtx

        return create_config_rtx(builder, network, **wanted)
    if not hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
        wanted |= _precisions(trt, network, job)
    # Collectives inside engines were a preview in 10.16.
    previews = [feature for name, feature in trt.PreviewFeature.__members__.items() if name.startswith("MULTIDEVICE")]
    if previews:
        wanted["preview_features"] = previews
    return create_config(builder, network, **wanted)


def _precisions(trt: ModuleType, network: Any, job: Job) -> dict[str, Any]:
    """The precisions that a network that is not strongly typed may compute in: those of the graph's numbers."""
    import onnx_ir as ir

    graph = ir.load(job.source).graph
    types = {value.dtype for value in (*graph.inputs, *graph.outputs, *graph.initializers.values())}
    if ir.DataType.FLOAT16 not in types:
        return {"fp16": False, "int8": ir.DataType.INT8 in types}
    _keep_float32(trt, network, job)
    return {"fp16": True, "int8": ir.DataType.INT8 in types, "precision_constraints": "obey"}


def _keep_float32(trt: ModuleType, network: Any, job: Job) -> None:
    """Keep float32 layers in float32, in place: a network that is not strongly typed may run them in float16.

    Types come from the ONNX file, by the tensors' names: TensorRT reports float32 for all tensors until it builds.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import ShapeInferencePass

    model = ShapeInferencePass()(ir.load(job.source)).model
    single = {value.name for node in model.graph for value in node.outputs if value.dtype == ir.DataType.FLOAT}
    untyped = (trt.LayerType.CONSTANT, trt.LayerType.SHAPE)
    for layer in map(network.get_layer, range(network.num_layers)):
        outputs = [layer.get_output(number) for number in range(layer.num_outputs)]
        if layer.type in untyped or not outputs or any(output.name not in single for output in outputs):
            continue
        if layer.type != trt.LayerType.CAST:  # a cast has no precision of its own
            layer.precision = trt.float32
        for number in range(layer.num_outputs):
            layer.set_output_type(number, trt.float32)


def _monitor(trt: ModuleType, report: Callable[[float], None]) -> Any:
    """A monitor that reports TensorRT's progress as one number. Phases are nested, each in a step of its parent."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._phases: dict[str, list[int]] = {}
            self._last = 0.0

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self._phases[phase] = [0, max(1, steps)]

        def phase_finish(self, phase: str) -> None:
            self._phases.pop(phase, None)

        def step_complete(self, phase: str, step: int) -> bool:
            self._phases[phase][0] = step + 1
            if time.monotonic() - self._last > REPORT_EVERY:
                self._last = time.monotonic()
                done, part = 0.0, 1.0
                for finished, steps in self._phases.values():
                    done += part * min(finished, steps) / steps
                    part /= steps
                report(min(1.0, done))
            return True

    return Monitor()


def _nodes(job: Job) -> list[Refusal]:
    """The nodes of the job's ONNX file, without a reason."""
    import onnx_ir as ir

    from splitc.compiler.nodes import name_of, operator_name

    return [
        Refusal(name_of(node), operator_name(node), node.metadata_props.get(BLOCK, "?"), "")
        for node in ir.load(job.source).graph
    ]


def _refused(parser: Any, log: Any, nodes: Sequence[Refusal]) -> list[Refusal]:
    """The nodes of the parser's errors. An error that names no node is about the last node that was read."""
    by_name = {node.node: node for node in nodes}
    refused: dict[str, Refusal] = {}
    for error in map(parser.get_error, range(parser.num_errors)):
        place = error.node()
        node = nodes[place] if 0 <= place < len(nodes) else by_name.get(log.parsing)
        node = node or Refusal(log.parsing or "?", "?", "?", "")
        reason = error.desc().strip()
        # The parser says "false" for an operator that it knows by name only.
        text = "the operator is not supported" if reason in ("", "false") else reason
        refused.setdefault(node.node, msgspec.structs.replace(node, reason=text))
    return list(refused.values()) or [Refusal("?", "?", "?", (log.errors or ["it gave no reason"])[-1])]


def _describe(trt: ModuleType, order: Order) -> Built:
    """The version and the GPU of this build. TensorRT-RTX needs no GPU, and builds for all GPUs that it supports."""
    cupy = find_cupy()
    if order.kind == TENSORRT_RTX or cupy is None:
        return Built(trt.__version__)
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    return Built(trt.__version__, properties["name"].decode(), f"{properties['major']}.{properties['minor']}")
