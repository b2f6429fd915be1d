"""Linear operators: matrix products, convolutions, Einsum, and mixtures of experts."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import onnx_ir as ir
from onnx_shape_inference import registry

from splitc.compiler.operators import axes as ax
from splitc.compiler.operators import scratch
from splitc.compiler.operators.axes import Axis
from splitc.compiler.operators.operation import LINEAR, Operation
from splitc.compiler.operators.operator import AxesRule, Flops, Operator, ShapeFunction, Shapes


def product(op: Operation, left: tuple[Axis, ...], right: tuple[Axis, ...]) -> None:
    """[..., i, k] x [..., k, j] -> [..., i, j]. Either input may be a vector."""
    output = list(op.output())
    if len(right) > 1:
        op.relate(right[-1], output.pop())
    if len(left) > 1:
        op.relate(left[-2], output.pop())
    op.relate(left[-1], right[-2 if len(right) > 1 else -1])
    op.broadcast(left[:-2], output)
    op.broadcast(right[:-2], output)
    op.contracted = left[-1]


def matmul(op: Operation) -> None:
    product(op, op.input(0), op.input(1))
    op.linear = (frozenset([0]), frozenset([1]))


def matmul_integer(op: Operation) -> None:
    """A product of integers. Scales and zero points are scalars, or one per column of the second matrix.

    MatMulInteger takes the zero points of both matrices; MatMulIntegerToFloat also takes scales and a bias.
    """
    if len(op.input(0)) < 2 or len(op.input(1)) < 2:
        return
    product(op, op.input(0), op.input(1))
    to_float = op.node.op_type == "MatMulIntegerToFloat"
    op.zero_point, of_columns = (4, (3, 5, 6)) if to_float else (2, (3,))
    if op.has(op.zero_point) and any(ax.size_of(axis) != 1 for axis in op.input(op.zero_point)):
        op.whole([op.input(0)[-1]], "there is a zero point for each row")
    for axis in itertools.chain(*op.given(of_columns)):
        if ax.size_of(axis) == ax.size_of(op.output()[-1]):
            op.relate(axis, op.output()[-1])
    op.add_on_one_rank = frozenset([6]) if to_float else frozenset()


def fused_matmul(op: Operation) -> None:
    if op.number("transBatchA", 0) or op.number("transBatchB", 0):
        return
    product(op, matrix(op, 0, "transA"), matrix(op, 1, "transB"))


def matrix(op: Operation, number: int, transposed: str) -> tuple[Axis, ...]:
    """The axes of an input [..., rows, columns], whose last two axes are swapped if the attribute `transposed` is 1."""
    axes = op.input(number)
    return (*axes[:-2], axes[-1], axes[-2]) if op.number(transposed, 0) and len(axes) > 1 else axes


def gemm(op: Operation) -> None:
    product(op, matrix(op, 0, "transA"), matrix(op, 1, "transB"))
    if op.has(2):
        op.broadcast(op.input(2), op.output())
        op.add_on_one_rank = frozenset([2])


def einsum(op: Operation) -> None:
    sources, arrow, result = op.node.attributes.get_string("equation", "").replace(" ", "").partition("->")
    terms = [einsum_labels(term, len(axes or ())) for term, axes in zip(sources.split(","), op.inputs, strict=True)]
    made = einsum_labels(result, len(op.output()))
    summed = set().union(*terms).difference(made)
    repeated = any(len(set(term)) < len(term) for term in (*terms, made))
    if not arrow or repeated or not all(map(str.isalpha, summed)):
        return
    op.pattern(", ".join(map(" ".join, terms)) + " -> " + " ".join(made), contract="".join(sorted(summed)))
    op.linear = LINEAR if len(op.inputs) == 1 else ()


def convolution(op: Operation) -> None:
    """Conv takes a bias; ConvInteger takes the zero points of both inputs."""
    op.contracted = convolve(op, 1, range(2, len(op.inputs)))
    if op.node.op_type == "ConvInteger":
        op.zero_point = 2
    else:
        op.add_on_one_rank = frozenset([2])
        op.linear = () if op.has(2) else LINEAR


def convolve(op: Operation, filters: int, of_channels: Iterable[int]) -> Axis:
    """Relate input and output channels as a matrix's rows and columns, with groups as a factor of both.

    Spatial axes are needed whole unless the kernel's size is 1. `filters` is the index of the weight; `of_channels` are
    inputs with one element for each output channel, or one for all. Returns the axis that is summed over.
    """
    data, kernel, output = op.input(0), op.input(filters), op.output()
    op.relate(data[0], output[0])
    for place, window, result in zip(data[2:], kernel[2:], output[2:], strict=True):
        if ax.size_of(window) == 1 and ax.size_of(place) == ax.size_of(result):
            op.relate(place, result)
    groups = ax.new_axis(op.number("group", 1))
    inner, outer = kernel[1], ax.new_axis(ax.size_of(kernel[0]) // ax.size_of(groups))
    op.relate(data[1], (*groups, *inner))
    op.relate(kernel[0], (*groups, *outer))
    op.relate(output[1], (*groups, *outer))
    op.free([inner])
    op.attributes["group"], op.windows = [groups], kernel[2:]
    for axes in op.given(of_channels):
        if len(axes) == 1 and ax.size_of(axes[0]) == ax.size_of(output[1]):
            op.relate(axes[0], output[1])
    return inner


def deformed_convolution(op: Operation) -> None:
    """A convolution that samples its input at positions moved by offsets, one set for each offset group of channels."""
    data, output = op.input(0), op.output()
    op.contracted = convolve(op, 1, [3])
    op.add_on_one_rank = frozenset([3])
    for moves in op.given((2, 4)):
        op.relate(moves[0], output[0])
        op.whole(moves[1:])
    op.whole([*data[2:], *output[2:]], "its offsets may point to any position")
    if op.number("offset_group", 1) != 1:
        op.whole([data[1]], "its offsets differ between groups of channels")


def transposed_convolution(op: Operation) -> None:
    data, kernel, output = op.input(0), op.input(1), op.output()
    op.relate(data[0], output[0])
    groups = ax.new_axis(op.number("group", 1))
    inner, outer = ax.new_axis(ax.size_of(data[1]) // ax.size_of(groups)), kernel[1]
    op.relate(data[1], (*groups, *inner))
    op.relate(kernel[0], (*groups, *inner))
    op.relate(output[1], (*groups, *outer))
    op.free([outer])
    op.contracted = inner
    op.attributes["group"], op.windows = [groups], kernel[2:]
    if op.has(2):
        op.relate(op.input(2)[0], output[1])
        op.add_on_one_rank = frozenset([2])


def experts(op: Operation) -> None:
    """A mixture of experts: each token goes through some, [experts, inner, hidden] and [experts, hidden, inner]."""
    tokens(op)
    inner = op.input(4)[-1]
    if relate_experts(op, inner, (2, 3), (6, 7)):
        op.free([inner])
        op.contracted = inner
        op.add_on_one_rank = frozenset([5])


def relate_experts(op: Operation, inner: Axis, first: Iterable[int], third: Iterable[int]) -> bool:
    """Relate the rows, axis 1, of the inputs of the `first` and the `third` matrices. False if they have others.

    For a gated activation, the first may have the rows of gates and values: interleaved, or one half after the other.
    """
    pair = ax.new_axis(2)
    rows = {0: inner, 1: (*inner, *pair), 2: (*pair, *inner)}.get(op.number("swiglu_fusion", 0))
    of_rows = [axes[1] for axes in op.given(first)]
    if rows is None or any(ax.size_of(axis) != ax.size_of(rows) for axis in of_rows):
        return False  # the layout of ONNX Runtime before 1.20
    op.whole([pair], "it needs a gate and its value together")
    for axis in of_rows:
        op.relate(axis, rows)
    for axes in op.given(third):
        op.relate(axes[1], inner)
    return True


def tokens(op: Operation) -> None:
    """Tokens are independent: [..., hidden], with scores [tokens, experts], becomes [..., hidden]."""
    data, output = op.input(0), op.output()
    op.relate_all(data[:-1], output[:-1])
    op.relate(op.input(1)[0], ax.product(data[:-1]))


def expert_flops(node: ir.Node, inputs: Shapes, outputs: Shapes, weights: Iterable[int] = (2, 4, 6)) -> int:
    """The operations of the `k` experts that each token goes through, by the indices of their matrices."""
    matrices = [inputs[number] for number in weights if number < len(inputs) and len(inputs[number]) == 3]
    return 2 * inputs[1][0] * node.attributes.get_int("k", 1) * sum(math.prod(shape[1:]) for shape in matrices)


def product_flops(node: ir.Node, inputs: Shapes, outputs: Shapes) -> int:
    """2 M N K: a multiplication and an addition for each element of the result and of the contracted axis.

    The first matrix may be transposed, and have its batch axes between rows and columns.
    """
    transposed, batch_inside = (node.attributes.get_int(name, 0) for name in ("transA", "transBatchA"))
    contracted = -1 if not transposed or len(inputs[0]) < 2 else 0 if batch_inside else -2
    return 2 * math.prod(outputs[0]) * (inputs[0][contracted] if inputs[0] else 1)


def einsum_flops(node: ir.Node, inputs: Shapes, outputs: Shapes) -> int:
    """Products of two terms at a time, from left to right: 2 for each combination of indices if it sums, else 1."""
    sources, arrow, result = node.attributes.get_string("equation", "").replace(" ", "").partition("->")
    terms = [einsum_labels(term, len(shape)) for term, shape in zip(sources.split(","), inputs, strict=True)]
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, inputs, strict=True):
        for label, size in zip(term, shape, strict=False):  # an unknown shape is ()
            sizes[label] = max(size, sizes.get(label, 1))
    single = [label for label, count in Counter(sources).items() if count == 1 and label.isalpha()]
    kept = einsum_labels(result if arrow else "..." + "".join(single), len(outputs[0]))
    if len(terms) == 1:
        return math.prod(sizes.values())
    total, left = 0, set(terms[0])
    for number, term in enumerate(terms[1:], 1):
        both = left.union(term)
        left = both.intersection([*kept, *itertools.chain(*terms[number + 1 :])])
        total += (2 if left < both else 1) * math.prod(sizes.get(label, 1) for label in both)
    return total


def einsum_labels(term: str, rank: int) -> list[str]:
    """The labels of a term's axes. Axes of an ellipsis are numbered from the last one."""
    before, dots, after = term.partition("...")
    inside = rank - len(before) - len(after) if dots else 0
    return [*before, *(str(inside - place) for place in range(inside)), *after]


