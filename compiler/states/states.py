"""Finds states: inputs that take an output of the previous request, such as a cache's past and present."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import onnx_ir as ir
from msgspec.structs import replace

from splitc.compiler.graphs.matching import source_through, value_before
from splitc.compiler.graphs.reads import subgraphs
from splitc.compiler.graphs.walks import levels, reached
from splitc.compiler.inference.shapes import fixed_size, may_be_same, sizes_of
from splitc.compiler.nodes import input_at
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.request.shapes import AskedStates
from splitc.compiler.states.own_sizes import mark_model_cache
from splitc.compiler.states.shifted import find_shifted
from splitc.runtime.errors import MisuseError
from splitc.runtime.package.states import State
from splitc.runtime.units import format_shape

# The most nodes between a past and its present: a concatenation, a scatter, an attention operator, and some reshapes.
FARTHEST = 8
# Operators that overwrite parts of their first input.
SCATTERS = ("ScatterElements", "ScatterND", "TensorScatter")
# Tells whether a search upstream ends at a node that makes this value.
Ends = Callable[[ir.Node, ir.Value], bool]


def find_states(graph: Graph, asked: AskedStates = AskedStates()) -> list[State]:
    """The states that are asked for, and those that are detected among the other inputs and outputs.

    They are in the order of the outputs. Raises MisuseError for a pair that is asked for and can't be a state.
    """
    pairs = _check_asked(graph, asked)
    if not asked.alone:
        for output, value in _find_pairs(graph).items():
            if output not in pairs and value not in pairs.values():
                pairs[output] = value
    in_place = _find_in_place(pairs)
    return [
        State(pairs[output].name or "", output.name or "", _grows(pairs[output], output), output in in_place)
        for output in graph.graph.outputs
        if output in pairs
    ]


def written_in_place(graph: Graph, states: Sequence[State]) -> list[State]:
    """The states of a graph that was rewritten, with `in_place` determined anew.

    Growing states in place are marked (`mark_model_cache`): their lengths are not read as lengths of other values.
    """
    ends = {value.name: value for value in (*graph.graph.inputs, *graph.graph.outputs)}
    in_place = _find_in_place({ends[state.output]: ends[state.input] for state in states})
    for state in states:
        if state.grows is not None and ends[state.output] in in_place:
            mark_model_cache(ends[state.input], state.grows)
    return [replace(state, in_place=ends[state.output] in in_place) for state in states]


def _check_asked(graph: Graph, asked: AskedStates) -> dict[ir.Value, ir.Value]:
    """The inputs of the states that the user asks for, by their outputs.

    Raises MisuseError for unknown names, and for pairs of different types or shapes.
    """
    inputs = {value.name or "": value for value in graph.graph.inputs}
    outputs = {value.name or "": value for value in graph.graph.outputs}
    pairs: dict[ir.Value, ir.Value] = {}
    for past, present in asked.outputs.items():
        given = f"{asked.where} {past}={present}"
        for kind, name, values in (("input", past, inputs), ("output", present, outputs)):
            if name not in values:
                raise MisuseError(f"{given}: the model has no {kind} '{name}': it has {', '.join(values)}")
        value, output = inputs[past], outputs[present]
        if output in pairs:
            raise MisuseError(f"{given}: the output replaces '{pairs[output].name}' already, and can be one state only")
        if value.dtype != output.dtype:
            types = [end.dtype.name if end.dtype else "unknown" for end in (value, output)]
            raise MisuseError(f"{given}: the input takes {types[0]} and the output is {types[1]}")
        if value.shape is not None and output.shape is not None and not may_be_same(value.shape, output.shape):
            shapes = " and the output is ".join(format_shape(sizes_of(shape)) for shape in (value.shape, output.shape))
            raise MisuseError(f"{given}: the input takes {shapes}")
        pairs[output] = value
    return pairs


def _find_pairs(graph: Graph) -> dict[ir.Value, ir.Value]:
    """The inputs of detected states, by their outputs.

    An output's past is the nearest input upstream with the same type, rank and fixed sizes, unless a nearer output has
    taken it. At equal distance, inputs and outputs are paired in order. An input that nodes only write parts of is a
    past at any distance. In a model with such states, one of a recurrence may also be multiplied by values that are
    computed, as by the decays of Mamba 2's chunks.

    Equal shapes are not enough. An output that contains the input's product with a weight is a layer's result (with or
    without a residual), unless it is longer. And a model has an input and an output besides its states.
    """
    pairs = _overwritten(graph)
    pairs |= _nearest(graph, pairs, _is_product, _is_alike)
    if pairs:  # recurrences and token shift are only looked for in a model that has other states
        pairs |= _nearest(graph, pairs, lambda node, value: _multiplies_by_weight(graph, node, value), _is_same)
        taken, ends = {*pairs, *pairs.values()}, (graph.graph.inputs, graph.graph.outputs)
        inputs, outputs = ([value for value in values if value not in taken] for values in ends)
        pairs |= find_shifted(graph, outputs, inputs, _is_same)
        passed = ((output, _passed_on(output)) for output in outputs)
        pairs |= {output: kept for output, kept in passed if kept is not None and kept in inputs}
    if not _has_others(graph, pairs):  # a value that grows is more likely a cache
        pairs = {output: value for output, value in pairs.items() if _grows(value, output) is not None}
    updated = any(_takes_in(graph, value, output) for output, value in pairs.items())
    return pairs if updated and _has_others(graph, pairs) else {}


def _takes_in(graph: Graph, past: ir.Value, present: ir.Value) -> bool:
    """Whether the present depends on another input than the past."""

    def reads(value: ir.Value) -> Iterable[ir.Value]:
        node = value.producer()
        return () if node is None or operator_of(node).reads_shape else graph.reads.get(node, ())

    return any(value.is_graph_input() and value is not past for value in reached([present], reads))


def _nearest(
    graph: Graph,
    known: Mapping[ir.Value, ir.Value],
    ends: Ends,
    may_follow: Callable[[ir.Value, ir.Value], bool],
) -> dict[ir.Value, ir.Value]:
    """Further pairs of an output and the nearest input upstream that it may follow, beside the `known` ones.

    See `_inputs_upstream` for `ends`.
    """
    distances = sorted(
        (distance, graph.graph.outputs.index(output), order, output, value)
        for output in graph.graph.outputs
        if output not in known
        for order, (distance, value) in enumerate(_inputs_upstream(graph, output, ends))
        if value not in known.values() and may_follow(value, output)
    )
    pairs: dict[ir.Value, ir.Value] = {}
    for _, _, _, output, value in distances:
        if output not in pairs and value not in pairs.values() and not _is_layer(graph, value, output):
            pairs[output] = value
    return pairs


def _overwritten(graph: Graph) -> dict[ir.Value, ir.Value]:
    """The inputs of states that are made by scatters alone, which overwrite parts of the input, by their outputs."""
    pairs: dict[ir.Value, ir.Value] = {}
    for output in graph.graph.outputs:
        first = source_through(output, "Identity", *SCATTERS)
        is_past = first is not output and first.is_graph_input() and _is_alike(first, output)
        if is_past and first not in pairs.values():
            pairs[output] = first
    return pairs


def _passed_on(output: ir.Value) -> ir.Value | None:
    """The input that an output is, if nothing else reads it: a setting that belongs to a cache, such as its window."""
    value = value_before(output, "Identity")
    return value if value is not None and value.is_graph_input() and len(value.uses()) == 1 else None


def _is_same(past: ir.Value, present: ir.Value) -> bool:
    """Whether type and sizes are the same, and only the first is dynamic: there is no axis of tokens."""
    fixed = past.shape is not None and all(isinstance(size, int) for size in past.shape[1:])
    return fixed and _is_alike(past, present) and past.shape == present.shape


def _has_others(graph: Graph, pairs: Mapping[ir.Value, ir.Value]) -> bool:
    """Whether the model has an output and an input besides these."""
    return bool(set(graph.graph.outputs) - pairs.keys()) and bool(set(graph.graph.inputs) - set(pairs.values()))


def _grows(past: ir.Value, present: ir.Value) -> int | None:
    """The axis along which a state grows in each run: the first one whose symbol changes. None if it does not grow."""
    for axis, (before, after) in enumerate(zip(past.shape or (), present.shape or (), strict=False)):
        known = isinstance(after, int) or after.value is not None
        if known and _changes(before, after):
            return axis
    return None


def _changes(before: int | ir.SymbolicDim, after: int | ir.SymbolicDim) -> bool:
    """Whether a dynamic size of a past is another size in its present.

    "4" is the size 4: exporters name fixed sizes so. A symbol in its place is a size that inference does not know.
    """
    if not isinstance(before, ir.SymbolicDim) or before == after:
        return False
    return before.value != str(after) and not (fixed_size(before) is not None and isinstance(after, ir.SymbolicDim))


def _inputs_upstream(graph: Graph, output: ir.Value, ends: Ends) -> Iterator[tuple[int, ir.Value]]:
    """The model's inputs within FARTHEST nodes above `output`, nearest first, with their distances.

    The search `ends` at products: a past is concatenated, written to, or updated elementwise. From an If it goes on to
    what its branches compute this output from, and from an operator with states to the state alone.
    """

    def above(value: ir.Value) -> Sequence[ir.Value]:
        producer, number = value.producer(), value.index()
        if producer is None or number is None or ends(producer, value):
            return ()
        if producer.op_type == "If":
            branches = list(subgraphs(producer))
            made = reached([b.outputs[number] for b in branches], lambda v: above(v) if v.graph in branches else ())
            return [value for value in made if value.graph not in branches and not value.is_initializer()]
        old = operator_of(producer).states.get(number)
        if old is not None and old < len(producer.inputs) and producer.inputs[old] is not None:
            reads: Sequence[ir.Value | None] = producer.inputs[old : old + 1]
        else:
            reads = graph.reads.get(producer, producer.inputs)
        return [read for read in reads if read is not None and not read.is_initializer()]

    for distance, level in enumerate(islice(levels([output], above), 1, FARTHEST + 1)):
        yield from ((distance, value) for value in level if value.is_graph_input())


def _is_layer(graph: Graph, past: ir.Value, present: ir.Value) -> bool:
    """Whether the present contains a product of the past with a weight, as x + f(x) does, and has the same length."""
    producer = None if _grows(past, present) is not None else present.producer()
    readers = [graph.position[use.node] for use in past.uses() if use.node in graph.position]
    if producer is None or not readers:
        return False
    multiplied = {past: False}  # the values that depend on the past: whether through a product with a weight
    for node in graph.nodes[min(readers) : graph.position[producer] + 1]:
        reads = () if operator_of(node).reads_shape else graph.reads[node]
        if dependent := [multiplied[value] for value in reads if value in multiplied]:
            for value in node.outputs:
                multiplied[value] = any(dependent) or _multiplies_by_weight(graph, node, value)
    return multiplied.get(present, False)


def _is_product(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node's output is a product. Attention's first output is; its others are caches."""
    operator = operator_of(node)
    return value is node.outputs[0] if operator.is_attention else operator.is_product


