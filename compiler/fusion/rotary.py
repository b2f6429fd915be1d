"""Finds decomposed rotary embedding (RoFormer, Su et al., 2021) by its structure.

The last axis holds pairs of elements. Each pair (a, b) becomes (a cos - b sin, b cos + a sin). Its elements are in the
two halves of the axis, or neighbours (interleaved). Exporters write up to twelve nodes for it, often in float32 between
casts. There are two forms:

- x cos + rotated(x) sin, with tables that have each number twice;
- both elements computed separately, then concatenated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from splitc.compiler.fusion.rotation import Places, Rotation
from splitc.compiler.graphs.matching import (
    VIEWS,
    is_onnx,
    made_by,
    only_user,
    readers_of,
    source_through,
    value_before,
)
from splitc.compiler.patterns.context import Context
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.operand import PASSED, half_result
from splitc.compiler.patterns.sizes import Sizes


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding of `data`. Pairs are `interleaved`, or have one element in each half of the last axis.

    - `by_pairs`: the tables have one number for each pair, rather than for each element.
    - `places`: a permutation of the last axis before the rotation; None for none.
    - `thin`: the tables have an axis of one element after that of pairs.
    - `part`: how many of a head's first elements are rotated (partial rotary embedding); None for all of them.
    """

    data: ir.Value
    cosines: ir.Value
    sines: ir.Value
    interleaved: bool
    output: ir.Value
    by_pairs: bool = False
    places: tuple[int, ...] | None = None
    thin: bool = False
    part: int | None = None


# The two factors of an elementwise product.
Factors = tuple[ir.Value, ir.Value]
# Operators that may select the first or second elements of pairs.
CUTS = {*VIEWS, *PASSED, "Split", "Slice", "Gather"}


def looks_rotary(node: ir.Node) -> bool:
    """Whether a node may be the end of a rotary embedding, by a cheap test."""
    return not node.domain and any(_sums(node) if node.op_type in ("Add", "Sub") else _joined_sums(node))


def merged_heads(node: ir.Node, sizes: Sizes) -> ir.Value | None:
    """The pairs [..., heads, pairs, 2] of a rotary embedding, if they are a Reshape of merged heads; else None.

    Optimizers join two Reshapes: then no value is [..., heads, size].
    """
    for a, _, _ in _joined_sums(node):
        of_five = (value for value in _above(a) if len(sizes.of(value) or ()) == 5)
        pairs = next((value for value in of_five if (sizes.of(value) or ())[-1] == (2, 2)), None)
        source = value_before(pairs, "Reshape")
        own, before = None if pairs is None else sizes.axes(pairs), None if source is None else sizes.of(source)
        if own is not None and own[-2].fixed is not None and len(before or ()) == 3:
            return pairs
    return None


def find_rotary(node: ir.Node, context: Context) -> Rotary | None:
    """The rotary embedding that ends at a node; None if there is none.

    Raises NotFusedError for a form that the operator does not have.
    """
    candidates: Iterator[Rotary | None]
    if node.op_type in ("Add", "Sub"):
        candidates = (_from_sum(node, straight, crossed, context) for straight, crossed in _sums(node))
    else:
        candidates = (_from_pairs(node, a, b, numbers, context) for a, b, numbers in _joined_sums(node))
    rotary = next((rotary for rotary in candidates if rotary is not None), None)
    if rotary is not None and rotary.output.dtype != rotary.data.dtype:
        raise NotFusedError("its input and its output differ in type")
    return None if rotary is None else _with_rest(rotary, context)


def _with_rest(rotary: Rotary, context: Context) -> Rotary:
    """The same rotary embedding of whole heads, if the data are a slice of them."""
    whole = find_whole(rotary.data, rotary.output, context)
    own = context.sizes.of(rotary.data)
    if whole is None or own is None:
        return rotary
    (data, output), part = whole, own[-1][0]
    size = (context.sizes.of(data) or own)[-1][0]
    places = None if rotary.places is None else (*rotary.places, *range(part, size))
    return replace(rotary, data=data, output=output, places=places, part=part)


