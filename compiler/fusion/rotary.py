"""Rotary embedding that was written out, found by its structure: pairs of elements of the last axis, each rotated.

The pair (a, b) becomes (a cos - b sin, b cos + a sin). It is an element of the first half with one of the second, or
(interleaved) two that follow each other. See RoFormer (Su et al., 2021). Exporters write it as up to twelve operators,
often in single precision between casts, each of which goes through the memory of a GPU. There are two forms:

- x cos + rotated(x) sin, with tables that have each number twice;
- both elements by themselves, joined again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from splitc.compiler.fusion.attention import NotFusedError
from splitc.compiler.fusion.norm import only_user
from splitc.compiler.fusion.operand import PASSED, VIEWS
from splitc.compiler.fusion.rotation import Places, Rotation
from splitc.compiler.fusion.sizes import Sizes
from splitc.compiler.fusion.tables import Tables


@dataclass(frozen=True)
class Rotary:
    """`data`, whose pairs are rotated. These are `interleaved`, or an element of each half.

    The tables have a number for each element, or, with `by_pairs`, for each pair. With `places`, the elements of the
    last axis are first put in the order that they say. `thin` tables have an axis of one behind the pairs.
    """

    data: ir.Value
    cosines: ir.Value
    sines: ir.Value
    interleaved: bool
    output: ir.Value
    by_pairs: bool = False
    places: tuple[int, ...] | None = None
    thin: bool = False


# A value times another one.
Factors = tuple[ir.Value, ir.Value]
# What cuts an element of each pair out.
CUTS = {*VIEWS, *PASSED, "Split", "Slice", "Gather"}


def looks_rotary(node: ir.Node) -> bool:
    """Whether a node may make what is rotated. To know takes more."""
    return not node.domain and any(_sums(node) if node.op_type in ("Add", "Sub") else _joined_sums(node))


def find_rotary(node: ir.Node, sizes: Sizes, tables: Tables) -> Rotary | None:
    """The rotary embedding that a node ends; None if it ends none.

    Raises NotFusedError for one that the operator can't do.
    """
    candidates: Iterator[Rotary | None]
    if node.op_type in ("Add", "Sub"):
        candidates = (_from_sum(node, straight, crossed, sizes, tables) for straight, crossed in _sums(node))
    else:
        candidates = (_from_pairs(node, a, b, numbers, sizes, tables) for a, b, numbers in _joined_sums(node))
    rotary = next((rotary for rotary in candidates if rotary is not None), None)
    if rotary is not None and rotary.output.dtype != rotary.data.dtype:
        raise NotFusedError("its result has another type than what is rotated")
    return rotary


def _sums(node: ir.Node) -> list[tuple[Factors, Factors]]:
    """The products that a node adds or subtracts, where one of them is of what is joined of parts."""
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


def _from_sum(node: ir.Node, straight: Factors, crossed: Factors, sizes: Sizes, tables: Tables) -> Rotary | None:
    """Data times cosines, plus rotated data times sines."""
    (data, cosines), (turned, sines) = straight, crossed
    source = _uncast(data)
    places = Rotation(source, sizes, tables.known).of(turned)
    if places is None:
        return None
    interleaved = _is_interleaved(-places if node.op_type == "Sub" else places)
    if interleaved is None:
        return None
    if not (tables.agree(cosines, interleaved) and tables.agree(sines, interleaved)):
        raise NotFusedError("the two elements of a pair may be multiplied by different numbers")
    return Rotary(source, cosines, sines, interleaved, _narrow(node.outputs[0]))


def _joined_sums(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value, Factors]]:
    """The first and the second elements of pairs, and their cosines and sines, where a node joins both rotated."""
    if node.op_type == "Concat" and len(node.inputs) == 2:
        yield from _rotated_pairs(*node.inputs)


def pairs_among(node: ir.Node) -> int | None:
    """Where both elements of rotated pairs are among more than two values that a node joins; None if they are not.

    TorchScript's exporter joins all at once if what is rotated is then joined with what is not.
    """
    if node.op_type != "Concat" or node.domain or len(node.inputs) < 3:
        return None
    pairs = enumerate(pairwise(node.inputs))
    return next((place for place, (a, b) in pairs if any(_rotated_pairs(a, b))), None)


def _rotated_pairs(one: ir.Value | None, other: ir.Value | None) -> Iterator[tuple[ir.Value, ir.Value, Factors]]:
    """The first and the second elements of pairs, and their cosines and sines, where two values are these rotated."""
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


def _from_pairs(
    node: ir.Node, a: ir.Value, b: ir.Value, numbers: Factors, sizes: Sizes, tables: Tables
) -> Rotary | None:
    """Both elements of each pair by themselves."""
    # An operator takes four axes at most: where pairs have one of their own, what it is a view of is rotated.
    for data in (data for data in map(_uncast, _above(a)) if len(sizes.of(data) or ()) <= 4):
        rotation, joined = Rotation(data, sizes, tables.known), _flat(node, data, sizes)
        first, second = rotation.along_pairs(a), rotation.along_pairs(b)
        if joined is None or first is None or second is None:
            continue
        thin = len(sizes.of(a) or ()) > len(sizes.of(data) or ())
        output, interleaved = joined
        order = np.stack([first, second], -1).reshape(-1) if interleaved else np.concatenate([first, second])
        if not np.array_equal(np.sort(order), np.arange(1, len(order) + 1)):
            raise NotFusedError("it leaves out some elements, or rotates them the other way")
        places = None if np.array_equal(order, np.sort(order)) else tuple((order - 1).tolist())
        return Rotary(data, *numbers, interleaved, _narrow(output), by_pairs=True, places=places, thin=thin)
    return None


def _above(value: ir.Value) -> Iterator[ir.Value]:
    """What a value may be cut out of, nearest first."""
    while (node := value.producer()) is not None and node.op_type in CUTS and not node.domain and node.inputs[0]:
        value = node.inputs[0]
        yield value


def _flat(node: ir.Node, data: ir.Value, sizes: Sizes) -> tuple[ir.Value, bool] | None:
    """What a node joins, with the axes of the data, and whether it joins pair by pair; None if it joins otherwise."""
    value, own = node.outputs[0], sizes.of(data)
    made = sizes.of(value)
    if own is None or made is None or node.attributes.get_int("axis", 0) not in (-1, len(made) - 1):
        return None
    if made == own:
        return value, False
    users = list(dict.fromkeys(user for user, _ in value.uses()))
    if made[:-2] != own[:-1] or made[-1] != (2, 2) or len(users) != 1 or users[0].op_type not in VIEWS:
        return None
    return (users[0].outputs[0], True) if sizes.of(users[0].outputs[0]) == own else None


def _unstacked(value: ir.Value | None) -> ir.Node | None:
    """What makes a value, before it got an axis to be joined along."""
    node = None if value is None else value.producer()
    if node is not None and node.op_type == "Unsqueeze" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node


def _factors(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """The two values that a value is the product of."""
    node = None if value is None else value.producer()
    if node is None or node.domain or node.op_type != "Mul":
        return None
    one, other = node.inputs
    return None if one is None or other is None else (one, other)


def _uncast(value: ir.Value) -> ir.Value:
    """A value before it was cast."""
    while (node := value.producer()) is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def _is_joined(value: ir.Value) -> bool:
    """Whether a value is joined of parts, but for casts and views."""
    node = _uncast(value).producer()
    while node is not None and node.op_type in ("Reshape", "Flatten") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and node.op_type == "Concat" and not node.domain


def _is_interleaved(places: Places) -> bool | None:
    """How pairs are rotated; None if elements are in other places, or have other signs."""
    numbers = np.arange(1, len(places) + 1)
    if len(places) % 2:
        return None
    one, other = np.split(numbers, 2)
    if np.array_equal(places, np.concatenate([-other, one])):
        return False
    one, other = numbers[::2], numbers[1::2]
    return True if np.array_equal(places, np.stack([-other, one], 1).reshape(-1)) else None


def _narrow(value: ir.Value) -> ir.Value:
    """A value after it was cast to halves, if that is all it is read for."""
    only = only_user(value, "Cast")
    return value if only is None or only.outputs[0].dtype != ir.DataType.FLOAT16 else only.outputs[0]
