"""Measures the time and memory of each block on its device, instead of predicting them (`--profile`)."""

from __future__ import annotations

import hashlib
import platform
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.inference.shapes import shape_of
from splitc.compiler.lowering.stage_graph import stage_graph
from splitc.compiler.packaging.onnx_files import write_model_files
from splitc.compiler.packaging.writer import PackageWriter
from splitc.compiler.planning.measured import single_blocks
from splitc.compiler.remembered import remembered
from splitc.compiler.sizes.made_up import choose_fill
from splitc.compiler.sizes.roles import find_roles
from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import SplitcError
from splitc.runtime.feeds.fills import fill_array
from splitc.runtime.files.cache import read_cache, write_cache
from splitc.runtime.hardware.devices import Device, threads_for
from splitc.runtime.hardware.gpus import identify_gpu
from splitc.runtime.package.manifest import Fill
from splitc.runtime.threads.progress import counted
from splitc.runtime.tools.engine_costs import EngineCosts, measure_engine

# The cache's file of measurements, by a hash of the block's content.
FILE = "block_costs.json"


def measure_blocks(analysis: Analysis, devices: Sequence[Device], threads: int | None) -> list[EngineCosts]:
    """The measured time and memory of each block alone, with the bound shapes and made-up inputs.

    Blocks with the same content (operators, attributes, shapes, types) are measured once, in a process of their own.
    Results are kept in the user's cache folder.
    """
    count = threads_for(devices, threads)
    stages = single_blocks(analysis)
    try:
        costs = msgspec.json.decode(read_cache(FILE), type=dict[str, EngineCosts])
    except msgspec.DecodeError:
        costs = {}
    measured = _measured(analysis)
    costs.update(measured)
    keys = _contents(analysis, devices[0], count)
    for key, stage in counted("measuring blocks", list(zip(keys, stages, strict=True))):
        if key not in costs:
            costs[key] = measured[key] = _measure(analysis, stage, devices[0], count)
            with suppress(SplitcError):  # then other processes measure again, and this plan is as good
                write_cache(FILE, msgspec.json.encode(costs))
    return [costs[key] for key in keys]


@remembered
def _measured(analysis: Analysis) -> dict[str, EngineCosts]:
    """The measurements of a model so far, even if the cache can't be written: auto mode asks for each candidate."""
    return {}


@remembered
def _contents(analysis: Analysis, device: Device, threads: int) -> list[str]:
    return [_content(analysis, stage, device, threads) for stage in single_blocks(analysis)]


def _content(analysis: Analysis, stage: Stage, device: Device, threads: int) -> str:
    """A hash of everything that a block's time and memory depend on, without the names of nodes and values."""
    shapes = analysis.costs.shapes
    where = (
        f"{threads} threads" if device.kind == "cpu" else f"{identify_gpu(device.number_here).name}, replayed in a row"
    )
    lines = [platform.node(), platform.processor(), ort.__version__, where]
    for node in stage.nodes:
        values = [f"{value.dtype}{shape_of(value, shapes)}" for value in (*analysis.graph.reads[node], *node.outputs)]
        attributes = sorted((name, str(attribute.value)) for name, attribute in node.attributes.items())
        lines.append(repr((node.domain, node.op_type, attributes, values)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _measure(analysis: Analysis, stage: Stage, device: Device, threads: int) -> EngineCosts:
    with tempfile.TemporaryDirectory(prefix="splitc-profile-") as folder:
        path = Path(folder) / "block.onnx"
        graph = stage_graph(analysis.graph, stage)
        write_model_files({path: graph}, analysis.graph.model, PackageWriter(path.parent))
        feeds = dict(_inputs(analysis, stage.takes))
        made, shapes = {value.name for value in stage.outputs}, analysis.costs.shapes
        states = [
            state for state in analysis.states if state.in_place and state.input in feeds and state.output in made
        ]
        in_place = {s.output: s.input for s in states if shapes.get(s.output) == shapes.get(s.input)}
        return measure_engine(path, device, threads, feeds, in_place)


def _inputs(analysis: Analysis, values: Iterable[ir.Value]) -> Iterable[tuple[str, Array]]:
    """Arrays for a block's inputs: constants that follow from sizes, and 0 for other integers, a valid index."""
    generator = np.random.default_rng(0)
    sizes = analysis.costs.bound.constants
    roles = find_roles(analysis.graph)
    for value in values:
        assert value.dtype is not None
        if (known := sizes.get(value.name or "")) is not None:
            yield value.name or "", known
            continue
        dtype = str(value.dtype.numpy())
        shape = analysis.costs.shapes.get(value.name or "", ())
        whole = not value.dtype.is_floating_point()
        fallback = Fill("zeros") if whole else Fill("normal")
        fill = choose_fill(value, roles.get(value)) if value.is_graph_input() else fallback
        yield value.name or "", fill_array(fill, dtype, shape, generator)
