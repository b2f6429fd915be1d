"""Finds the roles of a model's inputs (indices, positions, masks) by how the graph uses them.

An input's name is considered only if the graph does not tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import onnx_ir as ir

from splitc.compiler.graphs.matching import constant
from splitc.compiler.graphs.walks import producers, reached
from splitc.compiler.nodes import input_at, inputs_of
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.request.shapes import Shape
from splitc.runtime.package.manifest import Role

# A table with at most this many rows is of token types rather than positions (BERT has 2, and no model 16 positions).
MOST_TOKEN_TYPES = 16
# What takes the place of hidden scores is at most this: exporters write -1e4 in float16, and less in other types.
HIDDEN = -1e4


def find_roles(graph: Graph) -> dict[ir.Value, Role]:
    """The roles of the inputs whose role is known."""
    inputs = list(graph.graph.inputs)
    rows = {value: min(counts) for value in inputs if (counts := _table_rows(value))}
    roles = {value: Role("positions", rows.get(value, 0)) for value in inputs if _are_positions(value)}
    roles.update(_tell_apart(graph, {value: size for value, size in rows.items() if value not in roles}))
    masks = _above_masks(graph)
    for value in [value for value in inputs if value not in roles]:
        role = Role(masks[value], counted=_is_counted(value)) if value in masks else _named(value)
        if role is not None:
            roles[value] = Role("padding") if role.kind == "mask" and _hides(value) else role
    return roles


def planned_roles(graph: Graph, known: Mapping[ir.Value, Role], shapes: Mapping[str, Shape]) -> dict[ir.Value, Role]:
    """The inputs' roles, with the planned shapes: then the numbers of rows of computed tables are known, too."""
    roles = dict(known)
    for value in graph.graph.inputs:
        role = roles.get(value, Role("indices"))
        if role.kind in ("indices", "positions") and not role.rows and (counts := _table_rows(value, shapes)):
            roles[value] = Role(role.kind, min(counts))
    return roles


def _named(value: ir.Value) -> Role | None:
    """The role from the input's name, as the last resort."""
    name = (value.name or "").lower()
    return Role("positions") if "position" in name else Role("mask") if "mask" in name else None


def _hides(mask: ir.Value) -> bool:
    """Whether a Where replaces what a mask is true for by a large negative number, as torch's key_padding_mask does."""

    def passed_on(known: tuple[ir.Value, bool]) -> Iterator[tuple[ir.Value, bool]]:
        value, negated = known
        for node, number in value.uses():
            if node.op_type in ("Not", "And", "Or", "Cast") or (_rearranges(node) and number == 0):
                yield from ((output, negated != (node.op_type == "Not")) for output in node.outputs)

    chosen = (
        constant(node.inputs[2 if negated else 1])
        for value, negated in reached([(mask, False)], passed_on)
        for node, number in value.uses()
        if node.op_type == "Where" and number == 0
    )
    return any(number is not None and number <= HIDDEN for number in chosen)


def _is_counted(value: ir.Value) -> bool:
    """Whether nodes only sum a mask, or read its length."""
    return all(node.op_type in ("Cast", "ReduceSum") or operator_of(node).reads_shape for node, _ in _uses(value))


def _rearranges(node: ir.Node) -> bool:
    return operator_of(node).rearranges


def _may_make_angles(node: ir.Node) -> bool:
    operator = operator_of(node)
    return operator.rearranges or operator.may_make_angles


def _uses(value: ir.Value, passes_on: Callable[[ir.Node], bool] = _rearranges) -> Iterator[tuple[ir.Node, int]]:
    """The uses of a value, and of the results of nodes that pass it on: the nodes, and the index of their input."""

    def passed_on(value: ir.Value) -> Iterator[ir.Value]:
        for node, number in value.uses():
            # Rearranging operators pass on their first input (others are sizes), and Concat all of its inputs.
            if passes_on(node) and (number == 0 or node.op_type == "Concat" or not _rearranges(node)):
                yield from node.outputs

    return ((node, number) for passed in reached([value], passed_on) for node, number in passed.uses())


def _lookups(value: ir.Value) -> Iterator[tuple[ir.Node, ir.Value]]:
    """The nodes that look up rows by a value, each with its table."""
    for node, number in _uses(value):
        for indices, place in operator_of(node).lookups:
            table = input_at(node, place)
            if number == indices and table is not None:
                yield node, table


def _table_rows(value: ir.Value, shapes: Mapping[str, Shape] = MappingProxyType({})) -> list[int]:
    """The number of rows of each table of known size that a value indexes, to read or to write.

    `shapes` are the planned ones.
    """
    tables = [*_lookups(value), *_row_accesses(value)]
    known = ((node, shapes.get(table.name or "", table.shape)) for node, table in tables)
    sizes = (shape[node.attributes.get_int("axis", 0)] for node, shape in known if shape)
    return [size for size in sizes if isinstance(size, int)]


def _row_accesses(value: ir.Value) -> Iterator[tuple[ir.Node, ir.Value]]:
    """The nodes that read or write single rows by a value, other than lookups, each with the table of the rows."""
    for node, number in _uses(value):
        if number != 1 or node.inputs[0] is None or node.inputs[1] is None:
            continue
        places = node.inputs[1].shape or [None]
        listed = node.op_type in ("GatherND", "ScatterND") and not node.attributes.get_int("batch_dims", 0)
        if node.op_type == "ScatterElements" or (listed and places[-1] == 1):
            yield node, node.inputs[0]


