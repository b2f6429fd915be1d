"""Probe sizes to find axes with: distinct, since sizes that happen to be equal would relate unrelated axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.frontend.agreement import fits
from splitc.compiler.frontend.graph import Graph
from splitc.compiler.frontend.shapes import BoundShapes, bind_shapes, evaluate_size, shape_of
from splitc.compiler.request.shapes import Shape

# Sizes of an image may have to be multiples of the given ones, or of a part of these.
FACTORS = (3, 5, 7, 2)
# For each symbol alone shapes are inferred again, for each of its sizes: more symbols would take too long.
MOST_SYMBOLS = 6
# Probe sizes, in the order in which they are tried, from which models make sizes of less than two. Images are made 32
# times smaller, and sounds some 300 times.
LARGER = (67, 1031)
# The most elements of all inputs with larger sizes, which a package is compared on. A choice.
MOST_ELEMENTS = 1 << 16

# Makes sizes of symbols, from the `smallest` prime on.
Way = Callable[..., dict[str, int]]
Array = npt.NDArray[Any]


def bind_probe_sizes(graph: Graph, shapes: Mapping[str, Shape], bound: BoundShapes) -> BoundShapes:
    """Shapes with a distinct prime for each symbol of the inputs. No prime divides any size of a weight.

    Exporters do not record relations between symbols. So if a symbol's given size is the sum of two others' (total,
    past and new length), its probe size is the sum of theirs. If that leaves more shapes unknown, no sums are kept;
    then the same axis of several inputs gets one symbol where its size is the same, since some exporters name each axis
    anew. The given shapes are returned if all that leaves more shapes unknown (an image whose sides must be multiples
    of the patch size). Where operators agree on none of these sizes, since the model has one as a number, that symbol
    keeps its given size. `constants` and `mixed` have only what does not depend on sizes.
    """
    symbols = _symbols(graph, shapes)
    if not symbols:
        return bound
    ways = [partial(_numbers, graph, symbols, sums) for sums in (True, False)]
    if same := _same_axes(graph, symbols):
        ways += [partial(way, same) for way in ways]
    probed = _first_probed(graph, shapes, bound, ways)
    if probed is None or not fits(graph, probed, bound):
        made = _multiplied(graph, shapes, bound, symbols)
        if made is not None and not symbols.items().isdisjoint(_symbols(graph, made.shapes).items()):
            return made
    return probed or bound


def _multiplied(
    graph: Graph, shapes: Mapping[str, Shape], bound: BoundShapes, symbols: Mapping[str, int]
) -> BoundShapes | None:
    """Other sizes for symbols, multiples of the given ones where primes do not fit. Those that take none keep theirs.

    None if all do, or if there are too many.
    """
    same = _same_axes(graph, symbols)
    made = _one_by_one(graph, shapes, bound, [name for name in symbols if name not in same], keeps=True)
    return None if made is None else _fixed(made, bound)


def _numbers(
    graph: Graph,
    symbols: Mapping[str, int],
    sums: bool,
    same: Mapping[str, str] = MappingProxyType({}),
    smallest: int = 3,
) -> dict[str, int]:
    """As `_number`, with the number of another symbol for some."""
    return _with_same(_number(graph, symbols, sums, smallest=smallest), same)


def _with_same(numbers: Mapping[str, int], same: Mapping[str, str]) -> dict[str, int]:
    """The numbers of symbols, and for some the number of another one."""
    return {**numbers, **{name: numbers[first] for name, first in same.items()}}


def _first_probed(
    graph: Graph, shapes: Mapping[str, Shape], bound: BoundShapes, ways: Sequence[Way]
) -> BoundShapes | None:
    """Shapes with the first of these symbols' sizes that leave no more shapes unknown, and that operators agree on.

    If none are agreed on, the first that leave no more unknown. None if all do.
    """
    first = None
    for way, sizes in ((one, sizes) for one in ways for sizes in _enlarged(graph, one())):
        probed = bind_shapes(graph.model, _input_shapes(graph, shapes, sizes))
        if fits(graph, probed, bound):
            return _fixed(_lengthened(graph, shapes, bound, way, sizes, probed), bound)
        if first is None and len(probed.uncertain) <= len(bound.uncertain):
            first = _fixed(probed, bound)
    return first


def _lengthened(
    graph: Graph,
    shapes: Mapping[str, Shape],
    bound: BoundShapes,
    way: Way,
    sizes: Mapping[str, int],
    probed: BoundShapes,
) -> BoundShapes:
    """These shapes, or others of larger sizes, if fewer axes have one element then that the graph does not call one.

    Such are windows of a length, of which there may be one: the order of axes does not show. Batches stay as they are.
    Those that have one element still, though they have more with the planned sizes, are its `ones`.
    """
    ones = _unnamed_ones(graph, probed)
    batches = {
        size.value
        for value in graph.graph.inputs
        for size in (value.shape or ())[: len(value.shape or ()) > 1]
        if isinstance(size, ir.SymbolicDim)
    }
    for smallest in LARGER if ones else ():
        larger = {name: sizes[name] if name in batches else size for name, size in way(smallest=smallest).items()}
        made = _input_shapes(graph, shapes, larger)
        if sum(map(math.prod, made.values())) > MOST_ELEMENTS:
            break
        tried = bind_shapes(graph.model, made)
        if fits(graph, tried, bound) and len(left := _unnamed_ones(graph, tried)) < len(ones):
            probed, ones = tried, left
    by_chance: dict[str, frozenset[int]] = {}
    for name, axis in ones:
        if bound.shapes[name][axis : axis + 1] not in ((), (1,)):
            by_chance[name] = by_chance.get(name, frozenset()) | {axis}
    return replace(probed, ones=by_chance)


def _unnamed_ones(graph: Graph, bound: BoundShapes) -> list[tuple[str, int]]:
    """The axes of computed values that have one element, and that the graph does not say to have one."""
    ones = []
    for value in (value for node in graph.nodes for value in node.outputs):
        own = value.shape if value.shape is not None else ()
        for axis, size in enumerate(bound.shapes.get(value.name or "", ())):
            if size == 1 and value.name not in bound.uncertain and not (axis < len(own) and own[axis] == 1):
                ones.append((value.name or "", axis))
    return ones


def _enlarged(graph: Graph, numbers: dict[str, int]) -> Iterator[dict[str, int]]:
    """These sizes, and before them larger ones for symbols of which axes are made that would have one element, or none.

    Axes of one element say nothing, and operators that make images smaller refuse such.
    """
    sizes = {size for node in graph.nodes for value in node.outputs for size in value.shape or ()}
    derived = [size for size in sizes if isinstance(size, ir.SymbolicDim) and size.value not in (None, *numbers)]
    larger = numbers
    for smallest in LARGER:
        small = {
            str(symbol)
            for size in derived
            if (count := evaluate_size(size, larger)) is not None and count < 2
            for symbol in size.free_symbols()
        }
        unused = primes_of(graph, smallest)
        larger = {name: next(unused) if name in small else size for name, size in larger.items()}
    yield from (larger, numbers) if larger != numbers else (numbers,)


def bind_same_axes(graph: Graph, shapes: Mapping[str, Shape], bound: BoundShapes) -> BoundShapes | None:
    """Shapes with a prime for each symbol, the same for symbols of inputs' same axis with the same given size.

    Some exporters give the rows of each input a name of their own. None if no two symbols are so, or it leaves more
    shapes unknown.
    """
    symbols = _symbols(graph, shapes)
    if not (same := _same_axes(graph, symbols)):
        return None
    return _first_probed(graph, shapes, bound, [partial(_numbers, graph, symbols, True, same)])


def bind_other_sizes(graph: Graph, shapes: Mapping[str, Shape], bound: BoundShapes) -> BoundShapes:
    """Shapes with another size for each symbol of the inputs, distinct if that can be.

    Those of `bind_probe_sizes`, if they fit; else caches that have symbols of their own get the same size. Else each
    symbol gets a prime or, where that does not fit, a multiple of its given size. The given shapes are returned if some
    symbol takes none of these. A size that is the same though the model's own shapes do not tell so may be by chance,
    where many samples become few tokens: larger primes are taken then, if they tell more such sizes apart.
    """
    other = _bind_other(graph, shapes, bound)
    alike = _count_alike(graph, other, bound) if other is not bound else 0
    symbols = _symbols(graph, shapes)
    caches = _same_axes(graph, symbols, first=2)
    for smallest in LARGER if alike else ():
        made = _bind_numbers(graph, shapes, bound, _number(graph, symbols, True, smallest=smallest), caches)
        if made is not None and (count := _count_alike(graph, made, bound)) < alike:
            other, alike = _fixed(made, bound), count
    return other


def _count_alike(graph: Graph, made: BoundShapes, bound: BoundShapes) -> int:
    """How many sizes of computed values are the same as the given ones, where the model's own shapes do not say so.

    They do where a size is a number, or a symbol that is one.
    """
    count = 0
    for value in (value for node in graph.nodes for value in node.outputs):
        one, other = made.shapes.get(value.name or "", ()), bound.shapes.get(value.name or "", ())
        own = value.shape if value.shape is not None else [None] * len(one)
        sizes = zip(own, one, other, strict=False)
        count += sum(a == b and not str(size).isdigit() for size, a, b in sizes)
    return count


def _bind_other(graph: Graph, shapes: Mapping[str, Shape], bound: BoundShapes) -> BoundShapes:
    """Other sizes than the given ones, by themselves."""
    probed = bind_probe_sizes(graph, shapes, bound)
    if probed is not bound and fits(graph, probed, bound) and _differs(graph, probed, bound):
        return probed
    symbols = _symbols(graph, shapes)
    same = _same_axes(graph, symbols)
    kinds = [name for name in symbols if name not in same]
    caches = _same_axes(graph, symbols, first=2)
    for numbers in (_number(graph, symbols, True, least, skipped) for skipped in (0, 1, 2) for least in (1, 0)):
        if (made := _bind_numbers(graph, shapes, bound, numbers, caches)) is not None:
            return _fixed(made, bound)
    varied = _one_by_one(graph, shapes, bound, kinds)
    if varied is None or not _differs(graph, varied, bound):
        return bound
    return _fixed(varied, bound)


def _bind_numbers(
    graph: Graph,
    shapes: Mapping[str, Shape],
    bound: BoundShapes,
    numbers: Mapping[str, int],
    same: Mapping[str, str],
) -> BoundShapes | None:
    """Shapes with these numbers for symbols, and the `same` for others; None if they do not fit, or differ nowhere."""
    made = bind_shapes(graph.model, _input_shapes(graph, shapes, _with_same(numbers, same)))
    return made if fits(graph, made, bound) and _differs(graph, made, bound) else None


def bind_multiples(
    graph: Graph, shapes: Mapping[str, Shape], bound: BoundShapes, probed: BoundShapes
) -> BoundShapes | None:
    """Other sizes for a model that primes do not fit, such as one that makes an image smaller and larger again.

    `probed` is what `bind_probe_sizes` gives. Symbols that take no other size keep theirs. None if the probe sizes do
    fit, or if there are no other sizes.
    """
    if probed is not bound and fits(graph, probed, bound):
        return None
    return _multiplied(graph, shapes, bound, _symbols(graph, shapes))


def _one_by_one(
    graph: Graph, shapes: Mapping[str, Shape], bound: BoundShapes, kinds: Sequence[str], keeps: bool = False
) -> BoundShapes | None:
    """Shapes with another size for each of these symbols and those of the same axis, each tried by itself.

    None if there are too many, or if one takes no other size, unless it `keeps` its own; then if all do.
    """
    if not 0 < len(kinds) <= MOST_SYMBOLS:
        return None
    symbols, made = _symbols(graph, shapes), None
    same, primes = _same_axes(graph, symbols), _number(graph, symbols, False)
    numbers = dict(symbols)
    for kind in kinds:
        for size in (primes[kind], *(factor * symbols[kind] for factor in FACTORS)):
            if size in numbers.values():
                continue
            tried = {**numbers, kind: size, **{name: size for name, first in same.items() if first == kind}}
            probed = bind_shapes(graph.model, _input_shapes(graph, shapes, tried))
            if fits(graph, probed, bound):
                numbers, made = tried, probed
                break
        else:
            if not keeps:
                return None
    return made


def _differs(graph: Graph, made: BoundShapes, bound: BoundShapes) -> bool:
    """Whether each size of inputs and outputs that follows from symbols of inputs has another value than the given one.

    A prime may be a given size by chance, and so may a sum, as of a past and a new length. A model may name a size of
    an output by a symbol that it is not.
    """
    known = _symbols(graph, bound.shapes)
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        one, other = made.shapes.get(value.name or ""), bound.shapes.get(value.name or "")
        for size, first, second in zip(value.shape or (), one or (), other or (), strict=False):
            if isinstance(size, ir.SymbolicDim) and first == second:
                names = {str(symbol) for symbol in size.free_symbols()}
                given = known.get(size.value or "")
                if given == second or (given is None and names and names <= known.keys()):
                    return False
    return True


def _symbols(graph: Graph, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The symbols of the inputs, with their given sizes."""
    symbols: dict[str, int] = {}
    for value in graph.graph.inputs:
        for size, number in zip(value.shape or (), shapes[value.name or ""], strict=False):
            # Some exporters write a number as a symbol: "4" is any length, or the number of heads, if there are 4.
            if isinstance(size, ir.SymbolicDim) and size.value and size.value != str(number):
                symbols[size.value] = number
    return symbols


