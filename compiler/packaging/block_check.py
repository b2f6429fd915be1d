"""Compares a package with a model that is too large to be run whole: one block of each form at a time.

A block is run alone, with its real weights and made-up inputs, twice: the model's nodes, and the nodes of the ranks'
engines between the same values. Weights are mapped from their files.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_
from pathlib import Path

import msgspec
import numpy as np
import onnx
import onnx_ir as ir

from splitc.compiler.analysis.blocks import Block
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.engine_graphs.gpu_functions import OPSET, written_functions
from splitc.compiler.errors import ModelError
from splitc.compiler.graphs.lazy_tensors import take
from splitc.compiler.graphs.reads import is_random
from splitc.compiler.graphs.walks import ancestors
from splitc.compiler.inference.shapes import BoundShapes, shape_of
from splitc.compiler.lowering.stage_graph import stage_graph
from splitc.compiler.nodes import describe_node, inputs_of, operator_name
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.packaging.joined_graph import JoinedGraph, join_ranks, reads_of
from splitc.compiler.planning.plan import Plan
from splitc.compiler.request.shapes import Shape
from splitc.compiler.sharding.axis_map import small_sizes
from splitc.runtime.arrays.array import Array
from splitc.runtime.arrays.ort_values import run_on_arrays
from splitc.runtime.engines.onnx_session import load_unoptimized
from splitc.runtime.engines.onnxruntime_cpu import ERRORS
from splitc.runtime.errors import SplitcError
from splitc.runtime.feeds.fills import fill_array, make_inputs
from splitc.runtime.package.manifest import Fill, Manifest
from splitc.runtime.requests.preamble import rank_feeds
from splitc.runtime.threads.progress import counted
from splitc.runtime.tools.compare import Difference, compare
from splitc.runtime.tools.rounding import excuse, nudged
from splitc.runtime.units import format_bytes

# The types of shape arithmetic.
SIZES = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
# Weights of at least this many bytes are fed, not copied into the graphs that are run. A choice: most lists of sizes
# are smaller, and operators need these as constants of the graph.
LARGE = 1 << 10


# The errors that running the model's own block may raise.
FAILURES: tuple[type[Exception], ...] = (*ERRORS, ValueError, SplitcError)


@dataclass(frozen=True)
class BlockVerdict:
    """The result of comparing blocks, by name: the differences of each, or the reason why it was skipped."""

    differences: Mapping[str, Sequence[Difference]]
    skipped: Mapping[str, str]
    blocks: int


def compare_blocks(plan: Plan, package: Path, manifest: Manifest, most: int) -> BlockVerdict:
    """Compare one block of each form on each group of devices. Skip those with more than `most` bytes of weights.

    Peak memory is about what the engines of one block hold, whole and in shards, and its values.
    """
    joined, inputs = join_ranks(package, manifest), BlockInputs(plan, package, manifest)
    differences: dict[str, Sequence[Difference]] = {}
    skipped: dict[str, str] = {}
    distinct = dict(_distinct(plan))
    for block in counted("comparing blocks", list(distinct.values())):
        stage = _stage_of(plan, block)
        size = plan.analysis.costs.weight_bytes(stage.nodes)
        if size > most:
            skipped[block.name] = (
                f"its weights are {format_bytes(size)}, and more than {format_bytes(most)} is not loaded"
            )
            continue
        try:
            differences[block.name] = _compare_block(plan, joined, inputs, stage)
        except CannotCompareError as error:
            skipped[block.name] = str(error)
    return BlockVerdict(differences, skipped, len(plan.analysis.partition.blocks))


def _distinct(plan: Plan) -> Iterator[tuple[Hashable, Block]]:
    """One block of each form in each group of devices. The form is operators and the shapes of weights."""
    for group, stage in dict.fromkeys((rank.group, rank.stage) for rank in plan.ranks):
        for block in reversed(stage.blocks):
            yield (group, tuple(_describe(node) for node in block.nodes)), block


def _describe(node: ir.Node) -> Hashable:
    weights = (v for v in inputs_of(node) if v.is_initializer())
    return operator_name(node), tuple((shape_of(value), value.dtype) for value in weights)


def _stage_of(plan: Plan, block: Block) -> Stage:
    """A block as a stage of its own, with the rematerializable nodes and the shape arithmetic that it depends on.

    Shape arithmetic can't be made up, since a rank's has the sizes of its shards. Values that are dequantized for the
    block are taken in their quantized form, in which ranks exchange them.
    """
    graph = plan.analysis.graph

    def is_computed(value: ir.Value) -> bool:
        producer = value.producer()
        return producer is not None and (value.dtype in SIZES or operator_of(producer).dequantizes)

    upstream = plan.analysis.partition.with_upstream(block)
    inside = ancestors(upstream, lambda node: filter(is_computed, graph.reads[node]))
    nodes = sorted(inside, key=graph.position.__getitem__)
    own = set(block.nodes)
    gives = [
        value
        for node in block.nodes
        for value in node.outputs
        if value.is_graph_output() or any(use.node not in own for use in value.uses())
    ]
    reads = dict.fromkeys(value for node in nodes for value in graph.reads[node])
    feeds = [value for value in reads if not value.is_initializer() and value.producer() not in inside]
    return Stage((block,), tuple(nodes), tuple(feeds), (), (), tuple(gives), ())


def _compare_block(plan: Plan, joined: JoinedGraph, inputs: BlockInputs, stage: Stage) -> list[Difference]:
    if drawing := next((node for node in stage.nodes if is_random(node)), None):
        raise CannotCompareError(f"{describe_node(drawing)} draws random numbers")
    run, feeds, whole = _run_whole(plan, inputs, stage)
    own = {rank.part: number for number, rank in enumerate(plan.ranks) if stage.blocks[0] in rank.stage.blocks}
    outputs: dict[str, tuple[ir.Value, int]] = {}
    for value in stage.outputs:
        for number in own.values():
            outputs.update(dict.fromkeys(joined.names(number, value.name or "")[:1], (value, number)))
    actual = _run_ranks(plan, joined, stage, feeds, list(outputs))
    differences = list(_differences(plan, whole, actual, outputs, inputs.manifest.number_type))
    if all(difference.passed for difference in differences):
        return differences
    moved = [compare(whole, run(moved_feeds)) for moved_feeds in nudged(feeds)]
    return excuse(differences, moved)


def _run_ranks(
    plan: Plan, joined: JoinedGraph, stage: Stage, feeds: Mapping[str, Array], outputs: Sequence[str]
) -> dict[str, Array]:
    """The ranks' results for a block, by the names of values in the joined graph."""
    fed = {
        name: _share(plan, value, number, feeds[value.name or ""])
        for value in {*stage.feeds, *plan.analysis.graph.graph.inputs}
        for number in range(len(plan.ranks))
        for name in _places_of(joined, number, value.name or "")
    }
    nodes, missing = joined.needed(outputs, fed)
    if lacking := sorted(missing - fed.keys() - joined.weights.keys()):
        raise CannotCompareError(f"its ranks need '{lacking[0]}', which is not in it")
    weights = {name: joined.weights[name] for name in missing if name in joined.weights}
    try:
        return _run(nodes, weights, {name: fed[name] for name in missing if name in fed}, outputs, joined.opsets)
    except ERRORS as error:
        raise ModelError(
            f"the package's ranks can't run {stage.blocks[0].name}, and the model can: {error}\nNothing was written. "
            "This is a fault of splitc; please report it. --no-verify writes the package as it is."
        ) from error


