"""Moves sizes to the GPU without copies, so that ONNX Runtime can capture the graph.

ONNX Runtime computes values that follow from shapes on the CPU (cpu_values). If a node on the GPU reads such a value,
as a length that positions are compared with, it is copied in each run, and ONNX Runtime refuses to capture a graph with
copies. Range reads its inputs on the CPU and passes them as arguments of its kernel, so Range(n, n + 1, 1) writes n on
the GPU. Floats are recomputed on the GPU from integers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.origins import described, own_shape
from splitc.compiler.frontend.unused import remove_unused
from splitc.compiler.lowering.attention_nodes import Nodes, put_in_place
from splitc.compiler.lowering.cpu_values import SMALL, Read, place_values, runs_on_gpu, why_not_captured
from splitc.compiler.lowering.decomposed_attention import decompose_attention
from splitc.compiler.lowering.even_pads import pad_evenly
from splitc.compiler.lowering.few_rows import copy_matrices_of_few_rows
from splitc.compiler.lowering.fused_experts import fuse_experts
from splitc.compiler.lowering.older_opset import use_older_opset
from splitc.compiler.lowering.widened import widen
from splitc.compiler.nodes import known_weight
from splitc.compiler.operators.gpu_kernels import host_inputs
from splitc.compiler.operators.indexing import marked_places
from splitc.compiler.request.shapes import Shape
from splitc.runtime.arrays.array import Array

WHOLE = (ir.DataType.INT32, ir.DataType.INT64)
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
# The reduction that finds the value whose index an operator returns.
EXTREMES = {"ArgMax": "ReduceMax", "ArgMin": "ReduceMin"}
# The most elements of a list of sizes, which has one or a few for each axis of a value. Larger values are copied.
MOST = 16
CONVOLUTIONS = ("Conv", "ConvTranspose", "NhwcConv", "NhwcFusedConv")


def keep_on_gpu(graph: ir.Graph, opset: int, shapes: Mapping[str, Shape]) -> None:
    """Remove copies between the CPU and the GPU, in place, where results stay the same to the bit.

    `shapes` are those of the model's values. Range exists from opset 11 on.
    """
    editor = Editor(graph)
    for node in list(graph.all_nodes()):
        widen(node, editor)
        if node.graph is graph:
            _give_kernel(node, editor)
    use_older_opset(graph)
    if opset < 11:
        return
    placement = place_values(graph)
    work = _Raising(editor, placement.sizes, shapes)
    on_gpu = {(read.node, read.number) for read in placement.to_gpu}
    beside = [
        Read(node, number, value)
        for node in dict.fromkeys(read.node for read in placement.fed)
        if not _serves_host(node, on_gpu)
        for number, value in enumerate(node.inputs)
        if value is not None
    ]
    for read in (*placement.to_gpu, *beside):
        if read.value in placement.sizes and (raised := work.raised(read.value)) is not None:
            read.node.replace_input_with(read.number, raised)
    if placement.to_gpu or beside:
        remove_unused(graph)


def _serves_host(node: ir.Node, on_gpu: Collection[tuple[ir.Node, int]]) -> bool:
    """Whether a kernel reads on the CPU what a node computes there, or what others compute of it there.

    `on_gpu` are the reads on the GPU of what is on the CPU, as nodes with the numbers of their inputs.
    """
    uses = {(user, number) for value in node.outputs for user, number in value.uses()} - set(on_gpu)
    return any(number in host_inputs(user) or _serves_host(user, on_gpu) for user, number in uses)


def decompose_for_gpus(graph: ir.Graph, opset: int, shapes: Mapping[str, Shape]) -> None:
    """Decompose attention that has no CUDA kernel, in place, and move its sizes as `keep_on_gpu` does.

    Recognized experts become one operator. Other products of few grouped rows get a branch of their own.
    """
    fuse_experts(graph)
    copy_matrices_of_few_rows(graph)
    if decompose_attention(graph):
        keep_on_gpu(graph, opset, shapes)


def why_not_replayed(graph: ir.Graph, opset: int, shapes: Mapping[str, Shape]) -> str:
    """Why engines of this graph can't be captured on GPUs, after all rewrites; "" if they can."""
    engine = graph.clone()
    keep_on_gpu(engine, opset, shapes)
    decompose_for_gpus(engine, opset, shapes)
    return why_not_captured(engine)


def convolves(node: ir.Node) -> bool:
    """Whether ONNX Runtime's CUDA provider runs a node with cuDNN, which plans for one shape at a time."""
    return node.op_type in CONVOLUTIONS


