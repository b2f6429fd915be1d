"""Tries a model on generated inputs in ONNX Runtime: whole, or node by node."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cache, cached_property
from threading import Timer

import msgspec
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_build

from splitc.compiler.graphs.reads import holds_graphs
from splitc.compiler.inference.observation import refusal, signature
from splitc.compiler.inference.shapes import BoundShapes, shape_of
from splitc.compiler.nodes import inputs_of
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.normal_form.runnable import runnable_file
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.request.shapes import Shape
from splitc.compiler.sizes.made_up import choose_fill, describe_fixed, describe_tensor
from splitc.compiler.sizes.roles import find_roles
from splitc.runtime.arrays.onnx_types import CODES, KNOWN
from splitc.runtime.arrays.ort_values import run_on_arrays
from splitc.runtime.engines.onnx_session import load_unoptimized
from splitc.runtime.engines.onnxruntime_cpu import ERRORS
from splitc.runtime.feeds.fills import make_inputs
from splitc.runtime.package.manifest import Fill, Tensor
from splitc.runtime.tools.unsplit import fixed_feeds
from splitc.runtime.units import format_shape

# The most bytes of a model's weights and of a node's inputs that are tried, and the most seconds of a run. A choice: a
# plan should come in seconds. Larger models are planned untried.
LARGEST, LARGEST_NODE, LONGEST = 256 << 20, 32 << 20, 10.0
# The most elements of a generated input: up to 128 MiB. A choice: a model with a larger input is neither tried nor
# compared.
MOST_ELEMENTS = 1 << 24


class Trial:
    """Runs the unsplit model on generated inputs of any sizes."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    @cached_property
    def inputs(self) -> list[Tensor]:
        """The inputs, with their fills."""
        roles = find_roles(self._graph)
        values = self._graph.graph.inputs
        return [
            msgspec.structs.replace(describe_tensor(value), fill=choose_fill(value, roles.get(value)))
            for value in values
        ]

    def refusal(self, shapes: Mapping[str, Shape], fills: Mapping[str, Fill]) -> str | None:
        """Why ONNX Runtime does not run the model on inputs of these shapes; None if it does.

        None too if it takes longer than LONGEST, or if this machine's CPU lacks a kernel: neither depends on sizes.
        """
        inputs = [msgspec.structs.replace(tensor, sample_shape=[*shapes[tensor.name]]) for tensor in self.inputs]
        feeds = make_inputs(inputs, fills=fills)
        fixed = fixed_feeds(inputs, list(map(describe_fixed, self._graph.fixed)), feeds)
        options = ort.RunOptions()
        options.log_severity_level = 4
        timer = Timer(LONGEST, setattr, [options, "terminate", True])
        timer.start()
        try:
            run_on_arrays(self._session, None, {**feeds, **fixed}, options)
        except onnxruntime_build.NotImplemented:
            return None
        except ERRORS as error:
            return None if options.terminate else str(error)
        finally:
            timer.cancel()
        return None

    @cached_property
    def has_kernels(self) -> bool:
        """Whether this machine's CPU has a kernel for each node; True also for a model that ONNX Runtime refuses."""
        try:
            self._session  # noqa: B018
        except onnxruntime_build.NotImplemented:
            return False
        except ERRORS:
            return True
        return True

    @cached_property
    def _session(self) -> ort.InferenceSession:
        with runnable_file(self._graph.model, self._graph.path) as (path, is_own):
            return load_unoptimized(path, trusts_data=is_own and self._graph.trusts_data)


def can_be_made_up(graph: Graph, shapes: Mapping[str, Shape]) -> bool:
    """Whether all inputs can be generated as numpy arrays, of at most MOST_ELEMENTS each."""
    return all(map(_is_plain, graph.graph.inputs)) and all(
        np.prod(shape, dtype=float) <= MOST_ELEMENTS for shape in shapes.values()
    )


def _is_plain(value: ir.Value) -> bool:
    """Whether a value is a tensor of a number type that both numpy and ONNX Runtime have."""
    return isinstance(value.type, ir.TensorType) and _has_arrays(value.type.dtype)


@cache
def _has_arrays(dtype: ir.DataType) -> bool:
    if dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        return False
    name = str(dtype.numpy())
    return name in KNOWN and name not in CODES


