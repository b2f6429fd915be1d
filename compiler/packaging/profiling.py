"""Measure the time of each block on its device, instead of estimating it (`--profile`)."""

from __future__ import annotations

import hashlib
import platform
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.stages import Stage, divide_blocks
from splitc.compiler.frontend.made_up import choose_fill
from splitc.compiler.frontend.roles import find_roles
from splitc.compiler.frontend.shapes import shape_of
from splitc.compiler.lowering.stage_graph import stage_graph
from splitc.compiler.packaging.onnx_files import write_model_files
from splitc.compiler.packaging.writer import PackageWriter
from splitc.compiler.remembered import remembered
from splitc.runtime.engines.kinds import ONNXRUNTIME, make_backend
from splitc.runtime.errors import MisuseError
from splitc.runtime.feeds.fills import fill_array
from splitc.runtime.files.cache import read_cache, write_cache
from splitc.runtime.hardware.devices import Device, threads_for
from splitc.runtime.package.manifest import Fill
from splitc.runtime.threads.progress import counted

# Runs of a block that do not count, and those whose median does. A choice: more take longer, of each block.
WARMUP, RUNS = 2, 7
# The cache's file of measured times, by a hash of the block's content.
FILE = "block_seconds.json"


def measure_blocks(analysis: Analysis, devices: Sequence[Device], threads: int | None) -> list[float]:
    """Median seconds of each block by itself, with the bound shapes and made-up inputs.

    Blocks with the same content (operators, attributes, shapes, types) are measured once. The times are kept in the
    user's cache folder.
    """
    count = threads_for(devices, threads)
    blocks = len(analysis.partition.blocks)
    stages = divide_blocks(analysis.graph, analysis.partition, range(1, blocks + 1))[:blocks]
    try:
        seconds = msgspec.json.decode(read_cache(FILE), type=dict[str, float])
    except msgspec.DecodeError:
        seconds = {}
    measured = _measured(analysis)
    seconds.update(measured)
    keys = [_content(analysis, stage, devices[0], count) for stage in stages]
    for key, stage in counted("timing blocks", list(zip(keys, stages, strict=True))):
        if key not in seconds:
            seconds[key] = measured[key] = _measure(analysis, stage, devices[0], count)
            with suppress(MisuseError):  # then other processes measure again, and this plan is as good
                write_cache(FILE, msgspec.json.encode(seconds))
    return [seconds[key] for key in keys]


@remembered
def _measured(analysis: Analysis) -> dict[str, float]:
    """What was measured of a model, whether the cache can be written or not: auto mode asks for each candidate."""
    return {}


def _content(analysis: Analysis, stage: Stage, device: Device, threads: int) -> str:
    """A hash of all that a block's time depends on. Names of nodes and values are left out."""
    shapes = analysis.costs.shapes
    where = f"{threads} threads" if device.kind == "cpu" else str(device.local)
    lines = [platform.node(), platform.processor(), ort.__version__, where]
    for node in stage.nodes:
        values = [*analysis.graph.reads[node], *node.outputs]
        attributes = sorted((name, str(attribute.value)) for name, attribute in node.attributes.items())
        lines.append(repr((node.domain, node.op_type, attributes, [_signature(value, shapes) for value in values])))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _signature(value: ir.Value, shapes: Any) -> str:
    return f"{value.dtype}{shape_of(value, shapes)}"


def _measure(analysis: Analysis, stage: Stage, device: Device, threads: int) -> float:
    with tempfile.TemporaryDirectory(prefix="splitc-profile-") as folder:
        path = Path(folder) / "block.onnx"
        graph = stage_graph(analysis.graph, stage)
        write_model_files({path: graph}, analysis.graph.model, PackageWriter(path.parent))
        backend = make_backend(ONNXRUNTIME, device, threads)
        backend.attach()
        engine = backend.load(path)
        feeds = {name: backend.upload(array) for name, array in _inputs(analysis, stage.takes)}
        seconds = []
        for _ in range(WARMUP + RUNS):
            start = time.perf_counter()
            engine.run(feeds, {})
            backend.wait_all()
            seconds.append(time.perf_counter() - start)
    return median(seconds[WARMUP:])


def _inputs(analysis: Analysis, values: Iterable[ir.Value]) -> Iterable[tuple[str, npt.NDArray[Any]]]:
    """Arrays for a block's inputs. Integers from other blocks are 0, which is a valid index for any table."""
    generator = np.random.default_rng(0)
    roles = find_roles(analysis.graph)
    for value in values:
        assert value.dtype is not None
        dtype = str(value.dtype.numpy())
        shape = analysis.costs.shapes.get(value.name or "", ())
        whole = not value.dtype.is_floating_point()
        fallback = Fill("zeros") if whole else Fill("normal")
        fill = choose_fill(value, roles.get(value)) if value.is_graph_input() else fallback
        yield value.name or "", fill_array(fill, dtype, shape, generator)
