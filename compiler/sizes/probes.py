"""Probe sizes, with which axes are related: distinct, since equal sizes would relate unrelated axes by accident."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import onnx_ir as ir

from splitc.compiler.inference.observation import primes, primes_of
from splitc.compiler.inference.shapes import BoundShapes, bind_shapes, evaluate_size, sizes_of_symbols
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.remembered import remembered
from splitc.compiler.request.shapes import Shape
from splitc.compiler.sizes.agreement import LARGER, count_alike, enlarged, fits, unnamed_ones

# Multiples of the given sizes to try: sizes of an image may have to be multiples of these, or of a divisor.
FACTORS = (3, 5, 7, 2)
# Powers of two to try: models reduce the sides of images to a 64th.
POWERS = (1, 2, 4, 8, 16, 32, 64)
# Shapes are inferred for each size of each symbol: more symbols would take too long.
MOST_SYMBOLS = 6
# The most pairs of symbols to try for one that is a sum. A choice: a batch and a token have the same size.
MOST_PAIRS = 4
# The most elements of all inputs with larger sizes, with which a package is compared. A choice.
MOST_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Way:
    """How symbols get their probe sizes: a prime, or with `sums` the sum of two others' if the given sizes are so.

    - `same`: symbols that get the same size as another one.
    - `least`: the least given size of a summand.
    - `pair`: which two others, if several have the sum: 5 may be a past of 4 and a batch, or a token.
    - `skipped`: the number of primes to skip. `smallest`: the first prime.
    - `divides_weights`: primes that divide a size of a weight are taken too, so that sizes are small.
    """

    sums: bool = True
    same: Mapping[str, str] = field(default_factory=dict)
    least: int = 1
    pair: int = 0
    skipped: int = 0
    smallest: int = 3
    divides_weights: bool = False


@dataclass(frozen=True, eq=False)
class Probes:
    """Probe sizes for the symbols of a graph's inputs. `bound` are all shapes for the given input `shapes`.

    The results have only those `constants`, and entries of constants (`mixed`), that are the same for both sizes.
    """

    graph: Graph
    shapes: Mapping[str, Shape]
    bound: BoundShapes

    def distinct(self) -> BoundShapes:
        """Shapes with a distinct prime for each symbol of the inputs. No prime divides any size of a weight.

        Exporters do not record relations between symbols. So if a symbol's given size is the sum of two others' (total,
        past and new length), its probe size is the sum of theirs. If more shapes are unknown then, sums are not kept.
        If still more are unknown, symbols of the same axis of several inputs with equal given sizes get the same prime,
        since some exporters name each axis anew.

        If more are unknown in any case, or shapes disagree, sizes are multiples of the given ones where primes do not
        fit (an image whose sides must be multiples of the patch size), or the given ones, where the model has them as
        numbers. The given shapes are returned if none of these are as well known.
        """
        if not self._symbols:
            return self.bound
        ways = [*(Way(pair=pair) for pair in self._pairs), Way(sums=False)]
        if self._same:
            ways += [replace(way, same=self._same) for way in ways]
        probed = self._first_probed(ways)
        if probed is None or not self._fits(probed):
            probed = self._multiplied() or probed
        return probed or self.bound

    def with_same_axes(self) -> Iterator[BoundShapes]:
        """Shapes with a prime for each symbol: one for all symbols of the same axis of inputs with equal given sizes.

        Some exporters name the rows of each input differently. If the given cache is empty, there are also shapes with
        a mask as long as the cache and the new tokens. Shapes with more unknown sizes are omitted.
        """
        ways = [Way(same=self._same)] if self._same else []
        empty = Way(same=self._same_rows, least=0)
        if self._numbers(empty) != self._numbers(Way(same=self._same_rows)):
            ways.append(empty)
        yield from (made for way in ways if (made := self._first_probed([way])) is not None)

    def multiples(self, probed: BoundShapes) -> BoundShapes | None:
        """Shapes for a model that primes do not fit, as one that downsamples and upsamples an image: with multiples.

        A symbol that no other size fits keeps its given size. None if all do, or if `probed`, by `distinct`, fit.
        """
        return None if probed is not self.bound and self._fits(probed) else self._multiplied()

    def broadcast(self, probed: BoundShapes, rows: int) -> BoundShapes | None:
        """The shapes `probed` with this number of rows for symbols of size 1 that may have it; None without any."""
        numbers, made = sizes_of_symbols(self.graph.graph, probed.shapes), None
        for name in [name for name, size in numbers.items() if size == 1]:
            tried = {**numbers, name: rows}
            if self._fits(bound := self._bind(tried)):
                numbers, made = tried, bound
        return None if made is None else self._fixed(made)

    def small(self) -> list[BoundShapes]:
        """Shapes of few elements, to run a model or a part of it with: the first that fit, and those for one row.

        A distinct small prime for each symbol, the same one for all caches and for the rows of all inputs, or else for
        the same axis of all inputs, or for all symbols of one given size. For images that are downsampled, these times
        a power of two where the given size is a multiple. Shapes for one row are for operators that take several tokens
        after cached ones only for one row. Constants are those of these sizes.
        """
        made = [next(filter(self._fits, self._small(keeps_ones)), None) for keeps_ones in (False, True)]
        return [bound for bound in made if bound is not None]

    def refused(self) -> list[BoundShapes]:
        """Shapes that are tried before the first of `small`. The model may take them, of which this graph was made."""
        return list(itertools.takewhile(lambda made: not self._fits(made), self._small(False)))

    def _small(self, keeps_ones: bool) -> Iterator[BoundShapes]:
        """Shapes to try in turn for `small`; none for a model without symbols."""
        firsts = dict[int, str]()
        alike = {name: firsts.setdefault(size, name) for name, size in self._symbols.items()}
        equal = {name: first for name, first in alike.items() if first != name}
        kept = {name: 1 for name, size in self._symbols.items() if size == 1 and keeps_ones}
        kinds, tried = (self._same_rows, self._same, self._caches, equal), list[Mapping[str, int]]()
        for same, least, pair in itertools.product(kinds if self._symbols else (), (0, 1), self._pairs):
            way = Way(same=same, least=least, pair=pair, divides_weights=True)
            numbers = {**self._numbers(way), **kept}
            for factor in POWERS:
                scaled = {name: size * factor if self._scales(name, factor) else size for name, size in numbers.items()}
                if scaled not in tried:  # several ways lead to the same sizes
                    tried.append(scaled)
                    yield self._bind(scaled)

    def _scales(self, name: str, factor: int) -> bool:
        """Whether a symbol's given size is a multiple of this, as the sides of images are."""
        return self._symbols[name] >= factor and self._symbols[name] % factor == 0

    def different(self) -> BoundShapes:
        """Shapes with another size for each symbol of the inputs, distinct if possible.

        The first of these that fit:

        - Those of `distinct`.
        - Primes, with the same one for all caches that have symbols of their own, or for all that are empty.
        - For each symbol a prime, or a multiple of its given size.
        - The given shapes.

        If a model makes few tokens of many samples, a computed size may stay the same by chance, although it is not
        fixed. Then larger primes are taken if they change more of these sizes.
        """
        other = self._different()
        alike = count_alike(self.graph, other, self.bound) if other is not self.bound else 0
        for smallest in LARGER if alike else ():
            made = self._bind_different(Way(same=self._caches, smallest=smallest))
            if made is not None and (count := count_alike(self.graph, made, self.bound)) < alike:
                other, alike = self._fixed(made), count
        return other

    @cached_property
    def _symbols(self) -> Mapping[str, int]:
        return sizes_of_symbols(self.graph.graph, self.shapes)

    @cached_property
    def _pairs(self) -> range:
        """The numbers of pairs to try: as many as have one symbol's given size as their sum."""
        counts = Counter(a + b for a, b in itertools.combinations(self._symbols.values(), 2))
        return range(max([1, *(min(MOST_PAIRS, counts[size]) for size in self._symbols.values())]))

    @cached_property
    def _same(self) -> Mapping[str, str]:
        return self._same_axes(lambda _: True)

    @cached_property
    def _caches(self) -> Mapping[str, str]:
        """As `_same`, by each symbol's first axis from 2 on: a mask may have the length of encoder states before."""
        return self._same_axes(lambda axis: axis >= 2, pins=False)

    @cached_property
    def _empty(self) -> Mapping[str, str]:
        """The symbols of empty caches, with the first one: that of transposed keys is of another axis than values'."""
        first, *others = [name for name, size in self._symbols.items() if size == 0] or [""]
        return dict.fromkeys(others, first)

    @cached_property
    def _same_rows(self) -> Mapping[str, str]:
        """As `_same`, without axis 1, which is usually a length."""
        return self._same_axes(lambda axis: axis != 1)

    def _same_axes(self, counts: Callable[[int], bool], pins: bool = True) -> dict[str, str]:
        """The symbols of axes for which `counts` holds, each with the first symbol of the same axis and given size.

        An axis for which it does not hold `pins` a symbol.
        """
        firsts: dict[tuple[int, int], str] = {}
        same: dict[str, str] = {}
        for value in self.graph.graph.inputs:
            for axis, size in enumerate(value.shape or ()):
                name = size.value if isinstance(size, ir.SymbolicDim) else None
                if name is not None and name in self._symbols and name not in same and (pins or counts(axis)):
                    same[name] = firsts.setdefault((axis, self._symbols[name]), name) if counts(axis) else name
        return {name: other for name, other in same.items() if name != other}

    def _fits(self, made: BoundShapes) -> bool:
        return fits(self.graph, made, self.bound)

    def _bind(self, numbers: Mapping[str, int]) -> BoundShapes:
        return self._bound_to(tuple(self._input_shapes(numbers).items()))

    @remembered  # several ways lead to the same sizes
    def _bound_to(self, shapes: tuple[tuple[str, Shape], ...]) -> BoundShapes:
        return bind_shapes(self.graph.model, dict(shapes))

    def _multiplied(self) -> BoundShapes | None:
        """Other sizes of symbols, or multiples of the given ones. None if all keep theirs, or if there are too many."""
        made = self._one_by_one(keeps=True)
        return None if made is None else self._fixed(made)

    def _first_probed(self, ways: Sequence[Way]) -> BoundShapes | None:
        """Shapes for the first of these sizes that fit, else for the first with which no more shapes are unknown.

        None if more are unknown with all of them.
        """
        first = None
        for way, sizes in ((one, sizes) for one in ways for sizes in enlarged(self.graph, self._numbers(one))):
            probed = self._bind(sizes)
            if self._fits(probed):
                return self._fixed(self._lengthened(way, sizes, probed))
            if first is None and len(probed.uncertain) <= len(self.bound.uncertain):
                first = self._fixed(probed)
        return first

    def _lengthened(self, way: Way, sizes: Mapping[str, int], probed: BoundShapes) -> BoundShapes:
        """These shapes, or those of larger sizes with which fewer computed axes have one element by chance.

        Such axes count windows of a length: with one window, the order of axes does not show. Batches keep their size.
        Axes that still have one element, but more with the planned sizes, are the result's `ones`.
        """
        ones = unnamed_ones(self.graph, probed)
        batches = {
            size.value
            for value in self.graph.graph.inputs
            for size in (value.shape or ())[: len(value.shape or ()) > 1]
            if isinstance(size, ir.SymbolicDim)
        }
        for smallest in LARGER if ones else ():
            numbers = self._numbers(replace(way, smallest=smallest))
            larger = {name: sizes[name] if name in batches else size for name, size in numbers.items()}
            if sum(map(math.prod, self._input_shapes(larger).values())) > MOST_ELEMENTS:
                break
            tried = self._bind(larger)
            if self._fits(tried) and len(left := unnamed_ones(self.graph, tried)) < len(ones):
                probed, ones = tried, left
        by_chance: dict[str, frozenset[int]] = {}
        for name, axis in ones:
            if self.bound.shapes.get(name, ())[axis : axis + 1] not in ((), (1,)):
                by_chance[name] = by_chance.get(name, frozenset()) | {axis}
        return replace(probed, ones=by_chance)

    def _different(self) -> BoundShapes:
        """Other sizes than the given ones, without larger primes."""
        probed = self.distinct()
        if probed is not self.bound and self._fits(probed) and self._differs(probed):
            return probed
        kinds = (self._caches, self._empty) if self._empty else (self._caches,)
        for same, skipped, least, pair in itertools.product(kinds, (0, 1, 2), (1, 0), self._pairs):
            if (made := self._bind_different(Way(same=same, least=least, pair=pair, skipped=skipped))) is not None:
                return self._fixed(made)
        made = next((one for one in self._scaled() if self._fits(one) and self._differs(one)), None)
        return self.bound if made is None else self._fixed(made)

    def _scaled(self) -> Iterator[BoundShapes]:
        """Other sizes one by one, then all multiplied, if they are distinct: numbers of patches, windows, and borders.

        Borders are one more than what lies between them, of which there are values.
        """
        if (varied := self._one_by_one()) is not None:
            yield varied
        apart = [size for name, size in self._symbols.items() if name not in self._same]
        if len(set(apart)) < len(apart):
            return
        sizes = {str(size) for node in self.graph.nodes for value in node.outputs for size in value.shape or ()}
        more = {name: int(f"{name} - 1" in sizes) for name in self._symbols}
        for factor in FACTORS:
            yield self._bind({name: factor * (size - more[name]) + more[name] for name, size in self._symbols.items()})

    def _bind_different(self, way: Way) -> BoundShapes | None:
        """Shapes with sizes of this way; None if they do not fit, or are not all different."""
        made = self._bind(self._numbers(way))
        return made if self._fits(made) and self._differs(made) else None

    def _one_by_one(self, keeps: bool = False) -> BoundShapes | None:
        """Shapes with another size for each symbol and those of the same axis, tried one symbol at a time.

        None if there are too many symbols, or if one takes no other size. If it `keeps`, such a symbol keeps its own;
        None if all do.
        """
        kinds = [name for name in self._symbols if name not in self._same]
        if not 0 < len(kinds) <= MOST_SYMBOLS:
            return None
        primes, numbers, made = self._numbers(Way(sums=False)), dict(self._symbols), None
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
        """Whether each size of inputs and outputs that follows from symbols of inputs differs from the given one.

        A prime may equal a given size by chance, and so may a sum, such as that of a past and a new length. An output's
        size that contradicts its symbol is not compared: models declare wrong ones.
        """
        known = sizes_of_symbols(self.graph.graph, self.bound.shapes)
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
        """The same shapes with only the constants, and entries of constants, that are equal for both sizes."""
        same, mixed = {}, {}
        for name, array in made.constants.items():
            if (other := self.bound.constants.get(name)) is None or other.shape != array.shape:
                continue
            if np.array_equal(array, other):
                same[name] = array
            elif array.ndim == 1 and array.dtype.kind == "i" and np.any(array == other):
                mixed[name] = [int(a) if a == b else None for a, b in zip(array, other, strict=True)]
        return replace(made, constants=same, mixed=mixed)

    def _numbers(self, way: Way) -> dict[str, int]:
        """A probe size for each symbol."""
        own = primes(way.smallest) if way.divides_weights else primes_of(self.graph.graph, way.smallest)
        unused = itertools.islice(own, way.skipped, None)
        symbols, numbers = self._symbols, dict[str, int]()
        for symbol, size in sorted(symbols.items(), key=lambda item: item[1]):
            if symbol in way.same:
                continue  # it takes no prime, so that those of the others stay small
            parts = [
                numbers[a] + numbers[b]
                for a, b in itertools.combinations(numbers, 2)
                if way.sums and symbols[a] + symbols[b] == size and min(symbols[a], symbols[b]) >= way.least
            ]
            numbers[symbol] = parts[min(way.pair, len(parts) - 1)] if parts else next(unused)
        return {**numbers, **{name: numbers[first] for name, first in way.same.items()}}

    def _input_shapes(self, numbers: Mapping[str, int]) -> dict[str, Shape]:
        """The inputs' shapes: symbols and expressions of symbols with the new `numbers`, other sizes as given."""
        shapes = {}
        for value in self.graph.graph.inputs:
            sizes = []
            for size, old in zip(value.shape or (), self.shapes[value.name or ""], strict=False):
                new = numbers.get(size.value or "") if isinstance(size, ir.SymbolicDim) else None
                names = {str(symbol) for symbol in size.free_symbols()} if isinstance(size, ir.SymbolicDim) else set()
                # A symbol alone is not evaluated as an expression, which takes sympy 0.2 ms.
                if isinstance(size, ir.SymbolicDim) and size.value not in names and names & numbers.keys():
                    result = evaluate_size(size, {name: numbers.get(name, old) for name in names})
                    new = result if result is not None and result > 0 else new
                sizes.append(old if new is None else new)
            shapes[value.name or ""] = tuple(sizes)
        return shapes
