"""Attention in place for several rows with several tokens after cached ones, in engines for CPUs.

The operator that writes caches in place takes such a request in one row only. So each one becomes the branch of an If,
whose other branch has the operators that exporters write: it copies its caches, as the model does. The runtime chooses
by a second axis of the input for the caches' length, whose size is 0 or 1. An If takes a microsecond, and its outputs
are written where the caller wants them.

It is done in each engine, after the model was cut: what is known of the operator holds for both branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.fusion.grouped import BY_ROWS
from splitc.compiler.fusion.lengths import SEVERAL_ROWS
from splitc.compiler.fusion.multi_head import DOMAIN

# The places of the operator's inputs.
QUERY, KEY, PASTS, TOTAL, BIAS, SINKS = 0, 1, (3, 4), 6, 10, 11
LAST = (1 << 63) - 1


@dataclass(frozen=True)
class _Rows:
    """What attentions share that have caches of one length.

    Lists of the rows `before` a request and `after` it; whether it is `asked` for the branch.
    """

    before: ir.Value
    after: ir.Value
    asked: ir.Value


def take_several_rows(graph: ir.Graph) -> None:
    """Give attentions in place that are marked so a branch for several rows, in place."""
    inputs = {value.name: value for value in graph.inputs}
    editor, rows = Editor(graph), dict[str, _Rows]()
    for node in list(graph):
        name = node.metadata_props.get(SEVERAL_ROWS)
        if name is None:
            continue
        if name not in inputs:  # another segment computes from it what this one needs of it
            inputs[name] = ir.Value(name=name, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([None, None]))
            graph.inputs.append(inputs[name])
        if name not in rows:
            rows[name] = _rows(inputs[name], node, editor)
        _branch(node, rows[name], editor)


def _rows(length: ir.Value, node: ir.Node, editor: Editor) -> _Rows:
    """Computed before the first attention of a length, from the sizes of the input for it."""
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
    """Put an If in the place of an operator, which becomes a branch of it."""
    outputs = list(node.outputs)
    name = outputs[0].name or ""
    whole = _Branch(f"{name}/in_place", editor)
    inside = whole.add(node.op_type, node.inputs, 3, domain=node.domain, attributes=node.attributes.values())
    several = _Branch(f"{name}/several_rows", editor)
    branches = {"then_branch": several.graph(_Attention(node, several, rows).write(), outputs)}
    branches["else_branch"] = whole.graph(inside, outputs)
    made = ir.node("If", [rows.asked], branches, num_outputs=3, name=node.name)
    ir.convenience.replace_nodes_and_values(editor.graph, node, [node], [made], outputs, made.outputs)
    for old, new in zip(outputs, made.outputs, strict=True):
        new.name, new.type, new.shape = old.name, old.type, old.shape
        new.metadata_props.update(old.metadata_props)


@dataclass
class _Branch:
    """The nodes of a branch. Its values are named after it, as no two may have one name."""

    name: str
    editor: Editor
    nodes: list[ir.Node] = field(default_factory=list)

    def inner(self, end: str) -> _Branch:
        return _Branch(f"{self.name}/{end}", self.editor)

    def add(
        self, operator: str, inputs: Sequence[ir.Value | None], count: int = 1, domain: str = "", attributes: Any = ()
    ) -> Sequence[ir.Value]:
        number = len(self.nodes)
        node = ir.Node(domain, operator, inputs, attributes, num_outputs=count, name=f"{self.name}/{number}")
        for place, value in enumerate(node.outputs):
            value.name = f"{self.name}/{number}_{place}"
        self.nodes.append(node)
        return node.outputs

    def one(self, operator: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """Add a node, and return its only result."""
        return self.add(operator, inputs, domain=domain, attributes=ir.convenience.convert_attributes(attributes))[0]

    def shaped(self, value: ir.Value | None, *sizes: int) -> ir.Value:
        return self.one("Reshape", value, self.editor.numbers(*sizes))

    def cut(self, value: ir.Value | None, axis: int, start: ir.Value, end: ir.Value) -> ir.Value:
        return self.one("Slice", value, start, end, self.editor.numbers(axis))

    def graph(self, made: Sequence[ir.Value], like: Sequence[ir.Value]) -> ir.Graph:
        """The branch as a graph with these outputs."""
        for value, known in zip(made, like, strict=True):
            value.type = known.type
        return ir.Graph([], made, nodes=self.nodes, name=self.name)


@dataclass
class _Attention:
    """Writes the attention of an operator as others, and its presents."""

    node: ir.Node
    branch: _Branch
    rows: _Rows

    @property
    def heads(self) -> int:
        return self.node.attributes["num_heads"].as_int()

    @property
    def kv_heads(self) -> int:
        return self.node.attributes["kv_num_heads"].as_int()

    def input(self, place: int) -> ir.Value | None:
        return self.node.inputs[place] if place < len(self.node.inputs) else None

    def write(self) -> Sequence[ir.Value]:
        """The operator's outputs. Caches with room have more rows than are filled, and take more copies."""
        b, outputs = self.branch, self.node.outputs
        query = self._by_heads(b, QUERY, self.heads)
        # Query heads that share a key head are rows of one product.
        query = b.shaped(query, 0, self.kv_heads, -1, 0)
        new = [self._by_heads(b, KEY + number, self.kv_heads) for number in range(2)]
        tight, roomy = (b.inner(end) for end in ("tight", "room"))
        presents = [tight.one("Concat", self.input(past), row, axis=2) for past, row in zip(PASTS, new, strict=True)]
        without = tight.graph([self._attend(tight, query, *presents), *presents], outputs)
        parts = [self._with_room(roomy, past, row) for past, row in zip(PASTS, new, strict=True)]
        filled, presents = map(list, zip(*parts, strict=True))
        with_room = roomy.graph([self._attend(roomy, query, *filled), *presents], outputs)
        room = b.one("Gather", b.one("Shape", self.input(PASTS[0])), b.editor.numbers(2))
        attributes = ir.convenience.convert_attributes({"then_branch": with_room, "else_branch": without})
        condition = b.shaped(b.one("Greater", room, self.rows.before))
        made, *presents = b.add("If", [condition], 3, attributes=attributes)
        made = b.one("Transpose", b.shaped(made, 0, self.heads, -1, 0), perm=BY_ROWS)
        return [b.shaped(made, 0, 0, -1), *presents]

    def _by_heads(self, b: _Branch, place: int, heads: int) -> ir.Value:
        return b.one("Transpose", b.shaped(self.input(place), 0, 0, heads, -1), perm=BY_ROWS)

    def _with_room(self, b: _Branch, past: int, new: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The filled rows of a cache with the new ones, and its present."""
        before = b.cut(self.input(past), 2, b.editor.numbers(0), self.rows.before)
        rows = b.one("Concat", before, new, axis=2)
        room = b.cut(self.input(past), 2, self.rows.after, b.editor.numbers(LAST))
        return rows, b.one("Concat", rows, room, axis=2)

    def _attend(self, b: _Branch, query: ir.Value, keys: ir.Value, values: ir.Value) -> ir.Value:
        """Attention by key heads: the product of all weights and values, [batch, key heads, rows, size]."""
        scale = self.node.attributes["scale"].as_float()
        scores = b.one("FusedMatMul", query, keys, domain=DOMAIN, alpha=scale, transB=1)
        weights = self._softmax(b, b.shaped(scores, 0, self.heads, -1, 0))
        return b.one("MatMul", b.shaped(weights, 0, self.kv_heads, -1, 0), values)

    def _softmax(self, b: _Branch, scores: ir.Value) -> ir.Value:
        """Scores [batch, heads, new, all] become weights."""
        editor, like = b.editor, self.node.outputs[0]
        if softcap := self.node.attributes.get_float("softcap", 0):
            cap = editor.scalar(softcap, like)
            scores = b.one("Mul", b.one("Tanh", b.one("Div", scores, cap)), cap)
        if (bias := self.input(BIAS)) is not None:
            scores = b.one("Add", scores, bias)
        if self.node.attributes.get_int("causal", 1):
            scores = b.one("Where", self.seen, scores, editor.scalar(-np.inf, like))
        sinks = self.input(SINKS)
        if sinks is None:
            return b.one("Softmax", scores, axis=-1)
        none, first, last = (editor.numbers(number) for number in (0, 1, -1))
        sizes = b.one("Shape", b.cut(scores, 3, none, first))
        column = b.one("Expand", b.shaped(sinks, 1, self.heads, 1, 1), sizes)
        return b.cut(b.one("Softmax", b.one("Concat", scores, column, axis=3), axis=-1), 3, none, last)

    @cached_property
    def seen(self) -> ir.Value:
        """For each new token and all tokens: whether it is the token itself or an earlier one."""
        b = self.branch
        none, one = (b.editor.constant(np.array(number, np.int64)) for number in (0, 1))
        start, end = (b.shaped(value) for value in (self.rows.before, self.rows.after))
        own, all_tokens = b.one("Range", start, end, one), b.one("Range", none, end, one)
        return b.one("GreaterOrEqual", b.shaped(own, -1, 1), all_tokens)
