"""The sizes of a model's inputs: one for each symbol, given by the user, stated in a config, or a default."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType

import onnx_ir as ir

from splitc.compiler.inference.shapes import evaluate_size, may_be_same, sizes_of
from splitc.compiler.request.shapes import LARGEST, Shape, check_size
from splitc.runtime.errors import MisuseError
from splitc.runtime.units import format_shape

# The sizes to begin with: for an input's first dimension (usually the batch), and for any other. A choice, which
# --shapes replaces: small, so that trying them is fast, and with many divisors, since heads and windows divide lengths.
DEFAULT_BATCH, DEFAULT_LENGTH = 1, 16


@dataclass(frozen=True)
class InputSizes:
    """The `given` shapes of some inputs, and a size for each symbol of all inputs.

    - `fixed`: sizes of symbols in the given shapes.
    - `stated`: sizes from a config beside the model; given ones are preferred.
    - `made_up`: defaults for all other symbols. Those in `past` (lengths of caches) are 0.
    """

    given: Mapping[str, Shape]
    fixed: Mapping[str, int]
    stated: Mapping[str, int]
    made_up: Mapping[str, int]
    past: frozenset[str] = field(default_factory=frozenset)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each symbol."""
        return {**self.made_up, **self.stated, **self.fixed}

    def changed(self, changes: Mapping[str, int]) -> InputSizes:
        """The same with other sizes for symbols that are not fixed."""
        made_up = {symbol: changes.get(symbol, size) for symbol, size in self.made_up.items()}
        stated = {symbol: changes.get(symbol, size) for symbol, size in self.stated.items()}
        return replace(self, made_up=made_up, stated=stated)

    def shapes(self, model: ir.Model) -> dict[str, Shape]:
        """The shape of each input."""
        sizes = self.sizes
        bind = cache(lambda size: _bind(size, sizes))  # the caches of all layers have the same few sizes
        bound = {value.name or "": tuple(map(bind, value.shape or ())) for value in model.graph.inputs}
        return {**bound, **self.given}


def input_sizes(
    model: ir.Model,
    given: Mapping[str, Shape],
    past: frozenset[str],
    stated: Mapping[str, Sequence[int | None]] = MappingProxyType({}),
    ignored: Collection[ir.Value] = (),
) -> InputSizes:
    """A size for each symbol of the inputs. Shapes given for `ignored` (removed) inputs fix symbols too.

    Exporters give one length several symbols. So a symbol that is neither given nor stated gets the largest given size:
    of first axes if it is a first axis, else of the others. If none is given, it gets a default.

    Raises MisuseError for a shape of an unknown input, or one that contradicts the model or another one.
    """
    inputs = {value.name or "": value for value in model.graph.inputs}
    known = {**inputs, **{value.name or "": value for value in ignored}}
    _check_given(known, given)
    free = {
        (axis > 0, size)
        for name, shape in given.items()
        for axis, (declared, size) in enumerate(zip(known[name].shape or (), shape, strict=False))
        if isinstance(declared, ir.SymbolicDim) and declared.value not in past
    }
    batch = max((size for later, size in free if not later), default=DEFAULT_BATCH)
    length = max((size for later, size in free if later), default=DEFAULT_LENGTH)
    made_up = {
        symbol: 0 if symbol in past else batch if is_first else length for symbol, is_first in _symbols(inputs).items()
    }
    own = {name: shape for name, shape in given.items() if name in inputs}
    return InputSizes(own, _given_symbols(known, given), _stated_symbols(inputs, stated, past), made_up, past)


def symbols_of(value: ir.Value) -> frozenset[str]:
    """The symbols in an input's sizes: each dynamic size as a whole, and the symbols in it if it is an expression."""
    dynamic = [size for size in value.shape or () if isinstance(size, ir.SymbolicDim) and size.value]
    return frozenset(symbol for size in dynamic for symbol in (size.value or "", *size.free_symbols()))


