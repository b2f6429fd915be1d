"""Operators that work along an axis: reductions, softmax, sorting, pooling, norms."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir

from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.operation import LINEAR, Operation
from splitc.compiler.operators.operator import Operator

# The types for which kernels compute norms in float32.
_NORMED = frozenset(ir.DataType[name] for name in ("FLOAT", "FLOAT16", "BFLOAT16"))
# The types whose maxima an all-reduce can compute.
_COMPARED = frozenset(ir.DataType[name] for name in ("FLOAT", "DOUBLE", "FLOAT16"))
# The types in which the squares of a norm do not overflow.
_LENGTHS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
# Operators that only rearrange or convert the elements of a value.
_REARRANGING = ("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


def _reduce(op: Operation) -> list[int]:
    """Relate the axes that are kept. Returns the numbers of the reduced ones, none if they are not known."""
    data, named = op.input(0), op.numbers(1, "axes")
    if named is None and op.has(1):
        return []
    all_of_none = [] if op.number("noop_with_empty_axes", 0) else list(range(len(data)))
    reduced = sorted({axis % len(data) for axis in named}) if named else all_of_none
    _relate_kept(op, reduced)
    return reduced


def _relate_kept(op: Operation, reduced: Collection[int]) -> None:
    """Relate the axes that are not reduced, which alone are left without `keepdims`."""
    kept = [axis for axis in range(len(op.input(0))) if axis not in reduced]
    output = [op.output()[axis] for axis in kept] if op.number("keepdims", 1) else op.output()
    op.relate_all([op.input(0)[axis] for axis in kept], output)


def reduce_sum(op: Operation) -> None:
    _contract(op, _reduce(op))
    op.linear = LINEAR


def _contract(op: Operation, numbers: Iterable[int]) -> None:
    reduced = [op.input(0)[axis] for axis in numbers]
    op.free(reduced)
    op.contracted = ax.product(reduced)


def reduce_mean(op: Operation) -> None:
    """A mean may be over a sharded axis, unless a norm computes it of the residual: ranks' means are summed.

    A mean of statistics, such as those of channels, may always be.
    """
    reduced, data = _reduce(op), op.node.inputs[0]
    is_exact = data is not None and data.dtype in _LENGTHS
    if op.gives_floats and (_is_statistic(data) or (is_exact and not _is_of_residual(data))):
        _contract(op, reduced)
        op.averages = True
    op.linear = LINEAR if op.gives_floats else ()


def _is_statistic(value: ir.Value | None) -> bool:
    """Whether a value is a reduction's result, perhaps rearranged or after elementwise nodes."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type.startswith("Reduce"):
            return True
        if node.op_type not in (*_REARRANGING, "Abs", "Clip", "Pow", "Sqrt"):
            return False
        value = node.inputs[0]
    return False


def _is_of_residual(value: ir.Value | None) -> bool:
    """Whether a value is the residual or its square. The one other reader that a norm has does not count."""
    node = None if value is None else value.producer()
    if node is not None and (node.op_type == "Pow" or (node.op_type == "Mul" and len({*node.inputs}) == 1)):
        value = node.inputs[0]
    readers = [] if value is None else [reader for reader, _ in value.uses() if reader is not node]
    return _is_residual(value, [reader for reader in readers if reader.op_type in ("Sub", "Mul", "Div")][:1])


def pool_mean(op: Operation) -> None:
    op.relate_all(op.input(0)[:2], op.output()[:2])
    op.linear = LINEAR if op.gives_floats else ()


def reduce_extreme(op: Operation) -> None:
    """A maximum or minimum, such as one from which a token's scale is computed, may be over a sharded axis."""
    reduced = [op.input(0)[axis] for axis in _reduce(op)]
    if op.node.outputs[0].dtype in _COMPARED:
        op.free(reduced)
        op.reduced = ax.product(reduced)


def reduce_length(op: Operation) -> None:
    """An L2 norm may be over a sharded axis, whose squares ranks sum, unless it normalizes the residual."""
    numbers, data = _reduce(op), op.node.inputs[0]
    if len(numbers) != 1 or data is None or data.dtype not in _LENGTHS:
        return
    divided = [reader for reader, place in data.uses() if reader.op_type == "Div" and place == 0]
    if not _is_residual(data, divided):
        op.reduced = op.input(0)[numbers[0]]
        op.free([op.reduced])