def convolution_flops(node: ir.Node, inputs: Shapes, outputs: Shapes) -> int:
    """2 for each output and element of its channel's kernel."""
    return 2 * math.prod(outputs[0]) * math.prod(inputs[1][1:])


def transposed_convolution_flops(node: ir.Node, inputs: Shapes, outputs: Shapes) -> int:
    return 2 * math.prod(inputs[0]) * math.prod(inputs[1][1:])


def integer_product_shape(context: Any, node: ir.Node) -> None:
    """The shape of a MatMul, in the type of the first scale."""
    registry.get("", "MatMul", 13)(context, node)  # type: ignore[misc]  # never None for it
    if (scale := node.inputs[2]) is not None and scale.dtype is not None:
        node.outputs[0].dtype = scale.dtype


def _matrix(name: str, axes: AxesRule, flops: Flops, shapes: ShapeFunction | None = None, **more: Any) -> Operator:
    """An entry for a product whose CPU kernel packs its second input, a matrix."""
    return Operator(name, axes, flops, shapes, is_product=True, matrix_input=1, padding=scratch.matrix_padding, **more)


OPERATORS = (
    _matrix("MatMul", matmul, product_flops, may_make_angles=True),
    _matrix("MatMulInteger", matmul_integer, product_flops),
    Operator(
        "com.microsoft.MatMulIntegerToFloat", matmul_integer, product_flops, integer_product_shape, matrix_input=1
    ),
    _matrix("com.microsoft.FusedMatMul", fused_matmul, product_flops),
    _matrix("Gemm", gemm, product_flops, scaling_attributes={2: "beta"}),
    Operator("Einsum", einsum, einsum_flops, is_product=True, may_make_angles=True, scratch=scratch.einsum),
    # Its CPU kernel may work on blocks of channels (NCHWc).
    Operator(
        "Conv",
        convolution,
        convolution_flops,
        is_product=True,
        scratch=scratch.convolution,
        half_scratch=scratch.half_convolution,
        padding=scratch.kernel_in_blocks,
        takes_blocks=True,
        nodes=3,
        gpu_bias=2,
    ),
    Operator("DeformConv", deformed_convolution, convolution_flops, is_product=True),
    Operator("ConvInteger", convolution, convolution_flops, scratch=scratch.integer_convolution),
    Operator(
        "ConvTranspose", transposed_convolution, transposed_convolution_flops, scratch=scratch.transposed_convolution
    ),
    Operator("com.microsoft.MoE", experts, expert_flops, experts=(2, 3, 4, 5, 6, 7)),
)
