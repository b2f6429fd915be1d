"""Dimensions that an exporter calls by a number, as a string: it may be that number, or any size.

torch's exporter writes so what it found to be fixed, such as a number of heads. Others name axes 0 and 1. ONNX Runtime
takes both for any size.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from splitc.compiler.frontend.agreement import fits
from splitc.compiler.frontend.graph import Graph
from splitc.compiler.frontend.input_sizes import input_sizes
from splitc.compiler.frontend.probe_sizes import primes_of
from splitc.compiler.frontend.shapes import bind_shapes
from splitc.compiler.request.shapes import Shape


def name_numbered_sizes(graph: Graph, given: Mapping[str, Shape]) -> None:
    """Give dimensions of inputs that are called by numbers names, in place, if they may have other sizes.

    They may if the shapes that are `given` say so, or if the model's shapes follow from others as well as from these.
    """
    numbered = {str(size) for value in graph.graph.inputs for size in value.shape or () if _is_numbered(size)}
    if not numbered:
        return
    others = dict(zip(sorted(numbered), primes_of(graph), strict=False))
    if not _say_others(graph, given):
        shapes = input_sizes(graph.model, {}, frozenset()).shapes(graph.model)
        changed = {
            value.name or "": tuple(
                others[str(size)] if _is_numbered(size) else number
                for size, number in zip(value.shape or (), shapes[value.name or ""], strict=True)
            )
            for value in graph.graph.inputs
        }
        if not fits(graph, bind_shapes(graph.model, changed), bind_shapes(graph.model, shapes)):
            return
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        if value.shape is not None:
            value.shape = ir.Shape([_named(size) if _is_numbered(size) else size for size in value.shape])


def _is_numbered(size: int | ir.SymbolicDim) -> bool:
    return isinstance(size, ir.SymbolicDim) and size.value is not None and size.value.isdigit()


def _named(size: int | ir.SymbolicDim) -> str:
    return f"size_{size}"


def _say_others(graph: Graph, given: Mapping[str, Shape]) -> bool:
    """Whether a given size is another than the number."""
    pairs = (
        (size, number)
        for value in graph.graph.inputs
        for size, number in zip(value.shape or (), given.get(value.name or "", ()), strict=False)
    )
    return any(_is_numbered(size) and str(size) != str(number) for size, number in pairs)
