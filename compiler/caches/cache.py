"""Finds attention whose keys and values are caches: the tokens of earlier requests, with new ones concatenated.

A cache is [batch, heads, tokens, size], as in the operator GroupQueryAttention. Before the products, its heads may be
repeated, merged with the batch, and transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import onnx_ir as ir

from splitc.compiler.attention.attention import Attention
from splitc.compiler.attention.operator import is_operator
from splitc.compiler.attention.scores import RowScale
from splitc.compiler.attention.softmax import computed_beside
from splitc.compiler.graphs.matching import VIEWS, is_onnx
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.operand import Operand, factor_of
from splitc.compiler.patterns.sizes import ONE, Size, Sizes, product_of
from splitc.compiler.request.shapes import Shape
from splitc.runtime.package.states import State

# The axis of tokens.
ROWS = 2
# Growing caches: by the present, its past and the new tokens that are concatenated to it.
Caches = Mapping[ir.Value, tuple[ir.Value, ir.Value]]
# The planned shape of a value, None if it is not known.
ShapeOf = Callable[[ir.Value], Shape | None]
# A factor of an axis: what it counts (batch b, heads h, tokens r, head size d, or times: a repetition), and its size.
_Part = tuple[str, Size]


@dataclass(frozen=True)
class Cache:
    """A cache: `present` is `past` with the `new` rows concatenated, which may be [batch, rows, heads x size].

    `path` are the nodes from `present` to an attention's `operand`, which is the cache in a layout that `check_layout`
    accepts, times `factor` and all computed `scales`.
    """

    past: ir.Value
    new: ir.Value
    present: ir.Value
    path: tuple[ir.Node, ...]
    operand: Operand
    factor: float
    scales: tuple[RowScale, ...]

    @property
    def between(self) -> list[ir.Value]:
        """The values of the path, which no longer exist after fusion."""
        return [node.outputs[0] for node in self.path]


@dataclass(frozen=True)
class CachedAttention:
    """An attention whose keys and values are caches."""

    attention: Attention
    keys: Cache
    values: Cache


def growing_caches(graph: ir.Graph, states: Sequence[State]) -> Caches:
    """The caches of three or four axes that grow by a Concat along the last but one.

    Empty if the model writes other states in place itself: the model's mask is then as long as their capacity.
    """
    if any(state.in_place for state in states):
        return {}
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    caches = {}
    for state in states:
        past, present = inputs.get(state.input), outputs.get(state.output)
        new = None if past is None or present is None else _added(past, present)
        if past is not None and present is not None and new is not None:
            caches[present] = past, new
    return caches


def _added(past: ir.Value, present: ir.Value) -> ir.Value | None:
    """The rows that a Concat, or ONNX's Attention, appends to a past; None for other presents."""
    node, place = present.producer(), present.index()
    rank = 0 if past.shape is None else len(past.shape)
    if node is None or place is None or rank not in (ROWS + 1, ROWS + 2):
        return None
    if is_operator(node):
        old = operator_of(node).states.get(place, len(node.inputs))
        return node.inputs[place] if old < len(node.inputs) and node.inputs[old] is past else None
    axis = node.attributes.get_int("axis", 0)
    fits = is_onnx(node, "Concat") and len(node.inputs) == 2 and axis in (rank - 2, -2)
    return node.inputs[1] if fits and node.inputs[0] is past else None