def reduce_nonlinear(op: Operation) -> None:
    _reduce(op)


def reduce_arg(op: Operation) -> None:
    _relate_kept(op, [op.number("axis", 0) % len(op.input(0))])


def along_axis(op: Operation) -> None:
    """One axis is needed whole. Before opset 13, Softmax worked along the given axis and all axes after it."""
    data = op.input(0)
    axis = op.number("axis", -1)
    if op.node.op_type == "CumSum":
        if (given := op.numbers(1)) is None:
            return
        (axis,) = given
    opset = op.node.version or (op.node.graph.opset_imports.get("", 13) if op.node.graph is not None else 13)
    old = op.node.op_type in ("Softmax", "LogSoftmax", "Hardmax") and opset < 13
    first = op.number("axis", 1) % len(data) if old else axis % len(data)
    along = range(first, len(data)) if old else [first]
    for number in range(len(op.outputs)):
        op.relate_others(along, number)


def layer_norm(op: Operation) -> None:
    """A norm may be over a sharded last axis, as over all heads of queries: an all-reduce computes its statistics.

    A norm of the residual needs it whole. A value is the residual if several nodes read it, or if it is the sum of two
    computed values.
    """
    data = op.input(0)
    if not _is_plain(op) or _is_residual(op.node.inputs[0]):
        _whole_norm(op)
        return
    op.relate_all(data, op.output())
    for number in range(1, len(op.inputs)):
        op.relate(op.input(number)[0], data[-1])
    op.reduced = data[-1]
    op.statistics = 2 if op.node.op_type == "LayerNormalization" else 1


def _whole_norm(op: Operation) -> None:
    data = op.input(0)
    first = op.number("axis", -1) % len(data)
    op.whole(data[first:])
    for made in op.outputs:
        op.relate_all(data[:first], (made or ())[:first])
    for axes in op.given((1, 2)):  # a scale and a bias may also have axes that are not normalized
        op.broadcast(axes, data)


def _is_plain(op: Operation) -> bool:
    """Whether a norm is along the last axis, with weights of the data's type, and no optional outputs."""
    data, *weights = op.node.inputs
    if data is None or data.dtype not in _NORMED or any(map(op.has_output, range(1, len(op.outputs)))):
        return False
    is_along_last = op.number("axis", -1) in (-1, len(op.input(0)) - 1)
    size = ax.size_of(op.input(0)[-1])
    return is_along_last and all(
        value is not None
        and value.is_initializer()
        and value.dtype == data.dtype
        and list(map(ax.size_of, op.input(number))) == [size]
        for number, value in enumerate(weights, 1)
    )


def _is_residual(value: ir.Value | None, besides: Collection[ir.Node] = ()) -> bool:
    """Whether a value has several readers, is the sum of two computed values, or is an input or a weight.

    Readers in `besides` do not count. The value may be rearranged or converted afterwards.
    """
    while value is not None and (node := value.producer()) is not None:
        readers = [reader for reader, _ in value.uses() if reader.op_type != "Shape" and reader not in besides]
        if len(readers) != 1 or value.is_graph_output():
            return True
        if node.op_type == "Add":
            return not any(other is not None and other.is_initializer() for other in node.inputs)
        if node.op_type not in _REARRANGING:
            return False
        value = node.inputs[0]
    return True


def skip_layer_norm(op: Operation) -> None:
    """The skip input may be broadcast over the batch."""
    op.relate_all(op.input(0)[:-1], op.output()[:-1])
    for axes in (op.input(1), *op.outputs[1:]):
        if axes is not None:
            op.broadcast(axes[:-1], op.input(0)[:-1])


def embed_layer_norm(op: Operation) -> None:
    """The sum of rows of three embedding tables, normalized. Without given positions, tokens are counted from 0."""
    op.pattern("b l, b l, v h, p h, s h, h, h, b l, b l -> b l h, b, b l h", whole="lvpsh")


def batch_norm(op: Operation) -> None:
    """Channels are normalized independently: by given statistics, or in training mode by those over all other axes.

    Exporters write weight standardization in training mode. The running mean and variance are outputs then.
    """
    op.relate_all(op.input(0), op.output())
    batch, channels, *places = op.output()
    for number in range(1, 5):
        op.relate(op.input(number)[0], channels)
    for number in (1, 2):
        if op.has_output(number):
            op.relate(op.output(number)[0], channels)
    if op.number("training_mode", 0):
        op.whole([batch, *places], "it normalizes over all elements")