def find_whole(data: ir.Value, rotated: ir.Value, context: Context) -> tuple[ir.Value, ir.Value] | None:
    """The heads that `data` are a slice of, and the Concat of `rotated` with their other elements; None if not so."""
    concat = only_user(rotated, "Concat")
    own = context.sizes.of(rotated)
    if concat is None or own is None or len(concat.inputs) != 2 or concat.inputs[0] is not rotated:
        return None
    rest = concat.inputs[1]
    if rest is None or concat.attributes.get_int("axis", 0) not in (-1, len(own) - 1):
        return None
    for heads in (heads for heads in _above(data) if heads.dtype == rotated.dtype):
        rotation = Rotation(heads, context)
        first, second = rotation.of(data), rotation.of(rest)
        if first is not None and second is not None:
            places = np.concatenate([first, second])
            count = (context.sizes.of(heads) or own)[-1][0]
            return (heads, concat.outputs[0]) if np.array_equal(places, np.arange(1, count + 1)) else None
    return None


def _sums(node: ir.Node) -> list[tuple[Factors, Factors]]:
    """The possible (x, cosines), (rotated x, sines) of a sum or difference of two products: rotated x is a Concat."""
    one, other = map(_factors, node.inputs)
    if one is None or other is None:
        return []
    return [
        (straight, crossed)
        for first, second in ([(one, other)] if node.op_type == "Sub" else [(one, other), (other, one)])
        for straight in (first, first[::-1])
        for crossed in (second, second[::-1])
        if _is_joined(crossed[0])
    ]


def _from_sum(node: ir.Node, straight: Factors, crossed: Factors, context: Context) -> Rotary | None:
    """A rotary embedding of the form x cos + rotated(x) sin; None if `crossed` is no rotation of x.

    Raises NotFusedError if the two elements of a pair may have different cosines or sines.
    """
    (data, cosines), (rotated, sines) = straight, crossed
    source = _uncast(data)
    places = Rotation(source, context).of(rotated)
    if places is None:
        return None
    interleaved = _is_interleaved(-places if node.op_type == "Sub" else places)
    if interleaved is None:
        return None
    if not (context.tables.agree(cosines, interleaved) and context.tables.agree(sines, interleaved)):
        raise NotFusedError("its tables may have different cosines or sines for the two elements of a pair")
    return Rotary(source, cosines, sines, interleaved, half_result(node.outputs[0]) or node.outputs[0])


def _joined_sums(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value, Factors]]:
    """The possible first elements of pairs, second elements, and (cosines, sines) whose rotation a Concat joins."""
    if node.op_type == "Concat" and len(node.inputs) == 2:
        yield from _rotated_pairs(*node.inputs)


def pairs_among(node: ir.Node) -> int | None:
    """The index of rotated first elements of pairs among three or more inputs of a Concat; None if there are none.

    TorchScript's exporter joins two Concats where rotated elements are then concatenated with others.
    """
    if not is_onnx(node, "Concat") or len(node.inputs) < 3:
        return None
    pairs = enumerate(pairwise(node.inputs))
    return next((place for place, (a, b) in pairs if any(_rotated_pairs(a, b))), None)


def _rotated_pairs(one: ir.Value | None, other: ir.Value | None) -> Iterator[tuple[ir.Value, ir.Value, Factors]]:
    """As `_joined_sums`, for two values: a cos - b sin and b cos + a sin."""
    first, second = _unstacked(one), _unstacked(other)
    if first is None or second is None or (first.op_type, second.op_type) != ("Sub", "Add"):
        return
    products = [product for value in (*first.inputs, *second.inputs) if (product := _factors(value)) is not None]
    if len(products) < 4:
        return
    straight, crossed, *others = products
    rest = {frozenset(other) for other in others}
    for a, cosines in (straight, straight[::-1]):
        for b, sines in (crossed, crossed[::-1]):
            if rest == {frozenset((b, cosines)), frozenset((a, sines))}:
                yield a, b, (cosines, sines)


