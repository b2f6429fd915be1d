"""Fuse what exporters wrote out, for engines that do not do it themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.graph import Graph, complete
from splitc.compiler.frontend.probe_sizes import bind_other_sizes
from splitc.compiler.frontend.reads import all_nodes, has_subgraphs
from splitc.compiler.frontend.shapes import BoundShapes
from splitc.compiler.fusion.attention import NotFusedError, find_attention
from splitc.compiler.fusion.kernels import ON_GPUS, Gains
from splitc.compiler.fusion.multi_head import DOMAIN, OPERATOR, write_multi_head_attention
from splitc.compiler.fusion.norm import OPERATOR as NORM
from splitc.compiler.fusion.norm import find_norm, write_norm
from splitc.compiler.fusion.rotary import find_rotary, looks_rotary
from splitc.compiler.fusion.rotary_embedding import OPERATOR as ROTARY
from splitc.compiler.fusion.rotary_embedding import write_rotary
from splitc.compiler.fusion.sizes import Sizes, known_shapes
from splitc.compiler.fusion.softmax import find_softmax
from splitc.compiler.fusion.tables import Tables
from splitc.compiler.request.shapes import Shape


@dataclass(frozen=True)
class Fate:
    """What became of what looks like attention, a norm or a rotary embedding: its operator, or why there is none.

    The place is called after its Softmax, its mean or its last node.
    """

    place: str
    operator: str | None
    why: str | None = None
    kind: str = "attention"


@dataclass(frozen=True)
class Fused:
    """A graph whose attentions, norms and rotary embeddings are one operator each where that can be.

    `bound` are the shapes of all its values.
    """

    graph: Graph
    bound: BoundShapes
    fates: tuple[Fate, ...]


def fuse(graph: Graph, shapes: Mapping[str, Shape], bound: BoundShapes, gains: Gains = ON_GPUS) -> Fused:
    """Fuse the graph's norms, rotary embeddings and attention where that gains, in place.

    `bound` are the shapes of the graph's values with the inputs' `shapes`.
    """
    work = _Work(graph, shapes, bound, gains, known_shapes(bound), Editor(graph.graph))
    # Attention comes last: its queries and keys may be what became one operator.
    parts = {node: work.norm(node) or work.rotary(node) for node in graph.nodes}
    fates = [fate for node in graph.nodes if (fate := parts[node] or work.attention(node)) is not None]
    fates += _looks_inside(graph, work)
    if not any(fate.operator for fate in fates):
        return Fused(graph, bound, tuple(fates))
    if any(fate.operator in (OPERATOR, ROTARY) for fate in fates):
        graph.model.opset_imports.setdefault(DOMAIN, 1)
    return Fused(replace(graph, reads=complete(graph.model)), replace(bound, shapes=work.planned), tuple(fates))


@dataclass(frozen=True)
class _Work:
    """Looks at a graph's nodes, and fuses what is around them where that gains.

    `planned` are the shapes of all values, those of new ones too.
    """

    graph: Graph
    shapes: Mapping[str, Shape]
    bound: BoundShapes
    gains: Gains
    planned: dict[str, Shape]
    editor: Editor

    @cached_property
    def _other_sizes(self) -> BoundShapes:
        """They take inference of all shapes, so they are bound only where something may be fused."""
        return bind_other_sizes(self.graph, self.shapes, self.bound)

    @cached_property
    def _sizes(self) -> Sizes:
        return Sizes(self.planned, known_shapes(self._other_sizes), self._other_sizes is not self.bound)

    @cached_property
    def _tables(self) -> Tables:
        other = self._other_sizes
        shapes = {value.name or "": other.shapes[value.name or ""] for value in self.graph.graph.inputs}
        return Tables(self.graph, shapes, {} if other is self.bound else other.constants)

    def norm(self, mean: ir.Node) -> Fate | None:
        """The fate of a norm around a mean; None if there is none."""
        place = mean.name or mean.outputs[0].name or ""
        try:
            norm = find_norm(mean)
            if norm is None:
                return None
            self._check_type(norm.data)
            write_norm(norm, self.editor, self._sizes)
        except NotFusedError as error:
            return Fate(place, None, str(error), "norm")
        return Fate(place, NORM, None, "norm")

    def rotary(self, last: ir.Node) -> Fate | None:
        """The fate of a rotary embedding that a node ends; None if it ends none."""
        place = last.name or last.outputs[0].name or ""
        try:
            rotary = find_rotary(last, self._sizes, self._tables) if looks_rotary(last) else None
            if rotary is None:
                return None
            self._check_type(rotary.data)
            write_rotary(rotary, self.editor, self._sizes, self._tables)
        except NotFusedError as error:
            return Fate(place, None, str(error), "rotary")
        return Fate(place, ROTARY, None, "rotary")

    def attention(self, node: ir.Node) -> Fate | None:
        """The fate of attention around a Softmax; None if there is none."""
        softmax = find_softmax(node, self._rank_of, self.graph.model.opset_imports.get("", 1))
        if softmax is None:
            return None
        try:
            attention = find_attention(softmax, self._rank_of)
            if attention is None:
                return None
            self._check_type(attention.query.value)
            shape = self._shape_of(softmax.output)
            if shape is None or math.prod(shape[-2:]) < self.gains.least_scores:
                raise NotFusedError("it is too small to be faster as one operator")
            write_multi_head_attention(attention, self.editor, self._sizes, self.gains.largest_head)
        except NotFusedError as error:
            return Fate(softmax.name, None, str(error))
        return Fate(softmax.name, OPERATOR)

    def _check_type(self, value: ir.Value) -> None:
        if (dtype := value.dtype) not in self.gains.types:
            raise NotFusedError(f"no kernel is faster for its type, {'unknown' if dtype is None else dtype.name}")

    def _shape_of(self, value: ir.Value) -> Shape | None:
        if value.const_value is not None:
            return tuple(value.const_value.shape.numpy())
        return None if (value.name or "") in self.bound.uncertain else self.planned.get(value.name or "")

    def _rank_of(self, value: ir.Value) -> int | None:
        shape = self._shape_of(value)
        return None if shape is None else len(shape)


def _looks_inside(graph: Graph, work: _Work) -> list[Fate]:
    """What looks like attention in an If or a Loop, whose shapes are not known."""
    if not has_subgraphs(graph.graph):
        return []
    unknown = replace(work, gains=Gains(frozenset(), 0))
    inside = (node for node in all_nodes(graph.graph) if node.graph is not graph.graph)
    fates = (unknown.attention(node) for node in inside)
    return [replace(fate, why="it is inside an If or a Loop") for fate in fates if fate is not None]