def _symbols(inputs: Mapping[str, ir.Value]) -> dict[str, bool]:
    """Each symbol, and whether it is a first axis: of an input of two or more axes, or of all inputs that have it."""
    sizes = [
        (size, axis, len(value.shape or ()))
        for value in inputs.values()
        for axis, size in enumerate(value.shape or ())
        if isinstance(size, ir.SymbolicDim) and size.value
    ]
    plain = frozenset(size.value for size, _, _ in sizes if size.free_symbols() == {size.value})
    places: dict[str, set[tuple[int, int]]] = {}
    for size, axis, rank in sizes:
        for symbol in _parts(size, plain):
            places.setdefault(symbol, set()).add((axis, rank))
    return {
        symbol: any(axis == 0 and rank > 1 for axis, rank in uses) or all(axis == 0 for axis, _ in uses)
        for symbol, uses in places.items()
    }


def _parts(size: ir.SymbolicDim, plain: Collection[str | None]) -> Collection[str]:
    """The symbols of a size: those in an expression ("past + sequence"), or the text itself ("batch-size")."""
    parts = size.free_symbols()
    if not parts.isdisjoint(plain) or (evaluate_size(size, dict.fromkeys(parts, DEFAULT_LENGTH)) or 0) > 0:
        return parts
    return [size.value or ""]


def _bind(size: int | ir.SymbolicDim, sizes: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    if size.value in sizes:
        return sizes[size.value or ""]
    result = evaluate_size(size, sizes)
    least = min((sizes.get(part, 1) for part in size.free_symbols()), default=1)
    return least if result is None or result < min(least, 1) else result


def _check_given(inputs: Mapping[str, ir.Value], given: Mapping[str, Shape]) -> None:
    """Raise MisuseError for a shape of an unknown input, or one that contradicts the model."""
    for name, shape in given.items():
        if name not in inputs:
            raise MisuseError(f"--shapes names '{name}', and the model has no such input: it has {', '.join(inputs)}")
        if not all(map(check_size, shape)):  # from Python: the command line reads no such text
            raise MisuseError(f"--shapes gives '{name}' as {format_shape(shape)}: sizes go from 0 to {LARGEST:,}")
        declared = inputs[name].shape
        if declared is not None and not may_be_same(declared, shape):
            want = format_shape(sizes_of(declared))
            raise MisuseError(f"--shapes gives '{name}' as {format_shape(shape)}, and the model takes {want}")


def _given_symbols(inputs: Mapping[str, ir.Value], given: Mapping[str, Shape]) -> dict[str, int]:
    """The sizes of symbols in the given shapes. Of 1 and another size, the other counts: 1 may be broadcast.

    Raises MisuseError for a symbol with two sizes.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for name, shape in given.items():
        for symbol, size in zip(inputs[name].shape or (), shape, strict=False):
            if isinstance(symbol, int) or not symbol.value:
                continue
            known, other = sizes.get(symbol.value, (1, name))
            if 1 not in (known, size) and known != size:
                raise MisuseError(
                    f"the shapes contradict: the model's size '{symbol.value}' is {known} in '{other}' and {size} in "
                    f"'{name}'"
                )
            if known == 1:
                sizes[symbol.value] = (size, name)
    return {symbol: size for symbol, (size, _) in sizes.items()}


def _stated_symbols(
    inputs: Mapping[str, ir.Value], stated: Mapping[str, Sequence[int | None]], past: frozenset[str]
) -> dict[str, int]:
    """The sizes of stated symbols, except lengths of caches."""
    pairs = [
        (symbol.value, size)
        for name, sizes in stated.items()
        if name in inputs
        for symbol, size in zip(inputs[name].shape or (), sizes, strict=False)
        if isinstance(symbol, ir.SymbolicDim)
    ]
    return {symbol: size for symbol, size in pairs if symbol is not None and symbol not in past and size is not None}
