"""Parts of a decomposed GroupQueryAttention: splitting and merging heads, scores, masks and sinks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.caches.grouped import BIAS, SINKS
from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.origins import described
from splitc.compiler.nodes import MICROSOFT, input_at
from splitc.compiler.patterns.operand import SWAP_HEADS

# LatentAttention's queries of shared keys.
SHARED_QUERY = 7
LAST = (1 << 63) - 1


@dataclass
class Nodes:
    """Collects new nodes, in order, for a graph or a branch. `name` is the prefix of their names."""

    name: str
    editor: Editor
    made: list[ir.Node] = field(default_factory=list)

    def inner(self, end: str) -> Nodes:
        """New nodes for a branch inside."""
        return Nodes(f"{self.name}/{end}", self.editor)

    def add(
        self, operator: str, inputs: Sequence[ir.Value | None], count: int = 1, domain: str = "", attributes: Any = ()
    ) -> Sequence[ir.Value]:
        """Add a node. Returns its outputs."""
        number = len(self.made)
        node = ir.Node(domain, operator, inputs, attributes, num_outputs=count, name=f"{self.name}/{number}")
        for place, value in enumerate(node.outputs):
            value.name = f"{self.name}/{number}_{place}"
        self.made.append(node)
        return node.outputs

    def one(self, operator: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """Add a node with one output. Returns the output."""
        return self.add(operator, inputs, domain=domain, attributes=ir.convenience.convert_attributes(attributes))[0]

    def sizes(self, operator: str, *inputs: ir.Value | None, count: int = 1, **attributes: Any) -> ir.Value:
        """Add a node whose output is a list of `count` sizes."""
        made = self.one(operator, *inputs, **attributes)
        made.type, made.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([count])
        return made

    def number(self, number: int) -> ir.Value:
        """A constant integer without axes."""
        return self.editor.constant(np.array(number, np.int64))

    def shaped(self, value: ir.Value | None, *sizes: int) -> ir.Value:
        return self.one("Reshape", value, self.editor.numbers(*sizes))

    def cut(self, value: ir.Value | None, axis: int, start: ir.Value, end: ir.Value) -> ir.Value:
        return self.one("Slice", value, start, end, self.editor.numbers(axis))

    def graph(self, made: Sequence[ir.Value], like: Sequence[ir.Value]) -> ir.Graph:
        """A branch of these nodes and outputs, whose types are those of `like`."""
        for value, known in zip(made, like, strict=True):
            value.type = known.type
        return ir.Graph([], made, nodes=self.made, name=self.name)


def put_in_place(node: ir.Node, made: Sequence[ir.Node], results: Sequence[ir.Value]) -> None:
    """Replace a node by others in its graph. Their results get the names, types and origins of its outputs."""
    old = list(node.outputs[: len(results)])
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], made, old, results)
    for before, after in zip(old, results, strict=True):
        after.name, after.type, after.shape = before.name, before.type, before.shape
        after.meta.update(before.meta)
        after.metadata_props.update(before.metadata_props)


@dataclass(frozen=True)
class Attention:
    """A GroupQueryAttention, and the nodes that its parts are decomposed into."""

    node: ir.Node

    @property
    def heads(self) -> int:
        return self.node.attributes["num_heads"].as_int()

    @property
    def kv_heads(self) -> int:
        return self.node.attributes["kv_num_heads"].as_int()

    @property
    def is_causal(self) -> bool:
        return bool(self.node.attributes.get_int("causal", 1))

    @property
    def token_axis(self) -> int:
        """The axis of new tokens in the queries."""
        return 1

    def input(self, place: int) -> ir.Value | None:
        return input_at(self.node, place)

    def query_rows(self, query: ir.Value | None, b: Nodes) -> ir.Value:
        """Reshape queries [batch, length, heads x size] to [batch, key heads, rows, size].

        All query heads that share a key head become rows of one product.
        """
        return b.shaped(self.by_heads(query, self.heads, b), 0, self.kv_heads, -1, 0)

    def by_heads(self, value: ir.Value | None, heads: int, b: Nodes) -> ir.Value:
        """Reshape [batch, length, heads x size] to [batch, heads, length, size]."""
        return b.one("Transpose", b.shaped(value, 0, 0, heads, -1), perm=SWAP_HEADS)

    def merged(self, made: ir.Value, b: Nodes) -> ir.Value:
        """Reshape [batch, key heads, rows, size] to the operator's output, [batch, length, heads x size]."""
        return b.shaped(b.one("Transpose", b.shaped(made, 0, self.heads, -1, 0), perm=SWAP_HEADS), 0, 0, -1)

    def attend(
        self,
        query: ir.Value,
        keys: ir.Value,
        values: ir.Value,
        b: Nodes,
        seen: ir.Value | None,
        size: int = 0,
    ) -> ir.Value:
        """Softmax(query x keys) x values, [batch, key heads, rows, size].

        `seen` is a mask of the scores [batch, heads, new, all]. Scores are scaled by the operator's attribute, or by
        1 / sqrt(size).
        """
        scores = self._scores(query, keys, values, b, size)
        weights = self._softmax(b.shaped(scores, 0, self.heads, -1, 0), b, seen)
        return b.one("MatMul", b.shaped(weights, 0, self.kv_heads, -1, 0), values)

    def _scores(self, query: ir.Value, keys: ir.Value, values: ir.Value, b: Nodes, size: int) -> ir.Value:
        return self._product(query, keys, b, self.node.attributes.get_float("scale", 0) or 1 / math.sqrt(size))

    def _product(self, query: ir.Value, keys: ir.Value, b: Nodes, scale: float) -> ir.Value:
        return b.one("FusedMatMul", query, keys, domain=MICROSOFT, alpha=scale, transB=1)

    def _softmax(self, scores: ir.Value, b: Nodes, seen: ir.Value | None) -> ir.Value:
        editor, like = b.editor, described(self.node.outputs[0])
        if softcap := self.node.attributes.get_float("softcap", 0):
            cap = editor.scalar(softcap, like)
            scores = b.one("Mul", b.one("Tanh", b.one("Div", scores, cap)), cap)
        if (bias := self.input(BIAS)) is not None:
            scores = b.one("Add", scores, bias)
        if seen is not None:
            scores = b.one("Where", seen, scores, editor.scalar(-np.inf, like))
        sinks = self.input(SINKS)
        if sinks is None:
            return b.one("Softmax", scores, axis=-1)
        none, first, last = (editor.numbers(number) for number in (0, 1, -1))
        sizes = b.one("Shape", b.cut(scores, 3, none, first))
        column = b.one("Expand", b.shaped(sinks, 1, self.heads, 1, 1), sizes)
        return b.cut(b.one("Softmax", b.one("Concat", scores, column, axis=3), axis=-1), 3, none, last)


@dataclass(frozen=True)
class AttentionOnLatents(Attention):
    """A LatentAttention (caches/latent_cache.py): keys are the latents, and further numbers that all heads share."""

    @property
    def token_axis(self) -> int:
        return 2

    def query_rows(self, query: ir.Value | None, b: Nodes) -> ir.Value:
        """Reshape queries [batch, heads, length, size] to [batch, 1, rows, size]."""
        return b.shaped(query, 0, 1, -1, 0)

    def by_heads(self, value: ir.Value | None, heads: int, b: Nodes) -> ir.Value:
        """New rows, which are [batch, 1, length, size] already."""
        assert value is not None
        return value

    def merged(self, made: ir.Value, b: Nodes) -> ir.Value:
        """Reshape [batch, 1, rows, size] to the operator's output, [batch, heads, length, size]."""
        return b.shaped(made, 0, self.heads, -1, 0)

    def _scores(self, query: ir.Value, keys: ir.Value, values: ir.Value, b: Nodes, size: int) -> ir.Value:
        scale = self.node.attributes["scale"].as_float()
        shared = self.query_rows(self.input(SHARED_QUERY), b)
        return b.one("Add", self._product(query, values, b, scale), self._product(shared, keys, b, scale))
