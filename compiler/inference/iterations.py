"""Finds out how often a Loop runs, also where its condition compares a counter with an end.

tf2onnx writes each loop like this, often without a number of iterations: the recurrent layers of Keras that are no
LSTM or GRU, and what is decoded step by step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.alone import run_part
from splitc.compiler.graphs.matching import source_through
from splitc.compiler.graphs.walks import ancestors, producers
from splitc.compiler.inference.folding import LONGEST
from splitc.compiler.nodes import inputs_of, known_tensor
from splitc.compiler.operators.registry import operator_of
from splitc.runtime.arrays.array import Array
from splitc.runtime.engines.onnxruntime_cpu import ERRORS

# The inputs of a Loop, and of its body, before its states; the outputs of its body before them.
LEADING, GOES_ON = 2, 1


def iterations(loop: ir.Node, most: int) -> int:
    """How often a Loop runs; 0 if that depends on a request, or if it is more than `most`."""
    given, outer = loop.inputs[0], loop.graph
    assert isinstance(outer, ir.Graph)
    count = most + 1 if given is None or not given.name else _number(given, outer)
    if count and not goes_on(loop):
        count = _counted(loop, outer, min(count, most + 1))
    return count if count <= most else 0


def goes_on(loop: ir.Node) -> bool:
    """Whether no condition ends a Loop."""
    body = loop.attributes["body"].as_graph()
    after = source_through(body.outputs[0], "Identity")
    return _is_true(loop.inputs[1]) and (after is body.inputs[1] or _is_true(after))


def numbers_given(body: ir.Graph, number: int) -> list[Array]:
    """What a Loop tells its body: the iteration's number, and that it goes on. Both may have an axis."""
    axes = [0 if value.shape is None else len(value.shape) for value in body.inputs[:LEADING]]
    return [np.full((1,) * axes[0], number, np.int64), np.full((1,) * axes[1], True)]


def _is_true(condition: ir.Value | None) -> bool:
    """Whether a condition is left out, or is a constant that is true."""
    if condition is None or not condition.name:
        return True
    tensor = known_tensor(condition)
    return tensor is not None and bool(np.all(tensor.numpy()))


def _number(value: ir.Value, graph: ir.Graph) -> int:
    """A number of the main graph; 0 if it is computed from more than constants."""
    try:
        known = _known([value], (), graph)
    except ERRORS:
        known = None
    return 0 if known is None else int(known[value].item())


def _counted(loop: ir.Node, outer: ir.Graph, most: int) -> int:
    """How many of `most` iterations run until the condition ends the Loop; 0 if that depends on more than counters."""
    body = loop.attributes["body"].as_graph()
    places = _deciding(body)
    begins, ends = [loop.inputs[place] for place in places], [body.outputs[place - 1] for place in places]
    wanted = [*ends, *(value for value in begins if value is not None)]
    try:
        known = _known(wanted, body.inputs, outer)
        if known is None:
            return 0
        body.opset_imports.update(outer.opset_imports)  # a subgraph names none
        states = [np.array(True) if value is None else known[value] for value in begins]
        for number in range(most):
            if not np.all(states[0]):
                return number
            given = dict(zip((body.inputs[place] for place in places), states, strict=True))
            states = run_part(body, {**known, body.inputs[0]: numbers_given(body, number)[0], **given}, ends)
    except ERRORS:
        return 0
    return most


def _known(wanted: Sequence[ir.Value], given: Collection[ir.Value], outer: ir.Graph) -> dict[ir.Value, Array] | None:
    """All values of the graph `outer` that are read to compute the wanted ones, and these, if they are in it.

    None if they are computed from more than short constants, and the `given` values. Raises ONNX Runtime's errors.
    """
    nodes = _above(wanted, given)
    read = {*wanted, *_reads(nodes)} - {*given}
    tensors = {value: tensor for value in read if (tensor := known_tensor(value)) is not None}
    known = {value: tensor.numpy() for value, tensor in tensors.items() if tensor.size <= LONGEST}
    computed = {value for node in nodes for value in node.outputs}
    if not read <= known.keys() | computed or not all(operator_of(node).shape_arithmetic for node in nodes):
        return None
    outside = [value for value in read - known.keys() if value.graph is outer]
    return known | dict(zip(outside, run_part(outer, known, outside), strict=True))


def _deciding(body: ir.Graph) -> list[int]:
    """The places, among a body's inputs, of its condition and of all states that this depends on."""
    places = [1]
    for place in places:
        made = body.outputs[place - 1]
        read = {made, *_reads(_above([made], body.inputs))}
        places += [other for other, value in enumerate(body.inputs) if value in read and other not in (0, *places)]
    return places


def _reads(nodes: Collection[ir.Node]) -> list[ir.Value]:
    return [value for node in nodes for value in inputs_of(node)]


def _above(values: Sequence[ir.Value], given: Collection[ir.Value]) -> set[ir.Node]:
    """The nodes that compute these values from the given ones and from constants."""

    def computed(some: Sequence[ir.Value | None]) -> list[ir.Value]:
        return [value for value in some if value is not None and value not in given and known_tensor(value) is None]

    return ancestors(producers(computed(values)), lambda node: computed(node.inputs))
