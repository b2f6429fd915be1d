"""Fuse what exporters wrote out, for engines that do not do it themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.graph import Graph, complete
from splitc.compiler.frontend.probe_sizes import bind_other_sizes
from splitc.compiler.frontend.reads import all_nodes, has_subgraphs
from splitc.compiler.frontend.shapes import BoundShapes
from splitc.compiler.fusion.attention import Attention, NotFusedError, find_attention
from splitc.compiler.fusion.kernels import ON_GPUS, Gains
from splitc.compiler.fusion.multi_head import DOMAIN, OPERATOR, write_multi_head_attention
from splitc.compiler.fusion.norm import OPERATOR as NORM
from splitc.compiler.fusion.norm import Norm, find_norm, write_norm
from splitc.compiler.fusion.sizes import Sizes, read_sizes
from splitc.compiler.fusion.softmax import find_softmax
from splitc.compiler.request.shapes import Shape


@dataclass(frozen=True)
class Fate:
    """What became of a place that looks like attention, or like a norm: its operator, or why there is none.

    The place is called after its Softmax, or after its mean.
    """

    place: str
    operator: str | None
    why: str | None = None
    kind: str = "attention"


@dataclass(frozen=True)
class Fused:
    """A graph whose attentions and norms are one operator each where that can be, with the shapes of all its values."""

    graph: Graph
    bound: BoundShapes
    fates: tuple[Fate, ...]


def fuse(
    graph: Graph,
    shapes: Mapping[str, Shape],
    bound: BoundShapes,
    gains: Gains = ON_GPUS,
) -> Fused:
    """Fuse the graph's norms and attention where that gains, in place.

    `bound` are the shapes of the graph's values with the inputs' `shapes`.
    """
    looks = _find(graph, bound, gains)
    if all(isinstance(look.content, NotFusedError) for look in looks):
        return Fused(graph, bound, tuple(look.fate() for look in looks))
    # Norms are along one axis, whose size is that of their weights: probe sizes would say nothing more.
    attends = any(isinstance(look.content, Attention) for look in looks)
    probed = bind_other_sizes(graph, shapes, bound) if attends else bound
    sizes, editor = read_sizes(bound, probed), Editor(graph.graph)
    fates = tuple(_write(look, editor, sizes, gains) for look in looks)
    if not any(fate.operator for fate in fates):
        return Fused(graph, bound, fates)
    if any(fate.operator == OPERATOR for fate in fates):
        graph.model.opset_imports.setdefault(DOMAIN, 1)
    return Fused(replace(graph, reads=complete(graph.model)), replace(bound, shapes=sizes.shapes), fates)


@dataclass(frozen=True)
class _Look:
    """What was found at a place: attention or a norm that may be fused, or why it is not."""

    place: str
    kind: str
    content: Attention | Norm | NotFusedError

    def fate(self, operator: str | None = None) -> Fate:
        return Fate(self.place, operator, None if operator else str(self.content), self.kind)


def _find(graph: Graph, bound: BoundShapes, gains: Gains) -> list[_Look]:
    """All that looks like attention or a norm."""
    opset = graph.model.opset_imports.get("", 1)
    looks = [_look(node, bound, opset, gains) or _look_for_norm(node, gains) for node in graph.nodes]
    return [*(look for look in looks if look is not None), *_looks_inside(graph, bound, opset)]


def _look(node: ir.Node, bound: BoundShapes, opset: int, gains: Gains) -> _Look | None:
    """Look for attention around a node, by the planned sizes alone: others are found only where they are needed."""

    def shape_of(value: ir.Value) -> Shape | None:
        if value.const_value is not None:
            return tuple(value.const_value.shape.numpy())
        return None if (value.name or "") in bound.uncertain else bound.shapes.get(value.name or "")

    def rank_of(value: ir.Value) -> int | None:
        shape = shape_of(value)
        return None if shape is None else len(shape)

    softmax = find_softmax(node, rank_of, opset)
    if softmax is None:
        return None
    try:
        attention = find_attention(softmax, rank_of)
        if attention is None:
            return None
        if (dtype := attention.query.value.dtype) not in gains.types:
            raise _no_kernel(dtype)
        shape = shape_of(softmax.output)
        if shape is None or math.prod(shape[-2:]) < gains.least_scores:
            raise NotFusedError("it is too small to be faster as one operator")
    except NotFusedError as error:
        return _Look(softmax.name, "attention", error)
    return _Look(softmax.name, "attention", attention)


def _no_kernel(dtype: ir.DataType | None) -> NotFusedError:
    return NotFusedError(f"no kernel is faster for its type, {'unknown' if dtype is None else dtype.name}")


def _look_for_norm(mean: ir.Node, gains: Gains) -> _Look | None:
    """Look for a norm around a node."""
    name = mean.name or mean.outputs[0].name or ""
    try:
        norm = find_norm(mean)
        if norm is None:
            return None
        if norm.data.dtype not in gains.types:
            raise _no_kernel(norm.data.dtype)
    except NotFusedError as error:
        return _Look(name, "norm", error)
    return _Look(name, "norm", norm)


def _looks_inside(graph: Graph, bound: BoundShapes, opset: int) -> list[_Look]:
    """What looks like attention in an If or a Loop, whose shapes are not known."""
    if not has_subgraphs(graph.graph):
        return []
    inside = (node for node in all_nodes(graph.graph) if node.graph is not graph.graph)
    looks = [_look(node, bound, opset, Gains(frozenset(), 0)) for node in inside]
    why = NotFusedError("it is inside an If or a Loop")
    return [_Look(look.place, look.kind, why) for look in looks if look is not None]


def _write(look: _Look, editor: Editor, sizes: Sizes, gains: Gains) -> Fate:
    try:
        if isinstance(look.content, Attention):
            write_multi_head_attention(look.content, editor, sizes, gains.largest_head)
            return look.fate(OPERATOR)
        if isinstance(look.content, Norm):
            write_norm(look.content, editor, sizes)
            return look.fate(NORM)
    except NotFusedError as error:
        look = replace(look, content=error)
    return look.fate()
