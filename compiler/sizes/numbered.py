"""Dimensions whose symbol is a number ("16"): decides whether they are fixed to that number, or dynamic.

torch's exporter writes fixed dimensions so, such as a number of heads. Others name the axes "0" and "1". ONNX Runtime
treats both as dynamic.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from splitc.compiler.inference.observation import primes_of
from splitc.compiler.inference.shapes import bind_shapes, is_numbered
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.request.shapes import Shape
from splitc.compiler.sizes.agreement import fits
from splitc.compiler.sizes.inputs import input_sizes

# Multiples of primes that are tried: models reduce the sides of images to a 64th.
FACTORS = (1, 64)


def name_numbered_sizes(graph: Graph, given: Mapping[str, Shape]) -> None:
    """Rename symbols that are numbers, in place, if these dimensions are dynamic.

    They are if the `given` shapes have other sizes there, or if the model's shapes can be inferred for other sizes.
    """
    numbered = {str(size) for value in graph.graph.inputs for size in value.shape or () if is_numbered(size)}
    if not numbered or not (_say_others(graph, given) or _fit_others(graph, numbered)):
        return
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        if value.shape is not None:
            value.shape = ir.Shape([f"size_{size}" if is_numbered(size) else size for size in value.shape])


def _fit_others(graph: Graph, numbered: Collection[str]) -> bool:
    """Whether the model's shapes can be inferred with primes, or with multiples of these, in place of the numbers."""
    others = dict(zip(sorted(numbered), primes_of(graph.graph), strict=False))
    shapes = input_sizes(graph.model, {}, frozenset()).shapes(graph.model)
    bound = bind_shapes(graph.model, shapes)

    def changed(factor: int) -> dict[str, Shape]:
        return {
            value.name or "": tuple(
                factor * others[str(size)] if is_numbered(size) else number
                for size, number in zip(value.shape or (), shapes[value.name or ""], strict=True)
            )
            for value in graph.graph.inputs
        }

    return any(fits(graph, bind_shapes(graph.model, changed(factor)), bound) for factor in FACTORS)


def _say_others(graph: Graph, given: Mapping[str, Shape]) -> bool:
    """Whether a given size differs from the number that names its dimension."""
    pairs = (
        (size, number)
        for value in graph.graph.inputs
        for size, number in zip(value.shape or (), given.get(value.name or "", ()), strict=False)
    )
    return any(is_numbered(size) and str(size) != str(number) for size, number in pairs)
