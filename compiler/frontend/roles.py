"""The roles of a model's inputs: indices, positions or masks, found by what the graph does with them.

An input's name decides only if the graph does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

from splitc.compiler.frontend.graph import Graph
from splitc.compiler.operators.registry import operator_of
from splitc.runtime.package.manifest import Role

# A table with at most this many rows is of token types rather than positions.
KINDS = 16


def find_roles(graph: Graph) -> dict[ir.Value, Role]:
    """The roles of the inputs that have one."""
    inputs = list(graph.graph.inputs)
    rows = {value: min(found) for value in inputs if (found := _rows(value))}
    roles = {value: Role("positions", rows.get(value, 0)) for value in inputs if _are_positions(value)}
    looked_up = {value: size for value, size in rows.items() if value not in roles}
    roles.update(_tell_apart(graph, looked_up))
    masks = _above_masks(graph)
    roles.update({value: Role(masks[value]) for value in inputs if value in masks and value not in roles})
    for value in inputs:
        if value not in roles and (role := _named(value)) is not None:
            roles[value] = role
    return roles


def _named(value: ir.Value) -> Role | None:
    """The role by the input's name, as the last resort."""
    name = (value.name or "").lower()
    return Role("positions") if "position" in name else Role("mask") if "mask" in name else None


def _hands_on(node: ir.Node) -> bool:
    return operator_of(node).rearranges


def _may_rotate(node: ir.Node) -> bool:
    operator = operator_of(node)
    return operator.rearranges or operator.rotates


def _uses(value: ir.Value, hands_on: Callable[[ir.Node], bool] = _hands_on) -> Iterator[tuple[ir.Node, int]]:
    """Each use of a value, as node and input number. Results of nodes that pass the value on are followed."""
    stack, seen = [value], {value}
    while stack:
        for use in stack.pop().uses():
            node, number = use
            yield node, number
            # Rearranging operators pass on their first input (others are sizes), and Concat any of them.
            if hands_on(node) and (number == 0 or node.op_type == "Concat" or not _hands_on(node)):
                new = [output for output in node.outputs if output not in seen]
                seen.update(new)
                stack += new


def _lookups(value: ir.Value) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Each node that looks up rows by a value, with its table."""
    for node, number in _uses(value):
        for indices, place in operator_of(node).lookups:
            table = node.inputs[place] if place < len(node.inputs) else None
            if number == indices and table is not None:
                yield node, table


def _rows(value: ir.Value) -> list[int]:
    """The number of rows of each table of known size that a value indexes."""
    found = []
    for node, table in _lookups(value):
        size = table.shape[node.attributes.get_int("axis", 0)] if table.shape else None
        found += [size] if isinstance(size, int) else []
    return found


def _are_positions(value: ir.Value) -> bool:
    """Whether a value becomes angles, is an index to write at, or looks up the cosines and sines of a rotation."""
    if value.dtype is None or value.dtype.is_floating_point():
        return False
    if any(node.op_type in ("Cos", "Sin") for node, _ in _uses(value, _may_rotate)):
        return True
    if any(number in operator_of(node).positions for node, number in _uses(value)):
        return True
    return any(_turns(node.outputs[0]) for node, table in _lookups(value) if not table.is_graph_input())


def _turns(rows: ir.Value) -> bool:
    """Whether rows of a table are only multiplied with results of products, as cosines and sines are."""
    uses = [(node, number) for node, number in _uses(rows) if not _hands_on(node)]
    return bool(uses) and all(
        node.op_type == "Mul" and (other := node.inputs[1 - number]) is not None and _is_made_by_product(other)
        for node, number in uses
    )


def _tell_apart(graph: Graph, rows: dict[ir.Value, int]) -> dict[ir.Value, Role]:
    """Which inputs that look up rows are tokens, and which are positions.

    The vocabulary is the table with as many rows as an output has columns (logits), or else the largest table. Another
    input of the same shape as the tokens is positions if its table has more than KINDS rows. If there is only one
    input and no vocabulary is known, its name decides.
    """
    if not rows:
        return {}
    widths = {value.shape[-1] for value in graph.outputs if value.shape}
    known = [value for value, size in rows.items() if size in widths]
    tokens = known[0] if known else max(rows, key=lambda value: rows[value])
    found = {}
    for value, size in rows.items():
        other = value is not tokens and size > KINDS and value.shape == tokens.shape
        unsure = len(rows) == 1 and not known
        named = _named(value) if unsure else None
        found[value] = Role(named.kind if named else "positions" if other else "indices", size)
    return found


def _above_masks(graph: Graph) -> dict[ir.Value, str]:
    """The inputs that attention masks are made from ("mask"), and those added to the scores as they are ("bias")."""
    masks: set[ir.Value] = set()
    for reader in graph.nodes:
        if reader.op_type == "Softmax" and reader.inputs[0] is not None:
            masks.update(_added_to_scores(reader.inputs[0]))
        given = (reader.inputs[number] for number in operator_of(reader).masks if number < len(reader.inputs))
        masks.update(value for value in given if value is not None)
    found: dict[ir.Value, str] = {}
    stack, seen = [(value, True) for value in masks], set(masks)
    while stack:
        value, as_fed = stack.pop()
        if value.is_graph_input():
            added = as_fed and value.dtype is not None and value.dtype.is_floating_point()
            found[value] = "bias" if added else "mask"
        node = value.producer()
        if node is None or operator_of(node).multiplies or operator_of(node).reads_shape:
            continue
        above = [each for each in graph.reads[node] if each not in seen]
        seen.update(above)
        stack += [(each, as_fed and _hands_on(node)) for each in above]
    return found


def _may_scale(node: ir.Node) -> bool:
    """Whether the node may come between scores and their softmax, or between a product and the addition of a mask."""
    operator = operator_of(node)
    return operator.scales or operator.rearranges


def _added_to_scores(value: ir.Value) -> Iterator[ir.Value]:
    """The values that are added to scores before a softmax, or that choose among them by Where."""
    stack, seen = [value], {value}
    while stack:
        node = stack.pop().producer()
        if node is None or not _may_scale(node):
            continue
        reads = [each for each in node.inputs if each is not None]
        scores = [each for each in reads if _is_made_by_product(each)]
        if scores and node.op_type in ("Add", "Sub", "Where"):
            yield from (each for each in reads if each not in scores)
        new = [each for each in scores if each not in seen]
        seen.update(new)
        stack += new


def _is_made_by_product(value: ir.Value | None) -> bool:
    """Whether a value is the result of a product or norm, perhaps scaled or rearranged."""
    stack, seen = [value], {value}
    while stack:
        each = stack.pop()
        node = each.producer() if each is not None else None
        if node is None:
            continue
        if operator_of(node).multiplies or operator_of(node).normalizes:
            return True
        if _may_scale(node):
            # The condition of a Where, and lists of sizes, are not data.
            data = node.inputs[1:] if node.op_type == "Where" else node.inputs[: 1 if _hands_on(node) else None]
            new = [each for each in data if each not in seen]
            seen.update(new)
            stack += new
    return False