def first_refused(
    model: ir.Model,
    bound: BoundShapes,
    accepted: set[Hashable],
    leave_large: bool = True,
    names: frozenset[str | None] | None = None,
) -> tuple[ir.Node, str] | None:
    """The first node that ONNX Runtime does not run alone on inputs of the bound shapes, and why. None if it runs all.

    `model` has the results of shape arithmetic. With `names`, only the nodes with these outputs are tried. Forms in
    `accepted` are not tried again; new ones are added. Shape arithmetic, control flow, and nodes whose sizes depend on
    contents are skipped. So are nodes with large inputs if `leave_large`; otherwise they count as refused.
    """
    for node in model.graph:
        if names is not None and names.isdisjoint(value.name for value in node.outputs):
            continue
        inputs = inputs_of(node)
        if not _can_be_tried(node, inputs, bound):
            continue
        shapes = [shape_of(value, bound.shapes) for value in inputs]
        if sum(map(_bytes, inputs, shapes)) > LARGEST_NODE:
            if leave_large or any(_bytes(value, shape_of(value)) > LARGEST_NODE for value in inputs):
                continue
            return node, "it is too large to be tried"
        if (why := crashes(node, bound.shapes)) is not None:
            return node, f"ONNX Runtime crashes if {why}"
        form = signature(node), tuple(shapes)
        if form in accepted:
            continue
        if (error := _refuses(node, bound.shapes)) is not None:
            return node, error
        accepted.add(form)
    return None


def crashes(node: ir.Node, shapes: Mapping[str, Shape]) -> str | None:
    """Why ONNX Runtime crashes the process when it runs a node on inputs of these shapes; None if it does not."""
    operator = operator_of(node)
    first = node.inputs[0] if operator.crashes_empty else None
    if first is not None and 0 in [shape_of(first, shapes)[axis] for axis in operator.crashes_empty]:
        return f"its first input is {format_shape(shape_of(first, shapes))}"
    if operator.crashes_emptied and (why := _emptied(node, shapes)) is not None:
        return why
    return None


def _can_be_tried(node: ir.Node, inputs: Sequence[ir.Value], bound: BoundShapes) -> bool:
    """Whether a node can be run alone: its inputs can be generated, have known sizes, and are no lists of sizes."""
    values = [*inputs, *(value for value in node.outputs if value.name)]
    if holds_graphs(node) or not all(map(_is_plain, values)) or all(v.const_value is not None for v in inputs):
        return False
    return not any(value.name in bound.uncertain or _may_be_sizes(value, bound.shapes) for value in inputs)


def first_stretched(
    model: ir.Model, bound: BoundShapes, declared: Mapping[str, ir.Shape]
) -> tuple[ir.Node, str] | None:
    """The first addition that broadcasts a dynamic axis of one row to the rows of a weight, and why that is wrong.

    ONNX Runtime runs it, but a table of positions should have as many rows as the value that it is added to.
    `declared` are the symbolic shapes.
    """
    for node in model.graph:
        if not operator_of(node).is_addition:
            continue
        for value, other in zip(node.inputs, reversed(node.inputs), strict=True):
            if value is None or other is None or not other.is_initializer():
                continue
            shape, unknown = shape_of(value, bound.shapes), bound.unknown.get(value.name or "", ())
            numbers = [None if axis in unknown else size for axis, size in enumerate(shape)]
            sizes = zip(reversed(declared.get(value.name or "", ())), reversed(numbers), strict=False)
            for (size, number), rows in zip(sizes, reversed(shape_of(other)), strict=False):
                if isinstance(size, ir.SymbolicDim) and number == 1 < rows:
                    return node, f"'{other.name}' has {rows} rows, and the value that it is added to has 1"
    return None


def first_emptied(model: ir.Model, bound: BoundShapes) -> tuple[ir.Node, str] | None:
    """The first node whose window is larger than its input, so that its output should be empty, and the reason.

    ONNX Runtime runs such a pool: it rounds the output size up to 1.
    """
    emptied = ((node, _emptied(node, bound.shapes)) for node in model.graph)
    return next(((node, why) for node, why in emptied if why is not None), None)


def _emptied(node: ir.Node, shapes: Mapping[str, Shape]) -> str | None:
    """Why a node's output is empty although its input is not; None if the output is not empty."""
    if "kernel_shape" not in node.attributes or node.inputs[0] is None:
        return None
    read, made = shape_of(node.inputs[0], shapes), shape_of(node.outputs[0], shapes)
    return f"its window is larger than its input, {format_shape(read[2:])}" if 0 in made and 0 not in read else None


def _refuses(node: ir.Node, shapes: Mapping[str, Shape]) -> str | None:
    """Why a node is refused with both ones (invalid as indices) and zeros (invalid as divisors); None if it is not."""
    bound = [None if value is None else shape_of(value, shapes) for value in node.inputs]
    made = [shape_of(value, shapes) if value.name else None for value in node.outputs]
    return refusal(node, bound, (np.ones, np.zeros), made)


def _may_be_sizes(value: ir.Value, shapes: Mapping[str, Shape]) -> bool:
    """Whether a computed value may be a list of sizes or offsets, so that generated contents may be invalid."""
    is_known = value.const_value is not None or value.is_graph_input()
    return not is_known and value.dtype == ir.DataType.INT64 and len(shape_of(value, shapes)) <= 1


def _bytes(value: ir.Value, shape: Shape) -> float:
    return float(np.prod(shape, dtype=float)) * (value.dtype.itemsize if value.dtype is not None else 0)