def _give_kernel(node: ir.Node, editor: Editor) -> None:
    """Replace a node without a CUDA kernel by nodes with one, where the results are the same to the bit."""
    if node.op_type == "OneHot" and not node.domain:
        _replace_one_hot(node, editor)
    if node.op_type == "ConvTranspose" and not node.domain:
        pad_evenly(node, editor)
    value = node.inputs[0] if node.inputs else None
    if value is None or runs_on_gpu(node):
        return
    dtype = described(value).dtype
    if node.op_type in EXTREMES and dtype in WHOLE:
        _find_extreme(node, value, editor)
    elif node.op_type == "DequantizeLinear" and dtype == ir.DataType.INT32:
        _multiply_by_scale(node, value, editor)
    elif node.op_type == "Pad" and dtype == ir.DataType.INT64 and not _is_list(value):
        _pad_halves(node, value, editor)
    elif node.op_type == "Celu" and dtype in FLOATS and node.attributes.get_float("alpha", 1.0) == 1:
        editor.replace(node, ir.node("Elu", [value]))  # the same function then


def _is_list(value: ir.Value) -> bool:
    """Whether a value is known to have one axis, as sizes have."""
    shape = described(value).shape
    return shape is not None and len(shape) < 2


def _find_extreme(node: ir.Node, value: ir.Value, editor: Editor) -> None:
    """Replace ArgMax or ArgMin of integers: the index of the first element that equals the extreme."""
    axis, name = node.attributes.get_int("axis", 0), node.outputs[0].name
    axes, attributes = editor.lists("ReduceMax", axes=[axis])
    extreme = editor.before(node, EXTREMES[node.op_type], value, *axes, keepdims=1, **attributes)
    equal = editor.before(node, "Equal", value, extreme)
    marked = editor.before(node, "Cast", equal, to=ir.DataType.FLOAT)
    shape = own_shape(value)
    for made, suffix, dtype in (
        (extreme, "extreme", described(value).dtype),
        (equal, "equal", ir.DataType.BOOL),
        (marked, "marked", ir.DataType.FLOAT),
    ):
        _describe(made, f"{name}/{suffix}", dtype, None if made is extreme else shape)
    editor.replace(node, ir.node("ArgMax", [marked], node.attributes))


def _multiply_by_scale(node: ir.Node, value: ir.Value, editor: Editor) -> None:
    """Replace DequantizeLinear of int32 (a bias) by a product: its zero point is 0 by definition."""
    scale = node.inputs[1]
    dtype = None if scale is None else described(scale).dtype
    if _is_list(value) and dtype is not None:
        number = editor.before(node, "Cast", value, to=dtype)
        _describe(number, f"{node.outputs[0].name}/number", dtype, own_shape(value))
        editor.replace(node, ir.node("Mul", [number, scale]))


def _pad_halves(node: ir.Node, value: ir.Value, editor: Editor) -> None:
    """Replace Pad of int64, such as a mask, by two of numbers of 32 bits in float64, which has them exactly."""
    b, factor = Nodes(f"{node.outputs[0].name}/halves", editor), editor.constant(np.array(1 << 32, np.int64))

    def halves(whole: ir.Value) -> tuple[ir.Value, ir.Value]:
        low = b.one("Mod", whole, factor)
        return low, b.one("Div", b.one("Sub", whole, low), factor)

    def padded(half: ir.Value, fill: ir.Value | None) -> ir.Value:
        wide, own = (None if one is None else b.one("Cast", one, to=ir.DataType.DOUBLE) for one in (half, fill))
        inputs = [wide, node.inputs[1], own, *node.inputs[3:]]
        return b.one("Cast", b.add("Pad", inputs, attributes=node.attributes.values())[0], to=ir.DataType.INT64)

    fill = node.inputs[2] if len(node.inputs) > 2 else None
    fills = (None, None) if fill is None else halves(fill)
    low, high = map(padded, halves(value), fills)
    put_in_place(node, b.made, [b.one("Add", b.one("Mul", high, factor), low)], editor.graph)


def _replace_one_hot(node: ir.Node, editor: Editor) -> None:
    """Replace OneHot of constant places by Gather, which stays on the CPU if its data do.

    torch's repeat_interleave is exported so: it picks the number of repeats, and 1 for the other axes.
    """
    places, depth, values = node.inputs
    if places is None or depth is None or (wanted := _constant(places)) is None or (most := _constant(depth)) is None:
        return
    count = int(most.item())
    if wanted.size * count <= SMALL:
        picked = marked_places(node, wanted, count)
        editor.replace(node, ir.node("Gather", [values, editor.constant(picked.astype(np.int64))]))