def _multiplies_by_weight(graph: Graph, node: ir.Node, value: ir.Value) -> bool:
    """Whether a node's output is a product with a weight."""
    return _is_product(node, value) and any(map(graph.is_constant, graph.reads.get(node, ())))


def _find_in_place(pairs: Mapping[ir.Value, ir.Value]) -> set[ir.Value]:
    """The outputs of states that are written in place: of the states of one operator, all or none."""
    written = {present for present, past in pairs.items() if _is_in_place(past, present)}
    apart = {present.producer() for present in pairs.keys() - written}
    return {present for present in written if present.producer() not in apart}


def _is_in_place(past: ir.Value, present: ir.Value) -> bool:
    """Whether an operator computes the present from the past, and can write it in place.

    Nodes that also read the past must lead to that operator alone, so that it writes after they have read. None may
    read the length of a cache that grows: in place, that is the capacity.
    """
    maker = present.producer()
    if maker is None or not operator_of(maker).writes_in_place:
        return False
    readers = [use.node for use in past.uses()]
    if _grows(past, present) is not None and any(operator_of(node).reads_shape for node in readers):
        return False
    below = list(islice(reached(readers, lambda node: () if node is maker else node.successors()), FARTHEST + 1))
    is_for_it = all(
        node is maker or (node.successors() and not any(value.is_graph_output() for value in node.outputs))
        for node in below
    )
    return maker in readers and is_for_it and len(below) <= FARTHEST


