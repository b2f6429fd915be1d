"""Fuse what exporters wrote out, for engines that do not do it themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.graph import Graph, complete
from splitc.compiler.frontend.probe_sizes import bind_other_sizes
from splitc.compiler.frontend.reads import all_nodes, has_subgraphs
from splitc.compiler.frontend.shapes import BoundShapes
from splitc.compiler.fusion.attention import Attention, NotFusedError, find_attention
from splitc.compiler.fusion.cache import CachedAttention, Held, ShapeOf, concatenated, find_caches, left_out
from splitc.compiler.fusion.grouped import OPERATOR as GROUPED
from splitc.compiler.fusion.grouped import is_known, write_group_query_attention
from splitc.compiler.fusion.kernels import ON_GPUS, Gains
from splitc.compiler.fusion.lengths import Lengths
from splitc.compiler.fusion.multi_head import DOMAIN, OPERATOR, write_multi_head_attention
from splitc.compiler.fusion.norm import OPERATOR as NORM
from splitc.compiler.fusion.norm import Norm, find_norm, write_norm
from splitc.compiler.fusion.sizes import Sizes, read_sizes
from splitc.compiler.fusion.softmax import find_softmax
from splitc.compiler.request.shapes import Shape
from splitc.runtime.package.manifest import Length, State


@dataclass(frozen=True)
class Fate:
    """What became of a place that looks like attention, a cache or a norm: its operator, or why there is none.

    The place is called after its Softmax, or after its mean.
    """

    place: str
    operator: str | None
    why: str | None = None
    kind: str = "attention"


@dataclass(frozen=True)
class Fused:
    """A graph whose attentions and norms are one operator each where that can be, with the shapes of all its values.

    `lengths` are its inputs that the model does not have.
    """

    graph: Graph
    bound: BoundShapes
    fates: tuple[Fate, ...]
    lengths: tuple[Length, ...] = ()


def fuse(
    graph: Graph,
    shapes: Mapping[str, Shape],
    bound: BoundShapes,
    gains: Gains = ON_GPUS,
    states: Sequence[State] = (),
) -> Fused:
    """Fuse the graph's norms, its attention and the caches among its `states` where that gains, in place.

    `bound` are the shapes of the graph's values with the inputs' `shapes`.
    """
    held = concatenated(graph.graph, states) if gains.caches else {}
    looks = _find(graph, bound, gains, held) if gains.types or held else []
    if gains.caches:
        is_read = any(look.kind == "cache" for look in looks)
        looks += [_Look(past, "cache", why) for past, why in left_out(graph.graph, states, held, is_read)]
    if all(isinstance(look.content, NotFusedError) for look in looks):
        return Fused(graph, bound, tuple(look.fate() for look in looks))
    # Norms are along one axis, whose size is that of their weights: probe sizes would say nothing more.
    attends = any(isinstance(look.content, Attention | CachedAttention) for look in looks)
    probed = bind_other_sizes(graph, shapes, bound) if attends else bound
    sizes, editor = read_sizes(bound, probed), Editor(graph.graph)
    pasts = [past for past, _ in held.values()]
    lengths = Lengths(editor, sizes, pasts, [state.input for state in states])
    fates = tuple(_write_all(looks, editor, sizes, gains, lengths))
    entries = lengths.entries()
    if not any(fate.operator for fate in fates):
        return Fused(graph, bound, fates)
    if any(fate.operator in (OPERATOR, GROUPED) for fate in fates):
        graph.model.opset_imports.setdefault(DOMAIN, 1)
    made = replace(graph, reads=complete(graph.model))
    return Fused(made, replace(bound, shapes=sizes.shapes), fates, entries)


@dataclass(frozen=True)
class _Look:
    """What was found at a place: attention, caches or a norm that may be fused, or why not."""

    place: str
    kind: str
    content: Attention | CachedAttention | Norm | NotFusedError

    def fate(self, operator: str | None = None) -> Fate:
        return Fate(self.place, operator, None if operator else str(self.content), self.kind)


def _find(graph: Graph, bound: BoundShapes, gains: Gains, held: Held) -> list[_Look]:
    """All that looks like attention, a cache or a norm."""
    opset = graph.model.opset_imports.get("", 1)
    looks: list[_Look | None] = []
    for node in graph.nodes:
        attends = [*_look(node, bound, opset, gains, held)]
        looks += attends or ([_look_for_norm(node, gains)] if gains.types else [])
    looks += _looks_inside(graph, bound, opset, gains) if gains.types else []
    return [look for look in looks if look is not None]


def _look(node: ir.Node, bound: BoundShapes, opset: int, gains: Gains, held: Held) -> Iterator[_Look]:
    """Look for attention around a node, by the planned sizes alone: others are found only where they are needed.

    First for one with caches.
    """

    def shape_of(value: ir.Value) -> Shape | None:
        if value.const_value is not None:
            return tuple(value.const_value.shape.numpy())
        return None if (value.name or "") in bound.uncertain else bound.shapes.get(value.name or "")

    def rank_of(value: ir.Value) -> int | None:
        shape = shape_of(value)
        return None if shape is None else len(shape)

    softmax = find_softmax(node, rank_of, opset)
    if softmax is None:
        return
    try:
        attention = find_attention(softmax, rank_of)
    except NotFusedError as error:
        yield _Look(softmax.name, "attention" if gains.types else "cache", error)
        return
    if attention is None:
        return
    if held and (cached := _look_for_caches(softmax.name, attention, held, shape_of, gains)) is not None:
        yield cached
    if not gains.types:
        return
    dtype, shape = attention.query.value.dtype, shape_of(softmax.output)
    content: Attention | NotFusedError = attention
    if dtype not in gains.types:
        content = _no_kernel(dtype)
    elif shape is None or math.prod(shape[-2:]) < gains.least_scores:
        content = NotFusedError("it is too small to be faster as one operator")
    yield _Look(softmax.name, "attention", content)


def _look_for_caches(place: str, attention: Attention, held: Held, shape_of: ShapeOf, gains: Gains) -> _Look | None:
    """Look for the caches of an attention."""
    try:
        cached = find_caches(attention, held, shape_of)
        if cached is None:
            return None
        if (dtype := attention.query.value.dtype) not in gains.caches:
            raise _no_kernel(dtype)
        if not is_known():
            raise NotFusedError("the ONNX Runtime that is installed does not have its operator: take a newer one")
    except NotFusedError as error:
        return _Look(place, "cache", error)
    return _Look(place, "cache", cached)


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


def _looks_inside(graph: Graph, bound: BoundShapes, opset: int, gains: Gains) -> list[_Look]:
    """What looks like attention in an If or a Loop, whose shapes are not known."""
    if not has_subgraphs(graph.graph):
        return []
    inside = (node for node in all_nodes(graph.graph) if node.graph is not graph.graph)
    why = NotFusedError("it is inside an If or a Loop")
    looks = (look for node in inside for look in _look(node, bound, opset, gains, {}))
    return [_Look(look.place, look.kind, why) for look in looks]


def _write_all(looks: Sequence[_Look], editor: Editor, sizes: Sizes, gains: Gains, lengths: Lengths) -> Iterator[Fate]:
    """Write what was found. What has its caches in place is one operator already."""
    cached: set[str] = set()
    for look in looks:
        if look.kind == "attention" and look.place in cached:
            continue
        fate = _write(look, editor, sizes, gains, lengths)
        if fate.operator == GROUPED:
            cached.add(look.place)
        yield fate


def _write(look: _Look, editor: Editor, sizes: Sizes, gains: Gains, lengths: Lengths) -> Fate:
    try:
        if isinstance(look.content, CachedAttention):
            write_group_query_attention(look.content, editor, sizes, lengths)
            return look.fate(GROUPED)
        if isinstance(look.content, Attention):
            write_multi_head_attention(look.content, editor, sizes, gains.largest_head)
            return look.fate(OPERATOR)
        if isinstance(look.content, Norm):
            write_norm(look.content, editor, sizes)
            return look.fate(NORM)
    except NotFusedError as error:
        look = replace(look, content=error)
    return look.fate()