def _places_of(joined: JoinedGraph, rank: int, name: str) -> list[str]:
    whole = f"{rank}/{name}"
    return [whole, *joined.inside.get(whole, ())]


def _share(plan: Plan, value: ir.Value, rank: int, array: Array) -> Array:
    """A rank's input of a block: its shard of a value, or its summand of a partial value."""
    if plan.split.is_partial(value):
        return array if plan.ranks[rank].part == 0 else np.zeros_like(array)
    return _held(plan, value, rank, array)


def _held(plan: Plan, value: ir.Value, rank: int, array: Array) -> Array:
    return take(array, plan.split.places(value, plan.ranks[rank].part))


def _differences(
    plan: Plan,
    whole: Mapping[str, Array],
    actual: Mapping[str, Array],
    outputs: Mapping[str, tuple[ir.Value, int]],
    number_type: str,
) -> Iterator[Difference]:
    partial: dict[str, Array] = {}
    for name, (value, rank) in outputs.items():
        whole_name = value.name or ""
        if plan.split.is_partial(value):
            partial[whole_name] = partial[whole_name] + actual[name] if whole_name in partial else actual[name]
            continue
        expected = _held(plan, value, rank, whole[whole_name])
        yield from compare({whole_name: expected}, {whole_name: actual[name]}, number_type=number_type)
    for whole_name, array in partial.items():
        yield from compare({whole_name: whole[whole_name]}, {whole_name: array}, number_type=number_type)


def _run_whole(
    plan: Plan, inputs: BlockInputs, stage: Stage
) -> tuple[Callable[[Mapping[str, Array]], dict[str, Array]], dict[str, Array], dict[str, Array]]:
    """A function that runs a block as the model has it, made-up feeds, and the block's results for these.

    The feeds have the first sizes that the block runs at (see `BlockInputs.sizes`).
    """
    graph = plan.analysis.graph
    part = stage_graph(graph, stage)
    nodes = [ir.serde.serialize_node(node) for node in part]
    weights = {name: value.const_value for name, value in part.initializers.items() if value.const_value is not None}
    opsets, outputs = dict(graph.graph.opset_imports), [value.name or "" for value in stage.outputs]

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        return _run(nodes, weights, feeds, outputs, opsets)

    reason = ""
    for bound in inputs.sizes(stage):
        try:
            feeds = inputs.make(stage.feeds, bound)
            return run, feeds, run(feeds)
        except FAILURES as error:
            reason = " ".join(str(error).split())[:200]
    raise CannotCompareError(f"it does not run alone: {reason}")


