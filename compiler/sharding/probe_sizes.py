"""Distinct probe sizes, to find axes with: sizes that happen to be equal would line up unrelated axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import sympy

from splitc.compiler.frontend.asked_shapes import Shape
from splitc.compiler.frontend.graph import Graph
from splitc.compiler.frontend.shapes import BoundShapes, bind_shapes, evaluate_size, shape_of

Array = npt.NDArray[Any]


def bind_probe_sizes(graph: Graph, given: Mapping[str, Shape], bound: BoundShapes) -> BoundShapes:
    """Shapes with a prime number for each symbol of the inputs, that divides no size of a weight.

    Exporters write relations between symbols into their heads only: where one symbol's given size is the sum of two
    others' (total, past and new length) it stays that. Where such sizes leave more shapes unknown than the given ones
    (an image must be so many patches), the given ones are kept. `constants` are only those that do not depend on sizes.
    """
    symbols: dict[str, int] = {}
    for value in graph.graph.inputs:
        for size, number in zip(value.shape or (), given[value.name or ""], strict=False):
            # Some exporters write a number as a symbol: "4" may be any length, or the number of heads.
            if isinstance(size, ir.SymbolicDim) and size.value and not size.value.isdigit():
                symbols[size.value] = number
    if not symbols:
        return bound
    for sums in (True, False):
        probed = bind_shapes(graph.model, _input_shapes(graph, given, _number(graph, symbols, sums)))
        if len(probed.uncertain) <= len(bound.uncertain):
            return replace(probed, constants=_same(probed.constants, bound.constants))
    return bound


def _same(first: Mapping[str, Array], second: Mapping[str, Array]) -> dict[str, Array]:
    """What is the same with both, and so does not depend on the inputs' sizes."""
    return {name: array for name, array in first.items() if name in second and np.array_equal(array, second[name])}


def _number(graph: Graph, symbols: Mapping[str, int], sums: bool) -> dict[str, int]:
    primes = _primes({size for weight in graph.graph.initializers.values() for size in shape_of(weight)})
    numbers: dict[str, int] = {}
    for symbol, size in sorted(symbols.items(), key=lambda item: item[1]):
        parts = [
            (a, b)
            for a, b in itertools.combinations(numbers, 2)
            if sums and symbols[a] + symbols[b] == size and min(symbols[a], symbols[b]) > 0
        ]
        numbers[symbol] = numbers[parts[0][0]] + numbers[parts[0][1]] if parts else next(primes)
    return numbers


def _primes(avoid: set[int]) -> Iterator[int]:
    number = 2
    while True:
        number = int(sympy.nextprime(number))
        if not any(size % number == 0 for size in avoid if size):
            yield number


def _input_shapes(graph: Graph, given: Mapping[str, Shape], numbers: Mapping[str, int]) -> dict[str, Shape]:
    """Each dimension that is a symbol or an expression of symbols with their new numbers, the others as given."""
    shapes = {}
    for value in graph.graph.inputs:
        sizes = []
        for size, old in zip(value.shape or (), given[value.name or ""], strict=False):
            new = numbers.get(size.value or "") if isinstance(size, ir.SymbolicDim) else None
            if isinstance(size, ir.SymbolicDim) and size.value and any(str(s) in numbers for s in size.free_symbols()):
                result = evaluate_size(size, {str(s): numbers.get(str(s), old) for s in size.free_symbols()})
                new = result if result is not None and result > 0 else new
            sizes.append(old if new is None else new)
        shapes[value.name or ""] = tuple(sizes)
    return shapes
