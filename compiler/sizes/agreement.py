"""Checks whether other input sizes fit a model: shapes can still be inferred, agree as operators require, are not 1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import onnx_ir as ir

from splitc.compiler.graphs.matching import is_onnx
from splitc.compiler.inference.observation import primes_of
from splitc.compiler.inference.shapes import BoundShapes, evaluate_size, shape_of
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.request.shapes import Shape

# The smallest primes, in this order, for symbols with which computed axes have less than two elements. Models reduce
# the sides of images to a 32nd, and the length of sounds to a 300th or a 384th, less what the first windows take.
LARGER = (67, 1031, 4099)


def fits(graph: Graph, made: BoundShapes, bound: BoundShapes) -> bool:
    """Whether shapes `made` for other sizes are as completely known as `bound`, and agree as operators require."""
    if len(made.uncertain) > len(bound.uncertain):
        return False
    certain = {name: shape for name, shape in made.shapes.items() if name not in made.uncertain}
    return all(_agree(node, certain) for node in graph.nodes)


def _agree(node: ir.Node, shapes: Mapping[str, Shape]) -> bool:
    """Whether a node's shapes are as its operator requires.

    Factors of a product agree along the summed axis, inputs of a Concat along all axes but its own. A Reshape keeps the
    number of elements. Attention has as many keys as values.
    """
    read = [None if value is None else shape_of(value, shapes) or shapes.get(value.name or "") for value in node.inputs]
    if operator_of(node).is_attention:
        lengths = {shape[-2] for shape in read[1:3] if shape and len(shape) > 2}  # keys and values are optional
        return len(lengths) <= 1
    if not is_onnx(node, "MatMul", "Concat", "Reshape"):
        return True
    if node.op_type == "Reshape":
        made = shapes.get(node.outputs[0].name or "")
        return made is None or read[0] is None or math.prod(made) == math.prod(read[0])
    known = [shape for shape in read if shape]
    if node.op_type == "MatMul":
        return len(known) < 2 or len(known[1]) < 2 or known[0][-1] == known[1][-2]
    axis = node.attributes.get_int("axis", 0)
    others = {tuple(size for n, size in enumerate(shape) if n != axis % len(shape)) for shape in known}
    return len(others) <= 1


def unnamed_ones(graph: Graph, bound: BoundShapes) -> list[tuple[str, int]]:
    """The axes of computed values that have one element, although inference did not find them to be 1."""
    ones = []
    for value in (value for node in graph.nodes for value in node.outputs):
        own = value.shape if value.shape is not None else ()
        for axis, size in enumerate(bound.shapes.get(value.name or "", ())):
            if size == 1 and value.name not in bound.uncertain and not (axis < len(own) and own[axis] == 1):
                ones.append((value.name or "", axis))
    return ones


def count_alike(graph: Graph, made: BoundShapes, bound: BoundShapes) -> int:
    """The number of sizes of computed values that are equal with both shapes, although they are not fixed.

    A size is fixed if it is a number, or a symbol that is one.
    """
    count = 0
    for value in (value for node in graph.nodes for value in node.outputs):
        one, other = made.shapes.get(value.name or "", ()), bound.shapes.get(value.name or "", ())
        own = value.shape if value.shape is not None else [None] * len(one)
        sizes = zip(own, one, other, strict=False)
        count += sum(a == b and not str(size).isdigit() for size, a, b in sizes)
    return count


def enlarged(graph: Graph, numbers: dict[str, int]) -> Iterator[dict[str, int]]:
    """These sizes, and before them larger ones for symbols with which computed axes have less than two elements.

    Axes of one element relate to nothing, and operators that downsample images refuse empty ones.
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
        unused = primes_of(graph.graph, smallest)
        larger = {name: next(unused) if name in small else size for name, size in larger.items()}
    yield from (larger, numbers) if larger != numbers else (numbers,)