def _run(
    nodes: Sequence[onnx.NodeProto],
    weights: Mapping[str, ir.TensorProtocol],
    feeds: Mapping[str, Array],
    outputs: Sequence[str],
    opsets: Mapping[str, int],
) -> dict[str, Array]:
    """Run some nodes. Large weights are fed, so that they stay memory-mapped."""
    model = onnx.ModelProto(ir_version=10)
    for domain, version in opsets.items():
        model.opset_import.add(domain=domain, version=version)
    graph = model.graph
    graph.name = "block"
    graph.node.extend(nodes)
    model.functions.extend(written_functions(nodes, opsets.get("", OPSET)))
    read = {name for node in nodes for name in reads_of(node)}
    fed = {name: array for name, array in feeds.items() if name in read or name in outputs}
    for name, tensor in weights.items():
        if tensor.nbytes < LARGE or str(tensor.dtype.numpy()) not in np.sctypeDict:
            graph.initializer.append(ir.serde.serialize_tensor(ir.Tensor(tensor.numpy(), tensor.dtype, name=name)))
            graph.initializer[-1].name = name
        else:
            fed[name] = tensor.numpy()
    for name, array in fed.items():
        kind = ir.DataType.from_numpy(array.dtype)
        # Feeds are declared without sizes: ONNX Runtime would derive constants from these, at times of another type.
        sizes = list(array.shape) if name in weights else [None] * array.ndim
        graph.input.append(onnx.helper.make_tensor_value_info(name, int(kind), sizes))
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    session = load_unoptimized(model.SerializeToString())
    return dict(zip(outputs, run_on_arrays(session, list(outputs), fed), strict=True))


# The elements of a block's values that are few enough for sizes that make more than the planned ones. A choice: to
# compute as many takes about a second.
FEW = 1 << 24


class CannotCompareError(SplitcError):
    """A block can't be compared."""


class BlockInputs:
    """Makes up what blocks of a plan take, for a package in `folder`."""

    def __init__(self, plan: Plan, folder: Path, manifest: Manifest) -> None:
        self._plan, self._folder, self.manifest = plan, folder, manifest
        # Of the sizes of the last block: most blocks run at the same ones.
        self._last: tuple[BoundShapes, Mapping[str, Array]] | None = None

    def sizes(self, stage: Stage) -> list[BoundShapes]:
        """The sizes to run a block at, in this order: small ones, probe sizes, the planned ones.

        Those that make many elements, and more than the planned ones, come last: small ones if most sizes are fixed, as
        those of images may be, and probe sizes if each cache has a symbol of its own.
        """
        planned = self._plan.analysis.costs.bound

        def elements(bound: BoundShapes) -> int:
            return sum(math.prod(bound.shapes.get(v.name or "", ())) for node in stage.nodes for v in node.outputs)

        most = max(FEW, elements(planned))
        others = [*small_sizes(self._plan.analysis), self._plan.split.probe_shapes]
        large = [elements(bound) > most for bound in others]
        return [*compress(others, map(not_, large)), planned, *compress(others, large)]

    def make(self, values: Iterable[ir.Value], bound: BoundShapes) -> dict[str, Array]:
        """Arrays for values, and for the model's inputs, at these sizes.

        Raises SplitcError if the package refuses a request of these sizes, and CannotCompareError.
        """
        if self._last is None or self._last[0] is not bound:
            self._last = bound, self._model_inputs(bound.shapes)
        inputs = self._last[1]
        return {
            name: inputs[name] if name in inputs else _made_up(value, bound)
            for value in dict.fromkeys([*values, *self._plan.analysis.graph.graph.inputs])
            for name in [value.name or ""]
        }

    def _model_inputs(self, shapes: Mapping[str, Shape]) -> Mapping[str, Array]:
        """The model's inputs, and what the runtime adds: lengths of caches, and the preamble's masks and tables."""
        manifest = self.manifest
        if lacking := next((tensor.name for tensor in manifest.inputs if tensor.name not in shapes), None):
            raise CannotCompareError(f"the sizes of '{lacking}' are not known")
        tensors = [msgspec.structs.replace(one, sample_shape=list(shapes[one.name])) for one in manifest.inputs]
        given = make_inputs(tensors)
        return {**given, **rank_feeds(self._folder, manifest, given, keeps_masks=True)}


def _made_up(value: ir.Value, bound: BoundShapes) -> Array:
    """An array for a value that a block takes: a constant if sizes determine it, else random or ones."""
    name = value.name or ""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    dtype = value.dtype or ir.DataType.FLOAT
    if name not in bound.shapes:
        raise CannotCompareError(f"the sizes of '{name}' are not known")
    if (constant := bound.constants.get(name)) is not None:
        return constant.astype(dtype.numpy()).reshape(bound.shapes[name])
    fallback = Fill("randint", 0, 8) if dtype.bitwidth <= 8 and dtype != ir.DataType.BOOL else Fill("ones")
    fill = Fill("normal") if dtype.is_floating_point() else fallback
    return fill_array(fill, str(dtype.numpy()), bound.shapes[name], generator)
