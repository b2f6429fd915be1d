"""Fuse what exporters wrote out, for engines that do not do it themselves."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.graph import Graph, complete
from splitc.compiler.frontend.probe_sizes import bind_probe_sizes
from splitc.compiler.frontend.reads import all_nodes, has_subgraphs
from splitc.compiler.frontend.shapes import BoundShapes
from splitc.compiler.fusion.attention import Attention, NotFusedError, find_attention
from splitc.compiler.fusion.kernels import FASTER, LEAST_SCORES
from splitc.compiler.fusion.multi_head import DOMAIN, OPERATOR, write_multi_head_attention
from splitc.compiler.fusion.sizes import Sizes, read_sizes
from splitc.compiler.fusion.softmax import find_softmax
from splitc.compiler.request.shapes import Shape


@dataclass(frozen=True)
class Fate:
    """What became of a Softmax that weighs values: the operator that has it inside, or why there is none."""

    softmax: str
    operator: str | None
    why: str | None = None


@dataclass(frozen=True)
class Fused:
    """A graph whose attention is one operator each where that can be, with the shapes of all its values."""

    graph: Graph
    bound: BoundShapes
    fates: tuple[Fate, ...]


def fuse(
    graph: Graph,
    shapes: Mapping[str, Shape],
    bound: BoundShapes,
    types: Collection[ir.DataType] = FASTER,
    least: int = LEAST_SCORES,
) -> Fused:
    """Fuse the graph's attention in numbers of these types, and with at least so many scores a head, in place.

    `bound` are the shapes of its values with the inputs' `shapes`.
    """
    opset = graph.model.opset_imports.get("", 1)
    looks = [look for node in graph.nodes if (look := _look(node, bound, opset, types, least)) is not None]
    looks += _looks_inside(graph, bound, opset)
    if not any(isinstance(look.attention, Attention) for look in looks):
        return Fused(graph, bound, tuple(look.fate() for look in looks))
    sizes, editor = read_sizes(bound, bind_probe_sizes(graph, shapes, bound)), Editor(graph.graph)
    fates = tuple(_write(look, editor, sizes) for look in looks)
    if not any(fate.operator for fate in fates):
        return Fused(graph, bound, fates)
    graph.model.opset_imports.setdefault(DOMAIN, 1)
    return Fused(replace(graph, reads=complete(graph.model)), replace(bound, shapes=sizes.shapes), fates)


@dataclass(frozen=True)
class _Look:
    """What was found around a Softmax: attention that may be fused, or why it is not."""

    softmax: str
    attention: Attention | NotFusedError

    def fate(self, operator: str | None = None) -> Fate:
        return Fate(self.softmax, operator, None if operator else str(self.attention))


def _look(node: ir.Node, bound: BoundShapes, opset: int, types: Collection[ir.DataType], least: int) -> _Look | None:
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
        if (dtype := attention.query.value.dtype) not in types:
            raise NotFusedError(f"no kernel is faster for its type, {'unknown' if dtype is None else dtype.name}")
        shape = shape_of(softmax.output)
        if shape is None or math.prod(shape[-2:]) < least:
            raise NotFusedError("it is too small to be faster as one operator")
    except NotFusedError as error:
        return _Look(softmax.name, error)
    return _Look(softmax.name, attention)


def _looks_inside(graph: Graph, bound: BoundShapes, opset: int) -> list[_Look]:
    """What looks like attention in an If or a Loop, whose shapes are not known."""
    if not has_subgraphs(graph.graph):
        return []
    inside = (node for node in all_nodes(graph.graph) if node.graph is not graph.graph)
    looks = [_look(node, bound, opset, (), 0) for node in inside]
    why = NotFusedError("it is inside an If or a Loop")
    return [_Look(look.softmax, why) for look in looks if look is not None]


def _write(look: _Look, editor: Editor, sizes: Sizes) -> Fate:
    if isinstance(look.attention, NotFusedError):
        return look.fate()
    try:
        write_multi_head_attention(look.attention, editor, sizes)
    except NotFusedError as error:
        return replace(look, attention=error).fate()
    return look.fate(OPERATOR)
