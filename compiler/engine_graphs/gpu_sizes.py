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

from splitc.compiler.engine_graphs.cpu_values import Read, place_values, runs_on_gpu, why_not_captured
from splitc.compiler.engine_graphs.decomposed_attention import decompose_attention
from splitc.compiler.engine_graphs.few_rows import copy_matrices_of_few_rows
from splitc.compiler.engine_graphs.fused_experts import fuse_experts
from splitc.compiler.engine_graphs.missing_kernels import WHOLE, give_kernel, use_older_opset, widen
from splitc.compiler.graphs.editor import Editor, describe
from splitc.compiler.graphs.origins import described, own_shape
from splitc.compiler.graphs.unused import remove_unused
from splitc.compiler.graphs.walks import reached
from splitc.compiler.operators.gpu_kernels import host_inputs
from splitc.compiler.request.shapes import Shape

# The most elements of a list of sizes, which has one or a few for each axis of a value. Larger values are copied.
MOST = 16
# The first opset with the operator Range.
RANGE = 11


def keep_on_gpu(graph: ir.Graph, shapes: Mapping[str, Shape]) -> None:
    """Remove copies between the CPU and the GPU, in place, where results stay the same to the bit.

    `shapes` are those of the model's values.
    """
    editor = Editor(graph)
    for node in list(graph.all_nodes()):
        widen(node, editor)
        if node.graph is graph:
            give_kernel(node, editor)
    use_older_opset(graph)
    if graph.opset_imports.get("", 1) < RANGE:
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

    def uses(one: ir.Node) -> list[tuple[ir.Node, int]]:
        return [use for value in one.outputs for use in value.uses() if use not in on_gpu]

    nodes = reached([node], lambda one: [user for user, _ in uses(one)])
    return any(number in host_inputs(user) for one in nodes for user, number in uses(one))


def decompose_for_gpus(graph: ir.Graph, shapes: Mapping[str, Shape]) -> None:
    """Decompose attention that has no CUDA kernel, in place, and move its sizes as `keep_on_gpu` does.

    Recognized experts become one operator. Other products of few grouped rows get a branch of their own.
    """
    fuse_experts(graph)
    copy_matrices_of_few_rows(graph)
    if decompose_attention(graph):
        keep_on_gpu(graph, shapes)


def why_not_replayed(graph: ir.Graph, shapes: Mapping[str, Shape]) -> str:
    """Why engines of this graph can't be captured on GPUs, after all rewrites; "" if they can."""
    engine = graph.clone()
    keep_on_gpu(engine, shapes)
    decompose_for_gpus(engine, shapes)
    return why_not_captured(engine)


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
        describe(node.outputs[0], f"{value.name}/{role}", described(value).dtype, shape)
        return node.outputs[0]
