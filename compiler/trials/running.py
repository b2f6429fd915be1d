"""Runs tiny nodes in ONNX Runtime, whole and as three ranks would run them, and compares the results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from splitc.compiler.engine_graphs.decomposed_attention import decompose_attention
from splitc.compiler.graphs.lazy_tensors import take
from splitc.compiler.inference.shapes import BoundShapes
from splitc.compiler.lowering.rank_forms import COLLECTIVE
from splitc.compiler.lowering.rank_graph import rank_graph
from splitc.compiler.nodes import operator_name
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.gpu_kernels import LATENT
from splitc.compiler.operators.operation import Axes
from splitc.compiler.sharding.sharded_model import ShardedModel
from splitc.compiler.trials.forms import Form
from splitc.compiler.trials.tiny import RANKS, SIZINGS, CannotTryError, Sizing, TinyModel, tiny_model
from splitc.runtime.arrays.array import Array
from splitc.runtime.engines.onnx_session import load_unoptimized
from splitc.runtime.tools.compare import compare

# The beginning of the result for a form that does not run whole at any of the made-up sizes.
UNTRIED = "it could not be tried: "
# The number of forms in one session. All of them run again for each one that fails. Measured on models with 24 to 250
# forms, against all forms in one session: 0.4 times the time for two models in which some fail, the same for others.
AT_ONCE = 16
# The number of steps by which quantized results may differ: a sum in another order is rounded differently.
ROUNDING = 1


def try_forms(forms: Sequence[Form], versions: Mapping[str, int], bound: BoundShapes) -> dict[str, str]:
    """The result for each form, by digest: empty if its rule holds, else the error.

    Several forms run in one session. If that fails, they are bisected, down to the form that causes it.
    """
    results: dict[str, str] = {}

    def attempt(batch: Sequence[Form], sizings: Sequence[Sizing], first: Exception | None = None) -> None:
        try:
            tiny = tiny_model(batch, sizings[0], versions, bound)
            made = _run(tiny, RANKS)
        except Exception as error:  # a rule, the lowering or ONNX Runtime may raise anything: this is what is tested
            if len(batch) == 1:
                if _runs_whole(batch, sizings[0], versions, bound):
                    results[batch[0].digest] = _in_one_line(error)
                elif sizings[1:]:
                    attempt(batch, sizings[1:], first or error)
                else:
                    results[batch[0].digest] = UNTRIED + _in_one_line(first or error)
                return
            for part in _bisect(batch, error):
                attempt(part, sizings)
            return
        for form, node in zip(batch, tiny.nodes, strict=True):
            misfit = _misfit(tiny.sharded, node, made)
            if misfit and sizings[1:]:
                attempt([form], sizings[1:])
            else:
                results[form.digest] = misfit or _judge(tiny.sharded, node, form, made)

    for first in range(0, len(forms), AT_ONCE):
        attempt(forms[first : first + AT_ONCE], SIZINGS)
    return results


def _bisect(batch: Sequence[Form], error: Exception) -> list[Sequence[Form]]:
    """The form that an error names, and the others; or two halves, if it names none."""
    named = error.number if isinstance(error, CannotTryError) else _named(str(error))
    if named is not None and named < len(batch):
        return [[batch[named]], [*batch[:named], *batch[named + 1 :]]]
    middle = len(batch) // 2
    return [batch[:middle], batch[middle:]]


def _named(text: str) -> int | None:
    """The number of the form whose node ONNX Runtime's error names."""
    match = re.search(r"(?:Name:'|Node \(|node \()(?:\d/)?f(\d+)['_)]", text)
    return int(match[1]) if match else None


def _runs_whole(forms: Sequence[Form], sizing: Sizing, versions: Mapping[str, int], bound: BoundShapes) -> bool:
    """Whether the whole nodes run at these sizes."""
    try:
        _run(tiny_model(forms, sizing, versions, bound), 0)
    except Exception:
        return False
    return True


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:300] if isinstance(error, CannotTryError) else f"{type(error).__name__}: {text[:300]}"


def _run(tiny: TinyModel, ranks: int) -> dict[str, Array]:
    """The outputs of the whole nodes by name, and of each rank's by `rank/name`."""
    graph = tiny.sharded.graph.graph
    proto = ir.to_proto(ir.Model(_runnable(graph.clone()), ir_version=10))
    feeds = dict(tiny.feeds)
    for rank in range(ranks):
        part = rank_graph(tiny.sharded, tiny.stage, rank)
        own = {value.name for value in part.inputs}
        _add(proto.graph, ir.serde.serialize_graph(_runnable(part)), rank)
        for value in graph.inputs:
            name = value.name or ""
            if name in own:
                feeds[f"{rank}/{name}"] = _feed(tiny, value, rank)
    _join_collectives(proto.graph, ranks)
    _widen(proto.graph)
    session = load_unoptimized(proto.SerializeToString())
    taken = {value.name: _WIDE.sub("", value.name) for value in session.get_inputs()}
    fed = {name: feeds[of].astype(np.float32) if name != of else feeds[of] for name, of in taken.items()}
    names = [value.name for value in session.get_outputs()]
    return {_WIDE.sub("", name): array for name, array in zip(names, session.run(names, fed), strict=True)}


# Types that numpy lacks: they are cast inside the model, since ONNX Runtime does not take or return them as arrays.
_NARROW = frozenset(
    number
    for name, number in onnx.TensorProto.DataType.items()
    if name in ("BFLOAT16", "INT4", "UINT4") or name.startswith("FLOAT8")
)
_WIDE = re.compile("/as float$")


