"""Lets attention with caches in place take batches with several tokens behind cached ones, in engines for CPUs.

GroupQueryAttention takes several tokens behind cached ones in a batch of one row only. So the operator becomes a branch
of an If; the other branch is its decomposition, which concatenates the caches. The runtime chooses the branch by the
second size of the input for the caches' length, 0 or 1. An If takes a microsecond, and its outputs are written to the
caller's buffers.

Engines are rewritten after the model was cut, so the passes before see only the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.caches.grouped import KEY, PASTS, QUERY, TOTAL
from splitc.compiler.caches.lengths import SEVERAL_ROWS
from splitc.compiler.engine_graphs.attention_nodes import LAST, Attention, Nodes, put_in_place
from splitc.compiler.graphs.editor import Editor


@dataclass(frozen=True)
class _Rows:
    """What attentions with caches of one length share.

    One-element lists of the filled rows `before` a request and `after` it; `asked`: whether to take the decomposition.
    """

    before: ir.Value
    after: ir.Value
    asked: ir.Value


def take_several_rows(graph: ir.Graph) -> None:
    """Add the branch to each marked attention, in place."""
    inputs = {value.name: value for value in graph.inputs}
    editor, rows = Editor(graph), dict[str, _Rows]()
    for node in list(graph):
        name = node.metadata_props.get(SEVERAL_ROWS)
        if name is None:
            continue
        if name not in inputs:  # another segment reads it
            inputs[name] = ir.Value(name=name, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([None, None]))
            graph.inputs.append(inputs[name])
        if name not in rows:
            rows[name] = _rows(inputs[name], node, editor)
        _branch(node, rows[name], editor)


def _rows(length: ir.Value, node: ir.Node, editor: Editor) -> _Rows:
    """Add the nodes that compute these values before the first attention of a length, from the shape of its input."""
    made = list[ir.Value]()

    def add(
        operator: str, *inputs: ir.Value | None, dtype: ir.DataType = ir.DataType.INT64, **attributes: Any
    ) -> ir.Value:
        made.append(editor.before(node, operator, *inputs, dtype=dtype, **attributes))
        made[-1].name = f"{length.name}/rows_{len(made)}"
        return made[-1]

    sizes = add("Shape", length)
    second = add("Gather", sizes, editor.constant(np.array(1, np.int64)))
    asked = add("Cast", second, dtype=ir.DataType.BOOL, to=ir.DataType.BOOL)
    after = add(
        "Cast", add("Reshape", node.inputs[TOTAL], editor.numbers(1), dtype=ir.DataType.INT32), to=ir.DataType.INT64
    )
    return _Rows(add("Gather", sizes, editor.numbers(0)), after, asked)


def _branch(node: ir.Node, rows: _Rows, editor: Editor) -> None:
    """Replace an operator by an If with the operator in one branch and its decomposition in the other."""
    outputs = list(node.outputs)
    name = outputs[0].name or ""
    whole = Nodes(f"{name}/in_place", editor)
    inside = whole.add(node.op_type, node.inputs, 3, domain=node.domain, attributes=node.attributes.values())
    several = Nodes(f"{name}/several_rows", editor)
    branches = {"then_branch": several.graph(_Copying(Attention(node), several, rows).write(), outputs)}
    branches["else_branch"] = whole.graph(inside, outputs)
    made = ir.node("If", [rows.asked], branches, num_outputs=3, name=node.name)
    put_in_place(node, [made], made.outputs)


@dataclass
class _Copying:
    """Writes the decomposition, which concatenates caches."""

    attention: Attention
    nodes: Nodes
    rows: _Rows

    def write(self) -> Sequence[ir.Value]:
        """The operator's outputs. Caches with unfilled rows are cut before new rows are concatenated."""
        one, b, outputs = self.attention, self.nodes, self.attention.node.outputs
        query = one.query_rows(one.input(QUERY), b)
        new = [one.by_heads(one.input(KEY + number), one.kv_heads, b) for number in range(2)]
        tight, roomy = (b.inner(end) for end in ("tight", "room"))
        presents = [tight.one("Concat", one.input(past), row, axis=2) for past, row in zip(PASTS, new, strict=True)]
        without = tight.graph([self._attend(tight, query, *presents), *presents], outputs)
        parts = [self._with_room(roomy, past, row) for past, row in zip(PASTS, new, strict=True)]
        filled, presents = map(list, zip(*parts, strict=True))
        with_room = roomy.graph([self._attend(roomy, query, *filled), *presents], outputs)
        room = b.one("Gather", b.one("Shape", one.input(PASTS[0])), b.editor.numbers(2))
        attributes = ir.convenience.convert_attributes({"then_branch": with_room, "else_branch": without})
        condition = b.shaped(b.one("Greater", room, self.rows.before))
        made, *presents = b.add("If", [condition], 3, attributes=attributes)
        return [one.merged(made, b), *presents]

    def _with_room(self, b: Nodes, past: int, new: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The filled rows of a cache with new rows concatenated, and the present."""
        cache = self.attention.input(past)
        before = b.cut(cache, 2, b.editor.numbers(0), self.rows.before)
        rows = b.one("Concat", before, new, axis=2)
        room = b.cut(cache, 2, self.rows.after, b.editor.numbers(LAST))
        return rows, b.one("Concat", rows, room, axis=2)

    def _attend(self, b: Nodes, query: ir.Value, keys: ir.Value, values: ir.Value) -> ir.Value:
        one = self.attention
        return one.attend(query, keys, values, b, self.seen if one.is_causal else None)

    @cached_property
    def seen(self) -> ir.Value:
        """The causal mask, [new tokens, all tokens]."""
        b = self.nodes
        none, one = b.number(0), b.number(1)
        start, end = (b.shaped(value) for value in (self.rows.before, self.rows.after))
        own, all_tokens = b.one("Range", start, end, one), b.one("Range", none, end, one)
        return b.one("GreaterOrEqual", b.shaped(own, -1, 1), all_tokens)