def _is_alike(past: ir.Value, present: ir.Value) -> bool:
    """Whether type, rank (at least 2) and fixed sizes are the same. One fixed size, not the last, may differ."""
    if past.dtype != present.dtype or past.shape is None or present.shape is None:
        return False
    if len(past.shape) != len(present.shape) or len(past.shape) < 2:
        return False
    differ = [
        isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(past.shape, present.shape, strict=True)
    ]
    return sum(differ) <= 1 and not differ[-1]


def growing_symbols(graph: Graph, states: list[State]) -> frozenset[str]:
    """The symbols of lengths that grow: sizes of a state's input that differ in its output."""
    values = {value.name: value for value in (*graph.graph.inputs, *graph.graph.outputs)}
    symbols = set()
    for state in states:
        past, present = values[state.input].shape, values[state.output].shape
        for before, after in zip(past or (), present or (), strict=False):
            if isinstance(before, ir.SymbolicDim) and before.value and _changes(before, after):
                symbols.add(before.value)
    return frozenset(symbols)


def settle_state_sizes(graph: Graph) -> None:
    """Set the sizes that operators know of their states (`Operator.state_sizes`) on inputs and outputs, in place."""
    for node in graph.nodes:
        operator = operator_of(node)
        if operator.state_sizes is None:
            continue
        for made, taken in operator.states.items():
            past = input_at(node, taken)
            if past is None or not past.is_graph_input() or made >= len(node.outputs):
                continue
            for value in (past, node.outputs[made]):
                _settle(value, operator.state_sizes(node))


def _settle(value: ir.Value, sizes: Mapping[int, int]) -> None:
    if value.shape is not None and max(sizes, default=0) < len(value.shape):
        value.shape = ir.Shape(
            [size if isinstance(size, int) else sizes.get(axis, size) for axis, size in enumerate(value.shape)]
        )