def _are_positions(value: ir.Value) -> bool:
    """Whether a value becomes angles, is an index to write at, or looks up the cosines and sines of a rotation."""
    if value.dtype is None or value.dtype.is_floating_point():
        return False
    if any(node.op_type in ("Cos", "Sin") for node, _ in _uses(value, _may_make_angles)):
        return not _is_total(value)
    if any(number in operator_of(node).positions for node, number in _uses(value)):
        return True
    return any(_rotates(node.outputs[0]) for node, table in _lookups(value) if not table.is_graph_input())


def _is_total(value: ir.Value) -> bool:
    """Whether a scalar is a total number of tokens, from which positions are computed by a subtraction."""
    is_number = value.shape is not None and not value.shape
    return is_number and any(node.op_type == "Sub" and number == 0 for node, number in value.uses())


def _rotates(rows: ir.Value) -> bool:
    """Whether rows of a table are only multiplied by results of products, as cosines and sines are."""
    uses = [(node, number) for node, number in _uses(rows) if not _rearranges(node)]
    return bool(uses) and all(
        node.op_type == "Mul" and (other := node.inputs[1 - number]) is not None and _comes_from_product(other)
        for node, number in uses
    )


def _tell_apart(graph: Graph, rows: dict[ir.Value, int]) -> dict[ir.Value, Role]:
    """The roles of inputs that look up rows: tokens or positions.

    The vocabulary is the table with as many rows as an output has columns (logits), or else the largest table. Another
    input of the same shape as the tokens is positions if its table has more than MOST_TOKEN_TYPES rows. If there is
    only one input and no vocabulary is known, its name decides.
    """
    if not rows:
        return {}
    widths = {value.shape[-1] for value in graph.outputs if value.shape}
    vocabularies = [value for value, size in rows.items() if size in widths]
    tokens = vocabularies[0] if vocabularies else max(rows, key=lambda value: rows[value])
    if len(rows) == 1 and not vocabularies and (named := _named(tokens)) is not None:
        return {tokens: Role(named.kind, rows[tokens])}

    def kind(value: ir.Value) -> str:
        beside = value is not tokens and value.shape == tokens.shape
        return "positions" if beside and rows[value] > MOST_TOKEN_TYPES else "indices"

    return {value: Role(kind(value), size) for value, size in rows.items()}


def _above_masks(graph: Graph) -> dict[ir.Value, str]:
    """The inputs that attention masks are computed from ("mask"), and those that are added to scores as they are
    ("bias").
    """
    masks: dict[ir.Value, None] = {}
    for node in graph.nodes:
        if node.op_type == "Softmax" and node.inputs[0] is not None:
            masks.update(dict.fromkeys(_added_to_scores(node.inputs[0])))
        inputs = (node.inputs[number] for number in operator_of(node).masks if number < len(node.inputs))
        masks.update((value, None) for value in inputs if value is not None)

    def above(value: ir.Value) -> Sequence[ir.Value]:
        node = value.producer()
        if node is None or operator_of(node).is_product or operator_of(node).reads_shape:
            return ()
        return graph.reads[node]

    def unchanged(value: ir.Value) -> Sequence[ir.Value]:
        node = value.producer()
        if node is not None and node.op_type == "Gather":  # it selects or repeats rows
            return [read for read in node.inputs[:1] if read is not None]
        return above(value) if node is not None and _rearranges(node) else ()

    as_fed = set(reached(masks, unchanged))
    return {
        value: "bias" if value in as_fed and value.dtype is not None and value.dtype.is_floating_point() else "mask"
        for value in reached(masks, above)
        if value.is_graph_input()
    }


def _may_precede_softmax(node: ir.Node) -> bool:
    """Whether the node may stand between scores and their softmax, or between a product and the addition of a mask."""
    operator = operator_of(node)
    return operator.may_precede_softmax or operator.rearranges


def _added_to_scores(value: ir.Value) -> Iterator[ir.Value]:
    """The values that are added to scores before a softmax, or that select among them by a Where."""

    def scores(value: ir.Value) -> list[ir.Value]:
        node = value.producer()
        if node is None or not _may_precede_softmax(node):
            return []
        return [read for read in inputs_of(node) if _comes_from_product(read)]

    above = reached([value], scores)
    for node in producers(above):
        if node.op_type in ("Add", "Sub", "Where") and (products := scores(node.outputs[0])):
            yield from (read for read in inputs_of(node) if read not in products)


def _comes_from_product(value: ir.Value) -> bool:
    """Whether a value is the result of a product or norm, maybe scaled or rearranged."""

    def data(value: ir.Value) -> Sequence[ir.Value]:
        node = value.producer()
        if node is None or not _may_precede_softmax(node):
            return ()
        # The condition of a Where, and lists of sizes, are not data.
        inputs = node.inputs[1:] if node.op_type == "Where" else node.inputs[: 1 if _rearranges(node) else None]
        return [read for read in inputs if read is not None]

    above = reached([value], data)
    operators = map(operator_of, producers(above))
    return any(operator.is_product or operator.is_norm for operator in operators)