def instance_norm(op: Operation) -> None:
    """Channels are normalized independently, over all spatial axes."""
    op.relate_all(op.input(0)[:2], op.output()[:2])
    for number in (1, 2):
        op.relate(op.input(number)[0], op.output()[1])


def group_norm(op: Operation) -> None:
    """Groups of channels are normalized independently. There is one scale a channel; in opset 18, one a group."""
    groups = ax.new_axis(op.number("num_groups", 1))
    channels = op.input(0)[1]
    inside = ax.new_axis(ax.size_of(channels) // max(1, ax.size_of(groups)))
    op.relate(op.input(0)[0], op.output()[0])
    op.relate(channels, (*groups, *inside))
    op.relate(op.output()[1], (*groups, *inside))
    op.whole([inside], "it normalizes over all elements")
    for number in (1, 2):
        scale = op.input(number)[0]
        op.relate(scale, channels if ax.size_of(scale) == ax.size_of(channels) else groups)
    op.attributes["num_groups"] = [groups]


def mean_variance_norm(op: Operation) -> None:
    rank = len(op.input(0))
    op.relate_others([axis % rank for axis in op.numbers_of("axes") or (0, 2, 3) if axis < rank])


def local_norm(op: Operation) -> None:
    """Normalizes over neighbouring channels."""
    op.relate_others([1])


def pool(op: Operation) -> None:
    """The optional second output indexes the whole flattened input."""
    if op.has_output(1):
        op.opaque()
    else:
        op.relate_all(op.input(0)[:2], op.output()[:2])


OPERATORS = (
    Operator("ReduceSum", reduce_sum, shape_arithmetic=True),
    Operator("ReduceMean", reduce_mean),
    Operator("GlobalAveragePool", pool_mean),
    Operator("ReduceMax", reduce_extreme, shape_arithmetic=True),
    Operator("ReduceMin", reduce_extreme, shape_arithmetic=True),
    Operator("ReduceProd", reduce_nonlinear, shape_arithmetic=True),
    Operator("ReduceL1", reduce_nonlinear),
    Operator("ReduceL2", reduce_length),
    Operator("ReduceLogSum", reduce_nonlinear),
    Operator("ReduceLogSumExp", reduce_nonlinear),
    Operator("ReduceSumSquare", reduce_nonlinear),
    Operator("ArgMax", reduce_arg),
    Operator("ArgMin", reduce_arg),
    Operator("Softmax", along_axis, overwrites=True),
    Operator("LogSoftmax", along_axis, overwrites=True),
    Operator("Hardmax", along_axis),
    Operator("LpNormalization", along_axis, is_norm=True),
    Operator("CumSum", along_axis),
    Operator("TopK", along_axis),
    Operator("LayerNormalization", layer_norm, is_norm=True),
    Operator("RMSNormalization", layer_norm, is_norm=True),
    Operator("SimplifiedLayerNormalization", layer_norm, is_norm=True),
    Operator("com.microsoft.SimplifiedLayerNormalization", layer_norm, is_norm=True),
    Operator("com.microsoft.SkipLayerNormalization", skip_layer_norm, is_norm=True),
    Operator("com.microsoft.SkipSimplifiedLayerNormalization", skip_layer_norm, is_norm=True),
    Operator(
        "com.microsoft.EmbedLayerNormalization",
        embed_layer_norm,
        lookups=((0, 2), (1, 4)),
        positions=(8,),
        masks=(7,),
        is_product=True,
        is_norm=True,
    ),
    Operator("BatchNormalization", batch_norm, is_norm=True),
    # Passes of group norms: with SiLU, the 29 of SDXL's VAE take 11.7 ms on an H200, and 2.1 would do for the bytes.
    Operator("InstanceNormalization", instance_norm, is_norm=True, gpu_passes=4),
    # ONNX defines it as a function of 29 nodes.
    Operator("GroupNormalization", group_norm, is_norm=True, gpu_passes=4, nodes=29),
    Operator("MeanVarianceNormalization", mean_variance_norm, is_norm=True),
    Operator("LRN", local_norm, is_norm=True),
    Operator("AveragePool", pool, crashes_emptied=True),
    Operator("MaxPool", pool, crashes_emptied=True),
    Operator("LpPool", pool),
    Operator("GlobalMaxPool", pool),
    Operator("GlobalLpPool", pool),
)