def _constant(value: ir.Value) -> Array | None:
    """The numbers of a constant; None for other values, and for those that a request can override."""
    tensor = known_weight(value)
    return None if tensor is None else tensor.numpy()


@dataclass(frozen=True)
class _Raising:
    """Recomputes values on the GPU that ONNX Runtime computes from shapes on the CPU."""

    editor: Editor
    sizes: frozenset[ir.Value]
    shapes: Mapping[str, Shape]
    # The last node that was inserted after each producer.
    _last: dict[ir.Node, ir.Node] = field(default_factory=dict)
    _done: dict[ir.Value, ir.Value | None] = field(default_factory=dict)

    def raised(self, value: ir.Value) -> ir.Value | None:
        """The value on the GPU, computed there without a copy; None if that is not possible."""
        if value not in self._done:
            ranges = self._by_range(value) if described(value).dtype in WHOLE else None
            self._done[value] = ranges if ranges is not None else self._computed(value)
        return self._done[value]

    def _computed(self, value: ir.Value) -> ir.Value | None:
        """The value, by the same operator on raised inputs; None if one can't be raised, or has no kernel for GPUs."""
        node = value.producer()
        assert node is not None
        if len(node.outputs) != 1 or not runs_on_gpu(node):
            return None
        inputs = []
        for number, source in enumerate(node.inputs):
            raised = source
            if source is not None and source in self.sizes and number not in host_inputs(node):
                raised = self.raised(source)
                if raised is None:
                    return None
            inputs.append(raised)
        return self._after(value, "on_gpu", own_shape(value), node.op_type, inputs, node.domain, **node.attributes)

    def _by_range(self, value: ir.Value) -> ir.Value | None:
        """The value, with one Range of one step for each of its numbers; None if there are too many."""
        shape = self._shape(value)
        if shape is None or not 0 < (count := math.prod(shape)) <= MOST:
            return None
        constant = self.editor.constant
        if count > 1:
            whole = self._after(value, "flat", ir.Shape([count]), "Reshape", [value, constant(np.array([-1]))])
            places = [constant(np.array(place)) for place in range(count)]
            numbers = [
                self._after(value, f"number{n}", ir.Shape([]), "Gather", [whole, place])
                for n, place in enumerate(places)
            ]
        else:
            numbers = [self._after(value, "number0", ir.Shape([]), "Squeeze", [value])]
        ranges = [self._range(value, number, place) for place, number in enumerate(numbers)]
        raised = ranges[0]
        if count > 1:
            raised = self._after(value, "numbers", ir.Shape([count]), "Concat", ranges, axis=0)
        if not shape:
            return self._after(value, "on_gpu", ir.Shape([]), "Squeeze", [raised])
        return self._after(value, "on_gpu", ir.Shape(shape), "Reshape", [raised, constant(np.array(shape, np.int64))])

    def _range(self, value: ir.Value, number: ir.Value, place: int) -> ir.Value:
        one = self.editor.scalar(1, described(value))
        end = self._after(value, f"end{place}", ir.Shape([]), "Add", [number, one])
        return self._after(value, f"range{place}", ir.Shape([1]), "Range", [number, end, one])

    def _shape(self, value: ir.Value) -> Shape | None:
        """The shape of a value that is computed from sizes. It is the same in every request."""
        whole, own = described(value), own_shape(value)
        if own is not None and own.is_static():
            return own.numpy()
        return self.shapes.get(whole.name or "") if own == whole.shape else None

    def _after(
        self,
        value: ir.Value,
        role: str,
        shape: ir.Shape | None,
        operator: str,
        inputs: Sequence[ir.Value | None],
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """The result of a new node, of the value's type, inserted after the value's producer."""
        node, producer = ir.node(operator, inputs, attributes, domain=domain), value.producer()
        assert producer is not None
        self.editor.graph.insert_after(self._last.get(producer, producer), node)
        self._last[producer] = node
        _describe(node.outputs[0], f"{value.name}/{role}", described(value).dtype, shape)
        return node.outputs[0]


def _describe(value: ir.Value, name: str, dtype: ir.DataType | None, shape: ir.Shape | None) -> None:
    value.name, value.shape = name, shape
    value.type = None if dtype is None else ir.TensorType(dtype)