def _fixed(made: BoundShapes, bound: BoundShapes) -> BoundShapes:
    """With only the constants, and entries of constants, that are equal with both sizes, so do not depend on them."""
    same, mixed = {}, {}
    for name, array in made.constants.items():
        if (other := bound.constants.get(name)) is None or other.shape != array.shape:
            continue
        if np.array_equal(array, other):
            same[name] = array
        elif array.ndim == 1 and array.dtype.kind == "i" and np.any(array == other):
            mixed[name] = [int(a) if a == b else None for a, b in zip(array, other, strict=True)]
    return replace(made, constants=same, mixed=mixed)


def _same_axes(graph: Graph, symbols: Mapping[str, int], first: int = 0) -> dict[str, str]:
    """Symbols of an input's axis, from the `first` on, and the first one of the same axis with the same given size."""
    firsts: dict[tuple[int, int], str] = {}
    same: dict[str, str] = {}
    for value in graph.graph.inputs:
        for axis, size in enumerate(value.shape or ()):
            name = size.value if isinstance(size, ir.SymbolicDim) else None
            if name is not None and name in symbols and axis >= first:
                same.setdefault(name, firsts.setdefault((axis, symbols[name]), name))
    return {name: other for name, other in same.items() if name != other}


def _number(
    graph: Graph, symbols: Mapping[str, int], sums: bool, least: int = 1, skipped: int = 0, smallest: int = 3
) -> dict[str, int]:
    """A probe size for each symbol. With `sums`, one that is the sum of two others, each at least `least`, stays so.

    They are primes from the `smallest` on, of which so many are `skipped`.
    """
    primes = itertools.islice(primes_of(graph, smallest), skipped, None)
    numbers: dict[str, int] = {}
    for symbol, size in sorted(symbols.items(), key=lambda item: item[1]):
        parts = [
            (a, b)
            for a, b in itertools.combinations(numbers, 2)
            if sums and symbols[a] + symbols[b] == size and min(symbols[a], symbols[b]) >= least
        ]
        numbers[symbol] = numbers[parts[0][0]] + numbers[parts[0][1]] if parts else next(primes)
    return numbers


def primes_of(graph: Graph, smallest: int = 3) -> Iterator[int]:
    """The odd primes from the smallest on that divide no size of a weight."""
    avoid = {size for weight in graph.graph.initializers.values() for size in shape_of(weight)}
    for number in itertools.count(smallest, 2):
        is_prime = all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))
        if is_prime and not any(size % number == 0 for size in avoid if size):
            yield number


def _input_shapes(graph: Graph, planned: Mapping[str, Shape], numbers: Mapping[str, int]) -> dict[str, Shape]:
    """The inputs' shapes: symbols and expressions of symbols with the new `numbers`, other sizes as given."""
    shapes = {}
    for value in graph.graph.inputs:
        sizes = []
        for size, old in zip(value.shape or (), planned[value.name or ""], strict=False):
            new = numbers.get(size.value or "") if isinstance(size, ir.SymbolicDim) else None
            if isinstance(size, ir.SymbolicDim) and size.value and any(str(s) in numbers for s in size.free_symbols()):
                result = evaluate_size(size, {str(s): numbers.get(str(s), old) for s in size.free_symbols()})
                new = result if result is not None and result > 0 else new
            sizes.append(old if new is None else new)
        shapes[value.name or ""] = tuple(sizes)
    return shapes