def unfused_caches(
    graph: ir.Graph, states: Sequence[State], caches: Caches, is_read: bool, latents: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Growing states that fusion does not write in place, by their input's name, with reasons.

    The growing `caches` are listed only if no attention reads any (`is_read`): else `find_caches` gave their reasons.
    `latents` are those of multi-head latent attention that are not in place, each with the reason.
    """
    pasts = {past.name for past, _ in caches.values()}
    outputs = {value.name: value.producer() for value in graph.outputs}
    for state in states:
        maker = outputs.get(state.output)
        if state.grows is None or state.in_place or (state.input in pasts and is_read):
            continue
        if maker is not None and operator_of(maker).writes_in_place:
            yield state.input, "it has readers beside the operator that could write it in place"
        elif state.input in latents:
            yield state.input, latents[state.input]
        elif state.input in pasts:
            yield state.input, "no attention reads it as keys or values"
        else:
            yield state.input, "new rows are not concatenated with it as it is, along the third of four axes"


def find_caches(attention: Attention, caches: Caches, shape_of: ShapeOf) -> CachedAttention | None:
    """An attention with the caches that are its keys and values; None if neither are a cache.

    Raises NotFusedError if only one of them is a cache, or if a cache has other readers.
    """
    keys = _find_cache(attention.keys.swapped(), caches, shape_of)
    values = _find_cache(attention.values, caches, shape_of)
    if keys is None and values is None:
        return None
    if keys is None or values is None or keys.present is values.present:
        raise NotFusedError("its keys and its values do not have a cache each")
    for cache in (keys, values):
        _check_readers(cache, attention)
    check_scores(attention)
    if values.scales or values.factor != 1:
        raise NotFusedError("its values are scaled")
    # A factor of all keys is a factor of the scores.
    scaled = replace(attention, row_scales=(*attention.row_scales, *keys.scales))
    return CachedAttention(scaled, keys, values)


def _find_cache(operand: Operand, caches: Caches, shape_of: ShapeOf) -> Cache | None:
    """The cache that an operand [..., rows, size] is made of, through nodes that move, repeat or scale its elements."""
    value, factor, path, scales = operand.value, 1.0, list[ir.Node](), list[RowScale]()
    while value not in caches:
        node = value.producer()
        if node is None or node.domain:
            return None
        source = node.inputs[0] if node.inputs else None
        if (product := factor_of(node)) is not None:
            source, factor = product[0], factor * product[1]
        elif node.op_type in ("Mul", "Div") and (scale := node.inputs[1]) and set(shape_of(scale) or (1,)) == {1}:
            scales.append(RowScale(scale, node.outputs[0], node.op_type == "Div"))
        elif node.op_type not in VIEWS | {"Transpose", "Expand", "Tile", "Identity"}:
            return None
        if source is None:
            return None
        path.append(node)
        value = source
    return Cache(*caches[value], value, tuple(reversed(path)), operand, factor, tuple(scales))


def _check_readers(cache: Cache, attention: Attention) -> None:
    """Raise NotFusedError if anything but the attention reads more of a cache than its sizes."""
    maker, end = cache.present.producer(), attention.output.producer()
    operator = {end} if end is not None and is_operator(end) else set()
    for value, reader in zip([cache.past, cache.present, *cache.between], [maker, *cache.path, None], strict=True):
        readers = {node for node, _ in value.uses() if not is_onnx(node, "Shape")}
        # An operator is read as products of its inputs, with views of them. So it may read any value of the path.
        others = readers - operator - {reader}
        if len(others) != (1 if reader is None and not operator else 0):
            raise NotFusedError("its cache has other readers")
        if value.is_graph_output() and value is not cache.present:
            raise NotFusedError("a reshaped or repeated form of its cache is an output too")


def check_scores(attention: Attention) -> None:
    """Raise NotFusedError if an output depends on scores or weights beside the attention's result.

    They would still be computed, of keys with spare capacity.
    """
    beside = computed_beside(attention.passed, [attention.output, attention.result])
    if any(value.is_graph_output() for value in chain(attention.passed, beside)):
        raise NotFusedError("its scores or weights have other readers")


def check_layout(cache: Cache, sizes: Sizes) -> tuple[int, int]:
    """A cache's number of heads, and the number of consecutive copies of each in the operand.

    The factors of each axis are traced through the nodes of the path, by both sets of sizes. Raises NotFusedError
    unless the operand is [batch x heads x copies, rows, size], with its leading axes merged or not.
    """
    own = sizes.axes(cache.present)
    if own is None or own[1].fixed is None or own[3].fixed is None:
        raise NotFusedError("the number or the size of its cache's heads is dynamic")
    axes = [[] if axis.size == ONE else [(kind, axis.size)] for kind, axis in zip("bhrd", own, strict=True)]
    for node in cache.path:
        followed = _follow(node, axes, sizes)
        if followed is None:
            raise NotFusedError(f"a {node.op_type} changes its cache in a way that splitc does not know")
        axes = followed
    *leading, rows, size = (axes[axis] for axis in cache.operand.axes)
    kinds = [kind for kind, _ in _joined(leading)]
    wanted = [kind for kind in "bh" if any(part[0] == kind for axis in axes for part in axis)]
    repeats = [times for kind, (times, _) in _joined(leading) if kind == "times"]
    if kinds != [*wanted, *["times"] * len(repeats)] or len(repeats) > 1:
        raise NotFusedError("copies of one head of its cache are not consecutive")
    if [kind for kind, _ in rows] != ["r"] or [kind for kind, _ in size] not in (["d"], []):
        raise NotFusedError("the axes of its cache are in an order that splitc does not know")
    return own[1].fixed, repeats[0] if repeats else 1


def _follow(node: ir.Node, axes: list[list[_Part]], sizes: Sizes) -> list[list[_Part]] | None:
    """The factors of the axes of a node's result; None if they are not known."""
    made = sizes.of(node.outputs[0])
    if made is None:
        return None
    if node.op_type == "Transpose":
        order = node.attributes.get_ints("perm", tuple(reversed(range(len(axes)))))
        return [axes[axis] for axis in order]
    if node.op_type in ("Expand", "Tile"):
        lacking = len(made) - len(axes)
        repeated = [
            [("times", size)] if not parts and size != ONE else parts
            for parts, size in zip([*[list[_Part]()] * lacking, *axes], made, strict=True)
        ]
        whole = [product_of(part[1] for part in parts) for parts in repeated]
        return repeated if whole == [*made] else None
    if node.op_type in VIEWS:
        return _viewed(_joined(axes), made)
    return axes if len(made) == len(axes) else None


def _viewed(parts: Sequence[_Part], made: Sequence[Size]) -> list[list[_Part]] | None:
    """The factors of the axes after a Reshape; None if it splits a factor."""
    rest, axes = list(parts), list[list[_Part]]()
    for size in made:
        taken: list[_Part] = []
        while product_of(part[1] for part in taken) != size:
            if not rest:
                return None
            taken.append(rest.pop(0))
        axes.append(taken)
    return None if rest else axes


def _joined(axes: Sequence[Sequence[_Part]]) -> list[_Part]:
    return [part for parts in axes for part in parts]
