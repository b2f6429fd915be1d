"""Finds convolutions in half precision for which cuDNN's heuristics may have no plan.

Engines take the plan that cuDNN's heuristics name first. For some convolutions of halves they name none, and a request
fails: "HEURISTIC_QUERY_FAILED". One is in speech encoders such as wav2vec 2.0's: 16 groups of 64 channels, and a kernel
of 128. cuDNN has plans for them, and finds them by trying all.

Seen on an H200 (ONNX Runtime 1.31): of 728 regular and 295 random convolutions of halves 101 and 29 had no plan. The
rule covers all of these, and 123 random ones that had one: for those the choice among all plans may be slower, not
wrong. In single precision one of 400 had none, in three axes.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from splitc.compiler.engine_graphs.gpu_sizes import convolves
from splitc.compiler.graphs.origins import described, own_shape
from splitc.compiler.operators.gpu_kernels import HALVES

# The most elements of a kernel, over its spatial axes, for which all convolutions of one or two such axes had a plan.
KERNEL = 31
# The least numbers that a convolution without groups multiplies and adds for an output, among those without a plan.
SUMMED = 1 << 13
# The first spatial axis of a weight.
SPATIAL = 2


def may_lack_plan(graph: ir.Graph) -> bool:
    """Whether cuDNN's heuristics may have no plan for one of a graph's convolutions."""
    return any(_may_lack_plan(node) for node in graph.all_nodes() if convolves(node))


def _may_lack_plan(node: ir.Node) -> bool:
    data, weight = node.inputs[:2]
    if data is None or weight is None or described(data).dtype not in HALVES:
        return False
    groups, shape = node.attributes.get_int("group", 1), own_shape(weight)
    sizes = [size for size in shape or () if isinstance(size, int)]
    if shape is None or len(sizes) != len(shape):
        return True
    if node.domain:  # the weight is [outputs, ..., inputs]
        sizes = [sizes[0], sizes[-1], *sizes[1:-1]]
    kernel = math.prod(sizes[SPATIAL:])
    if groups == 1:
        inputs = sizes[0] if node.op_type == "ConvTranspose" else sizes[1]
        return kernel > KERNEL and kernel * inputs >= SUMMED
    if sizes[:SPATIAL] == [groups, 1]:  # depthwise
        return False
    return kernel > KERNEL or node.op_type == "ConvTranspose" or len(sizes) > SPATIAL + 2 or sizes[1] == 1
