"""Probe sizes to find axes with: distinct, since sizes that happen to be equal would relate unrelated axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
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


@dataclass(frozen=True)
class Probes:
    """Other sizes for the symbols of a graph's inputs than the given `shapes` have, with which all shapes are `bound`.

    What they bind has only those `constants`, and entries of constants (`mixed`), that do not depend on sizes.
    """

    graph: Graph
    shapes: Mapping[str, Shape]
    bound: BoundShapes

    def distinct(self) -> BoundShapes:
        """Shapes with a distinct prime for each symbol of the inputs. No prime divides any size of a weight.

        Exporters do not record relations between symbols. So if a symbol's given size is the sum of two others' (total,
        past and new length), its probe size is the sum of theirs. If that leaves more shapes unknown, no sums are kept;
        then the same axis of several inputs gets one symbol where its size is the same, since some exporters name each
        axis anew. The given shapes are returned if all that leaves more shapes unknown (an image whose sides must be
        multiples of the patch size). Where operators agree on none of these sizes, since the model has one as a number,
        that symbol keeps its given size.
        """
        if not self._symbols:
            return self.bound
        ways: list[Way] = [partial(self._numbers, sums) for sums in (True, False)]
        if self._same:
            ways += [partial(way, self._same) for way in ways]
        probed = self._first_probed(ways)
        if probed is None or not self._fits(probed):
            made = self._multiplied()
            if made is not None and not self._symbols.items().isdisjoint(_symbols(self.graph, made.shapes).items()):
                return made
        return probed or self.bound

    def with_same_axes(self) -> BoundShapes | None:
        """Shapes with a prime for each symbol, the same for symbols of inputs' same axis with the same given size.

        Some exporters give the rows of each input a name of their own. None if no two symbols are so, or it leaves more
        shapes unknown.
        """
        return self._first_probed([partial(self._numbers, True, self._same)]) if self._same else None

    def multiples(self, probed: BoundShapes) -> BoundShapes | None:
        """Other sizes for a model that primes do not fit, such as one that makes an image smaller and larger again.

        `probed` are the `distinct` ones. Symbols that take no other size keep theirs. None if the probe sizes do fit,
        or if there are no other sizes.
        """
        return None if probed is not self.bound and self._fits(probed) else self._multiplied()

    def different(self) -> BoundShapes:
        """Shapes with another size for each symbol of the inputs, distinct if that can be.

        Those of `distinct`, if they fit; else caches that have symbols of their own get the same size. Else each symbol
        gets a prime or, where that does not fit, a multiple of its given size. The given shapes are returned if some
        symbol takes none of these. A size that is the same though the model's own shapes do not tell so may be by
        chance, where many samples become few tokens: larger primes are taken then, if they tell more such sizes apart.
        """
        other = self._different()
        alike = _count_alike(self.graph, other, self.bound) if other is not self.bound else 0
        for smallest in LARGER if alike else ():
            made = self._bind_different(self._numbers(True, self._caches, smallest=smallest))
            if made is not None and (count := _count_alike(self.graph, made, self.bound)) < alike:
                other, alike = self._fixed(made), count
        return other

    @cached_property
    def _symbols(self) -> Mapping[str, int]:
        return _symbols(self.graph, self.shapes)

    @cached_property
    def _same(self) -> Mapping[str, str]:
        return self._same_axes(0)

    @cached_property
    def _caches(self) -> Mapping[str, str]:
        """As `_same`, for axes behind those of the batch and of heads."""
        return self._same_axes(2)

    def _same_axes(self, first: int) -> dict[str, str]:
        """Symbols of an input's axis, from the `first` on, and the first one of that axis with the same given size."""
        firsts: dict[tuple[int, int], str] = {}
        same: dict[str, str] = {}
        for value in self.graph.graph.inputs:
            for axis, size in enumerate(value.shape or ()):
                name = size.value if isinstance(size, ir.SymbolicDim) else None
                if name is not None and name in self._symbols and axis >= first:
                    same.setdefault(name, firsts.setdefault((axis, self._symbols[name]), name))
        return {name: other for name, other in same.items() if name != other}

    def _fits(self, made: BoundShapes) -> bool:
        return fits(self.graph, made, self.bound)

    def _bind(self, numbers: Mapping[str, int]) -> BoundShapes:
        return bind_shapes(self.graph.model, self._input_shapes(numbers))

    def _multiplied(self) -> BoundShapes | None:
        """Other sizes for symbols, multiples of the given ones where primes do not fit. Some may keep theirs.

        None if all do, or if there are too many.
        """
        made = self._one_by_one(keeps=True)
        return None if made is None else self._fixed(made)

    def _first_probed(self, ways: Sequence[Way]) -> BoundShapes | None:
        """Shapes with the first of these symbols' sizes that leave no more shapes unknown, and that operators agree on.

        If none are agreed on, the first that leave no more unknown. None if all do.
        """
        first = None
        for way, sizes in ((one, sizes) for one in ways for sizes in _enlarged(self.graph, one())):
            probed = self._bind(sizes)
            if self._fits(probed):
                return self._fixed(self._lengthened(way, sizes, probed))
            if first is None and len(probed.uncertain) <= len(self.bound.uncertain):
                first = self._fixed(probed)
        return first

    def _lengthened(self, way: Way, sizes: Mapping[str, int], probed: BoundShapes) -> BoundShapes:
        """These shapes, or those of larger sizes, if fewer axes have one element then that the graph does not call one.

        Such are windows of a length, of which there may be one: the order of axes does not show. Batches stay as they
        are. Those that have one element still, though they have more with the planned sizes, are its `ones`.
        """
        ones = _unnamed_ones(self.graph, probed)
        batches = {
            size.value
            for value in self.graph.graph.inputs
            for size in (value.shape or ())[: len(value.shape or ()) > 1]
            if isinstance(size, ir.SymbolicDim)
        }
        for smallest in LARGER if ones else ():
            larger = {name: sizes[name] if name in batches else size for name, size in way(smallest=smallest).items()}
            if sum(map(math.prod, self._input_shapes(larger).values())) > MOST_ELEMENTS:
                break
            tried = self._bind(larger)
            if self._fits(tried) and len(left := _unnamed_ones(self.graph, tried)) < len(ones):
                probed, ones = tried, left
        by_chance: dict[str, frozenset[int]] = {}
        for name, axis in ones:
            if self.bound.shapes[name][axis : axis + 1] not in ((), (1,)):
                by_chance[name] = by_chance.get(name, frozenset()) | {axis}
        return replace(probed, ones=by_chance)

    def _different(self) -> BoundShapes:
        """Other sizes than the given ones, by themselves."""
        probed = self.distinct()
        if probed is not self.bound and self._fits(probed) and self._differs(probed):
            return probed
        for skipped, least in itertools.product((0, 1, 2), (1, 0)):
            if (made := self._bind_different(self._numbers(True, self._caches, least, skipped))) is not None:
                return self._fixed(made)
        varied = self._one_by_one()
        return self.bound if varied is None or not self._differs(varied) else self._fixed(varied)

    def _bind_different(self, numbers: Mapping[str, int]) -> BoundShapes | None:
        """Shapes with these numbers for symbols; None if they do not fit, or differ nowhere."""
        made = self._bind(numbers)
        return made if self._fits(made) and self._differs(made) else None

    def _one_by_one(self, keeps: bool = False) -> BoundShapes | None:
        """Shapes with another size for each symbol and those of the same axis, each tried by itself.

        None if there are too many, or if one takes no other size, unless it `keeps` its own; then if all do.
        """
        kinds = [name for name in self._symbols if name not in self._same]
        if not 0 < len(kinds) <= MOST_SYMBOLS:
            return None
        primes, numbers, made = self._numbers(False), dict(self._symbols), None
        for kind in kinds:
            for size in (primes[kind], *(factor * self._symbols[kind] for factor in FACTORS)):
                if size in numbers.values():
                    continue
                tried = {**numbers, kind: size, **{name: size for name, first in self._same.items() if first == kind}}
                probed = self._bind(tried)
                if self._fits(probed):
                    numbers, made = tried, probed
                    break
            else:
                if not keeps:
                    return None
        return made

    def _differs(self, made: BoundShapes) -> bool:
        """Whether each size of inputs and outputs that follows from symbols of inputs is another one than given.

        A prime may be a given size by chance, and so may a sum, as of a past and a new length. A model may name a size
        of an output by a symbol that it is not.
        """
        known = _symbols(self.graph, self.bound.shapes)
        for value in (*self.graph.graph.inputs, *self.graph.graph.outputs):
            one, other = made.shapes.get(value.name or ""), self.bound.shapes.get(value.name or "")
            for size, first, second in zip(value.shape or (), one or (), other or (), strict=False):
                if isinstance(size, ir.SymbolicDim) and first == second:
                    names = {str(symbol) for symbol in size.free_symbols()}
                    given = known.get(size.value or "")
                    if given == second or (given is None and names and names <= known.keys()):
                        return False
        return True

    def _fixed(self, made: BoundShapes) -> BoundShapes:
        """With only the constants, and entries of constants, that are equal with both sizes."""
        same, mixed = {}, {}
        for name, array in made.constants.items():
            if (other := self.bound.constants.get(name)) is None or other.shape != array.shape:
                continue
            if np.array_equal(array, other):
                same[name] = array
            elif array.ndim == 1 and array.dtype.kind == "i" and np.any(array == other):
                mixed[name] = [int(a) if a == b else None for a, b in zip(array, other, strict=True)]
        return replace(made, constants=same, mixed=mixed)

    def _numbers(
        self,
        sums: bool,
        same: Mapping[str, str] = MappingProxyType({}),
        least: int = 1,
        skipped: int = 0,
        smallest: int = 3,
    ) -> dict[str, int]:
        """A probe size for each symbol. With `sums`, one that is the sum of two others, each at least `least`, is so.

        They are primes from the `smallest` on, of which so many are `skipped`. Some symbols have the `same` as others.
        """
        primes = itertools.islice(primes_of(self.graph, smallest), skipped, None)
        symbols, numbers = self._symbols, dict[str, int]()
        for symbol, size in sorted(symbols.items(), key=lambda item: item[1]):
            parts = [
                (a, b)
                for a, b in itertools.combinations(numbers, 2)
                if sums and symbols[a] + symbols[b] == size and min(symbols[a], symbols[b]) >= least
            ]
            numbers[symbol] = numbers[parts[0][0]] + numbers[parts[0][1]] if parts else next(primes)
        return {**numbers, **{name: numbers[first] for name, first in same.items()}}

    def _input_shapes(self, numbers: Mapping[str, int]) -> dict[str, Shape]:
        """The inputs' shapes: symbols and expressions of symbols with the new `numbers`, other sizes as given."""
        shapes = {}
        for value in self.graph.graph.inputs:
            sizes = []
            for size, old in zip(value.shape or (), self.shapes[value.name or ""], strict=False):
                new = numbers.get(size.value or "") if isinstance(size, ir.SymbolicDim) else None
                names = {str(symbol) for symbol in size.free_symbols()} if isinstance(size, ir.SymbolicDim) else set()
                if isinstance(size, ir.SymbolicDim) and not numbers.keys().isdisjoint(names):
                    result = evaluate_size(size, {name: numbers.get(name, old) for name in names})
                    new = result if result is not None and result > 0 else new
                sizes.append(old if new is None else new)
            shapes[value.name or ""] = tuple(sizes)
        return shapes


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


def _symbols(graph: Graph, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The symbols of the inputs, with their given sizes."""
    symbols: dict[str, int] = {}
    for value in graph.graph.inputs:
        for size, number in zip(value.shape or (), shapes[value.name or ""], strict=False):
            # Some exporters write a number as a symbol: "4" is any length, or the number of heads, if there are 4.
            if isinstance(size, ir.SymbolicDim) and size.value and size.value != str(number):
                symbols[size.value] = number
    return symbols


def primes_of(graph: Graph, smallest: int = 3) -> Iterator[int]:
    """The odd primes from the smallest on that divide no size of a weight."""
    avoid = {size for weight in graph.graph.initializers.values() for size in shape_of(weight)}
    for number in itertools.count(smallest, 2):
        is_prime = all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))
        if is_prime and not any(size % number == 0 for size in avoid if size):
            yield number