def _widen(graph: onnx.GraphProto) -> None:
    """Cast inputs and outputs of narrow types from and to float32, which is lossless."""
    float32 = onnx.TensorProto.FLOAT
    for value in (*graph.input, *graph.output):
        kind = value.type.tensor_type.elem_type
        if kind not in _NARROW:
            continue
        name, wide = value.name, f"{value.name}/as float"
        ends = [wide, name] if any(value is given for given in graph.input) else [name, wide]
        to = kind if ends[0] == wide else float32
        graph.node.append(onnx.helper.make_node("Cast", ends[:1], ends[1:], name=wide, to=to))
        value.name, value.type.tensor_type.elem_type = wide, float32


def _runnable(graph: ir.Graph) -> ir.Graph:
    """A graph in which the compiler's own operators are decomposed, in place.

    ONNX Runtime checks both branches of their If. So it must not know sizes that suit only one of them.
    """
    for value in (value for node in graph if operator_name(node) == LATENT for value in node.inputs):
        if value is not None and value.is_graph_input():
            value.shape = None
    decompose_attention(graph, (LATENT,))
    return graph


def _rename(graph: Any, rank: int) -> None:
    """Put the rank before all names in a graph and its branches."""

    def renamed(name: str) -> str:
        return f"{rank}/{name}" if name else ""

    for node in graph.node:
        node.name = renamed(node.name)
        node.input[:] = [renamed(name) for name in node.input]
        node.output[:] = [renamed(name) for name in node.output]
        for branch in (attribute.g for attribute in node.attribute if attribute.HasField("g")):
            _rename(branch, rank)
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = renamed(value.name)


def _add(whole: onnx.GraphProto, part: Any, rank: int) -> None:
    """Append a rank's graph to another one, with the rank as a prefix of all names."""
    _rename(part, rank)
    whole.node.extend(part.node)
    whole.initializer.extend(part.initializer)
    given = {tensor.name for tensor in part.initializer}
    whole.input.extend(value for value in part.input if value.name not in given)
    whole.output.extend(part.output)


def _join_collectives(graph: onnx.GraphProto, ranks: int) -> None:
    """Replace each collective by a Sum or Max of the values of all ranks, which are in the same graph."""
    for node in graph.node:
        if node.op_type != COLLECTIVE:
            continue
        kind = next(attribute.s for attribute in node.attribute if attribute.name == "reduce_op")
        own = node.input[0].partition("/")[2]
        del node.attribute[:]
        node.op_type = "Max" if kind == b"max" else "Sum"
        node.input[:] = [f"{rank}/{own}" for rank in range(ranks)]


def _feed(tiny: TinyModel, value: ir.Value, rank: int) -> Array:
    """A rank's input: its shard, or its summand of a partial value."""
    name = value.name or ""
    if name in tiny.parts:
        return tiny.parts[name][rank]
    return _shard(tiny.sharded, tiny.sharded.axes(value), rank, tiny.feeds[name])


def _shard(sharded: ShardedModel, axes: Axes, rank: int, array: Array) -> Array:
    return take(array, sharded.shards(rank).places(axes))


def _misfit(sharded: ShardedModel, node: ir.Node, made: Mapping[str, Array]) -> str:
    """How the shapes of the whole node's results differ from its rule's; empty if they don't.

    They may differ, since the sizes of atoms were made up independently. Only axes whose atoms occur in its inputs are
    compared: a size that depends on data counts as 1.
    """
    operation = sharded.axis_map.operations[node]
    known = {atom for axes in operation.inputs for atom in ax.atoms_of(axes)}
    for value, axes in zip(node.outputs, operation.outputs, strict=True):
        if not value.name or axes is None:
            continue
        shape = made[value.name].shape
        if len(shape) != len(axes):
            return f"a result has {len(shape)} axes, and its rule says {len(axes)}"
        for axis, size in zip(axes, shape, strict=True):
            if axis and known.issuperset(ax.atoms(axis)) and ax.size_of(axis) != size:
                return f"a result's axis has the size {size}, and its rule says {ax.size_of(axis)}"
    return ""


def _judge(sharded: ShardedModel, node: ir.Node, form: Form, made: Mapping[str, Array]) -> str:
    """How the ranks' results differ from the whole node's; empty if they don't."""
    for name in (value.name for value in node.outputs if value.name):
        whole, parts = made[name], [made[f"{rank}/{name}"] for rank in range(RANKS)]
        if form.gives_partial:
            if any(part.shape != whole.shape for part in parts):
                return f"partial results of the shapes {', '.join(str(p.shape) for p in parts)} for {whole.shape}"
            pairs = [(whole, np.asarray(sum(parts[1:], parts[0])))]
        else:
            axes = sharded.axes(next(value for value in node.outputs if value.name == name))
            pairs = [(_shard(sharded, axes, rank, whole), part) for rank, part in enumerate(parts)]
        for expected, actual in pairs:
            if reason := _difference(expected, actual):
                return reason
    return ""


def _difference(expected: Array, actual: Array) -> str:
    """How an array differs from the expected one beyond the tolerance; empty if it doesn't."""
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return f"a rank makes {actual.dtype}{actual.shape} instead of {expected.dtype}{expected.shape}"
    if np.array_equal(expected, actual):
        return ""
    if expected.dtype.kind == "O":
        return "a rank makes other texts"
    if expected.dtype.kind in "iu" and expected.dtype.itemsize == 1:
        steps = np.abs(expected.astype(np.int32) - actual.astype(np.int32)).max(initial=0)
        return "" if steps <= ROUNDING else f"a rank's quantized result is off by {steps} steps"
    (comparison,) = compare({"": expected}, {"": actual}, number_type=str(expected.dtype))
    return "" if comparison.passed else f"a rank's result is off by {comparison.relative:.1e} of its largest value"