def _from_pairs(node: ir.Node, a: ir.Value, b: ir.Value, numbers: Factors, context: Context) -> Rotary | None:
    """A rotary embedding of the form with both elements of each pair computed separately; None if there is none.

    Raises NotFusedError if it is no rotation of all elements.
    """
    # The operator takes at most four axes. Pairs with an axis of their own are a Reshape of such data.
    for data in (data for data in map(_uncast, _above(a)) if len(context.sizes.of(data) or ()) <= 4):
        rotation, joined = Rotation(data, context), _flat(node, data, context.sizes)
        first, second = rotation.along_pairs(a), rotation.along_pairs(b)
        if joined is None or first is None or second is None:
            continue
        thin = len(context.sizes.of(a) or ()) > len(context.sizes.of(data) or ())
        output, interleaved = joined
        order = np.stack([first, second], -1).reshape(-1) if interleaved else np.concatenate([first, second])
        if not np.array_equal(np.sort(order), np.arange(1, len(order) + 1)):
            raise NotFusedError("it leaves out some elements, or rotates them in the opposite direction")
        places = None if np.array_equal(order, np.sort(order)) else tuple((order - 1).tolist())
        output = half_result(output) or output
        return Rotary(data, *numbers, interleaved, output, by_pairs=True, places=places, thin=thin)
    return None


def _above(value: ir.Value) -> Iterator[ir.Value]:
    """The values that a value may be a slice of, nearest first."""
    while (source := value_before(value, *CUTS)) is not None:
        value = source
        yield value


def _flat(node: ir.Node, data: ir.Value, sizes: Sizes) -> tuple[ir.Value, bool] | None:
    """A Concat's result in the shape of the data, and whether it is interleaved; None if it has no such shape."""
    value, own = node.outputs[0], sizes.of(data)
    made = sizes.of(value)
    if own is None or made is None or node.attributes.get_int("axis", 0) not in (-1, len(made) - 1):
        return None
    if made == own:
        return value, False
    users = readers_of(value)  # TorchScript's exporter reads the sizes of what it then flattens
    if made[:-2] != own[:-1] or made[-1] != (2, 2) or len(users) != 1 or users[0].op_type not in VIEWS:
        return None
    return (users[0].outputs[0], True) if sizes.of(users[0].outputs[0]) == own else None


def _unstacked(value: ir.Value | None) -> ir.Node | None:
    """The node that makes a value, before an Unsqueeze or Reshape for the Concat."""
    value = value_before(value, "Unsqueeze", "Reshape") or value
    return None if value is None else value.producer()


def _factors(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """The two factors of an elementwise product."""
    node = made_by(value, "Mul")
    one, other = (None, None) if node is None else node.inputs
    return None if one is None or other is None else (one, other)


def _uncast(value: ir.Value) -> ir.Value:
    """The value before casts to a wider type. Narrower ones round, and rotations of their results have their type."""
    source = value_before(value, "Cast")
    while source is not None and not _is_narrower(value, source):
        value, source = source, value_before(source, "Cast")
    return value


def _is_narrower(value: ir.Value, source: ir.Value) -> bool:
    return value.dtype is not None and source.dtype is not None and value.dtype.itemsize <= source.dtype.itemsize


def _is_joined(value: ir.Value) -> bool:
    """Whether a value is the result of a Concat, perhaps cast and reshaped."""
    return made_by(source_through(source_through(value, "Cast"), "Reshape", "Flatten"), "Concat") is not None


def _is_interleaved(places: Places) -> bool | None:
    """Whether pairs are interleaved; None if the elements are permuted otherwise, or have other signs."""
    numbers = np.arange(1, len(places) + 1)
    if len(places) % 2:
        return None
    one, other = np.split(numbers, 2)
    if np.array_equal(places, np.concatenate([-other, one])):
        return False
    one, other = numbers[::2], numbers[1::2]
    return True if np.array_equal(places, np.stack([-other, one], 1).reshape(-1)) else None
