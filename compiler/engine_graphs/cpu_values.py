"""Predicts which values ONNX Runtime's CUDA provider keeps on the CPU, and which are copied to the GPU or back.

ONNX Runtime refuses to capture a graph with such copies. The rules are those of fallback_cpu_capability.cc of ONNX
Runtime 1.31: what is computed from sizes alone stays on the CPU, and so does a node without a CUDA kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.engine_graphs.few_rows import FEW_ROWS
from splitc.compiler.graphs.origins import described
from splitc.compiler.graphs.reads import subgraphs
from splitc.compiler.operators.gpu_kernels import COUNTING, HALVES, has_gpu_kernel, host_inputs, typed_input
from splitc.compiler.operators.registry import operator_of

# The most elements of a constant that a node on the CPU may read: kSmallInitializerThreshold.
SMALL = 100


@dataclass(frozen=True)
class Read:
    """Input `number` of a node, and its value."""

    node: ir.Node
    number: int
    value: ir.Value


@dataclass(frozen=True)
class Placement:
    """The reads that need a copy between the host's memory and the GPU's.

    - `sizes`: values on the CPU that follow from sizes alone. Their number of elements is the same in every request.
    - `to_gpu`, `to_cpu`: reads of a value that lies in the other memory.
    - `fed`: reads of graph inputs by nodes that stay on the CPU only because they read a size too.
    - `missing`: nodes without a kernel for GPUs. Those that are folded, or compute sizes alone, need none.
    - `counting`: nodes on the GPU that count their results.
    """

    sizes: frozenset[ir.Value]
    to_gpu: tuple[Read, ...]
    to_cpu: tuple[Read, ...]
    fed: tuple[Read, ...]
    missing: tuple[ir.Node, ...]
    counting: tuple[ir.Node, ...]


def place_values(graph: ir.Graph, around: Collection[ir.Value] = ()) -> Placement:
    """Where ONNX Runtime keeps the results of a graph's nodes, which are sorted.

    Inputs and constants lie where they are read. So do values that are computed from constants: they are folded.
    `around` are the sizes on the CPU of a graph that this one is a branch of.
    """
    sizes, on_cpu, folded = set(around), set(around), set[ir.Value]()
    on_gpu = set[ir.Node]()
    left = dict[ir.Node, bool]()  # the nodes on the CPU, and whether they have a kernel for GPUs
    for node in graph:
        if _is_folded(node, sizes, folded):
            folded.update(node.outputs)
        elif operator_of(node).reads_shape:
            on_cpu.update(node.outputs)
            sizes.update(node.outputs)
        elif (has_kernel := runs_on_gpu(node)) and not _is_left(node, on_cpu, folded):
            on_gpu.add(node)
        else:
            left[node] = has_kernel
            on_cpu.update(node.outputs)
            if all(value in sizes or value in folded or _is_small(value) for value in filter(None, node.inputs)):
                sizes.update(node.outputs)
    running = [node for node in graph if node in left or node in on_gpu]
    reads = [
        Read(node, number, value) for node in running for number, value in enumerate(node.inputs) if value is not None
    ]
    computed = [read for read in reads if read.value.producer() is not None and read.value not in folded]

    def on_host(read: Read) -> bool:
        return read.node in left or read.number in host_inputs(read.node)

    fed = [read for read in reads if read.value.is_graph_input() and read.node in left]
    sized = {node for node in left if node.outputs[0] in sizes} - {read.node for read in fed}
    return Placement(
        sizes=frozenset(sizes),
        to_gpu=tuple(read for read in computed if read.value in on_cpu and not on_host(read)),
        to_cpu=tuple(read for read in computed if read.value not in on_cpu and on_host(read)),
        fed=tuple(read for read in fed if left[read.node]),
        missing=tuple(node for node, has_kernel in left.items() if not has_kernel and node not in sized),
        counting=tuple(node for node in graph if node in on_gpu and node.op_type in COUNTING and not node.domain),
    )


def why_not_captured(graph: ir.Graph, around: Collection[ir.Value] = ()) -> str:
    """The reason why ONNX Runtime will not capture the graph on a GPU, naming a node; "" if it will.

    `around` is as for `place_values`. A request whose sizes are known takes one branch where sizes alone decide. If it
    has many rows of a mixture of experts (few_rows.py), it is not captured.
    """
    placement = place_values(graph, around)
    for node in graph:
        if _decides_by_data(node, placement):
            return f"{_title(node)} is control flow"
        for branch in _captured(node):
            if why := why_not_captured(branch, placement.sizes):
                return why
    for node in placement.missing:
        return f"{_title(node)} has no kernel for GPUs"
    for node in placement.counting:
        return f"{_title(node)} has as many elements as its data decide"
    for value in graph.outputs if around else ():
        if value in placement.sizes:
            return f"the branch's result '{value.name}' is computed on the CPU"
    for read in placement.to_cpu:
        return f"{_title(read.node)} takes '{read.value.name}' on the CPU, which is computed on the GPU"
    for read in placement.to_gpu:
        return f"{_title(read.node)} takes '{read.value.name}' on the GPU, which is computed on the CPU"
    for read in placement.fed:
        return f"{_title(read.node)} takes the input '{read.value.name}' on the CPU"
    return ""


def _captured(node: ir.Node) -> Iterable[ir.Graph]:
    """The graphs inside a node that a captured request may run."""
    few = node.meta.get(FEW_ROWS)
    return subgraphs(node) if few is None else [node.attributes[few].as_graph()]


def decides_by_data(graph: ir.Graph) -> bool:
    """Whether data may decide what the graph runs: it has control flow other than an If by sizes."""
    placement = place_values(graph)
    return any(_decides_by_data(node, placement) for node in graph)


def _decides_by_data(node: ir.Node, placement: Placement) -> bool:
    is_by_sizes = node.op_type == "If" and node.inputs[0] in placement.sizes
    return not is_by_sizes and any(True for _ in subgraphs(node))


def _title(node: ir.Node) -> str:
    return f"{node.op_type} '{node.outputs[0].name}'"


def runs_on_gpu(node: ir.Node) -> bool:
    """Whether the node has a kernel for GPUs."""
    typed = next(iter(node.inputs[typed_input(node) :]), None)
    return has_gpu_kernel(node, None if typed is None else described(typed).dtype)


def _is_folded(node: ir.Node, sizes: Collection[ir.Value], folded: Collection[ir.Value]) -> bool:
    """Whether ONNX Runtime folds a node when it loads the graph: it reads constants, or static sizes."""
    operator = operator_of(node)
    if operator.reads_shape:
        (value,) = node.inputs
        assert value is not None
        return value in sizes or value in folded or _is_static(value)
    if operator.dequantizes or operator.quantizes:
        return False
    return all(value is None or value in folded or value.is_initializer() for value in node.inputs)


def _is_left(node: ir.Node, on_cpu: Collection[ir.Value], folded: Collection[ir.Value]) -> bool:
    """Whether a node stays on the CPU although it has a kernel for GPUs: all its computed inputs are on the CPU."""
    on_host = host_inputs(node)
    if not any(value in on_cpu for value in node.inputs):
        return False
    for number, value in enumerate(node.inputs):
        if value is None or described(value).dtype in HALVES:
            return False
        is_free = value.is_graph_input() or value in folded or _is_small(value)
        if not is_free and (value not in on_cpu or number in on_host):
            return False
    return True


def _is_static(value: ir.Value) -> bool:
    shape = described(value).shape
    return shape is not None and shape.is_static()


def _is_small(value: ir.Value) -> bool:
    # Inference may also have given a computed value a constant, which ONNX Runtime may not know.
    return value.is_initializer() and value.const_value is not None and value.const_value.size <= SMALL
