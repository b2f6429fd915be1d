"""Corrections of onnx-shape-inference's rules: functions that call a rule of the library, and mend its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.matching import constant_numbers, made_by
from splitc.compiler.inference.folding import LONGEST
from splitc.compiler.inference.iterations import GOES_ON, LEADING, goes_on
from splitc.compiler.nodes import input_at, inputs_of
from splitc.compiler.operators.indexing import marked_places
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.operators.row_groups import find_row_groups

Rule = Callable[[Any, ir.Node], None]
# An end from here on is one of the greatest integers, which no axis reaches.
GREATEST = (1 << 31) - 1
# How many nodes above a list of sizes are followed. A choice: exporters write some ten.
DEEPEST = 32
# Operators that compute numbers which are not negative from such.
GROWING = frozenset({"Add", "Ceil", "Div", "Floor", "Max", "Min", "Mul"})


def _not_beyond(rule: Rule, context: Any, node: ir.Node) -> None:
    """The rule of Slice, corrected: a constant end may lie beyond the end of a dynamic axis, and other axes than those
    that are named stay whole, also if bounds are computed."""
    rule(context, node)
    data, output = node.inputs[0], node.outputs[0]
    if data is None or data.shape is None or output.shape is None:
        return
    whole, made = data.shape, output.shape
    axes = constant_numbers(node.inputs[3]) if len(node.inputs) > 3 else None
    named = range(len(whole)) if axes is None else [axis % len(whole) for axis in axes]
    output.shape = ir.Shape([made[axis] if axis in named else whole[axis] for axis in range(len(whole))])
    pairs = list(zip(data.shape, output.shape, strict=True))
    if any(isinstance(size, ir.SymbolicDim) and isinstance(cut, int) and cut > 1 for size, cut in pairs):
        sizes = [_least(size, cut) for size, cut in pairs]
        output.shape = context.name_anonymous_dims_in_shape(ir.Shape(sizes))


def _least(size: int | ir.SymbolicDim, cut: int | ir.SymbolicDim) -> int | ir.SymbolicDim | None:
    """The size of a sliced axis: `cut`, or less if the axis is shorter. (At least 1 unless it is empty.)"""
    if isinstance(size, int) or not isinstance(cut, int) or cut <= 1:
        return cut
    return ir.SymbolicDim(f"Min({size.value}, {cut})") if size.value and size.value.isidentifier() else None


def _of_places(rule: Rule, context: Any, node: ir.Node) -> None:
    """The rule of Slice, corrected: sizes are sliced as by ONNX Runtime, also backwards and beyond their ends."""
    rule(context, node)
    sizes, made = context.get_symbolic_value(node.inputs[0]), node.outputs[0]
    # Starts, ends, and if given axes and steps.
    bounds = [bound for value in node.inputs[1:] if (bound := constant_numbers(value))]
    is_list = made.shape is not None and len(made.shape) == 1
    if sizes is not None and is_list and bounds and len(bounds) == len(node.inputs) - 1:
        start, end, step = (bound[0] for bound in (*bounds[:2], bounds[3] if len(bounds) > 3 else [1]))
        picked = sizes[_places(len(sizes), start, end, step)]
        made.shape, made.const_value = ir.Shape([len(picked)]), None  # in place of the rule's own
        context.set_symbolic_value(made, picked)


def _of_multiplied_sizes(rule: Rule, context: Any, node: ir.Node) -> None:
    """The rule of ReduceProd, corrected: the product of sizes is a size. tf2onnx joins the axes of an Einsum by it."""
    rule(context, node)
    sizes, made = context.get_symbolic_value(node.inputs[0]), node.outputs[0]
    if sizes is not None and made.shape is not None and len(made.shape) <= 1:
        context.set_symbolic_value(made, [math.prod(sizes)])


def _places(length: int, start: int, end: int, step: int) -> slice:
    """The places that a Slice takes of an axis of this length: those of Python, but for two differences backwards.

    A start before the first place is the first one (https://onnx.ai/onnx/operators/onnx__Slice.html), and ONNX Runtime
    takes the greatest integer for an end before it.
    """
    if step > 0:
        return slice(start, end, step)
    return slice(max(start, -length), None if end >= GREATEST else end, step)


def _of_both_branches(rule: Rule, context: Any, node: ir.Node) -> None:
    """The rule of If, corrected: a result has no shape if that of either branch is unknown."""
    rule(context, node)
    branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    for number, value in enumerate(node.outputs):
        if any(branch.outputs[number].shape is None for branch in branches):
            value.shape = None


def _of_loops(rule: Rule, context: Any, node: ir.Node) -> None:
    """The rule of Loop, corrected: one that a condition may end has not run as often as it may.

    The condition may be left out, which the rule refuses. And sizes that no iteration changes are those with which a
    state begins, whatever the body calls them.
    """
    condition = node.inputs[1]
    node.replace_input_with(1, condition or ir.Value())
    rule(context, node)
    node.replace_input_with(1, condition)
    body = node.attributes["body"].as_graph()
    states = zip(node.inputs[LEADING:], body.inputs[LEADING:], body.outputs[GOES_ON:], node.outputs, strict=False)
    for first, state, after, made in states:
        made.shape = _kept_sizes(None if first is None else first.shape, state.shape, after.shape) or made.shape
    stacked = () if goes_on(node) else node.outputs[len(node.inputs) - LEADING :]
    count = context.new_symbolic_dim() if stacked else None
    for value in stacked:
        if value.shape is not None:
            value.shape = ir.Shape([count, *value.shape[1:]])


def _kept_sizes(first: ir.Shape | None, state: ir.Shape | None, after: ir.Shape | None) -> ir.Shape | None:
    """The shape of a state behind a loop, from those with which it and an iteration begin, and an iteration ends.

    None if they have not the same axes.
    """
    if first is None or state is None or after is None or not len(first) == len(state) == len(after):
        return None
    sizes = zip(first, state, after, strict=True)
    return ir.Shape([begin if own == new and _has_name(own) else new for begin, own, new in sizes])


def _has_name(size: int | ir.SymbolicDim) -> bool:
    return isinstance(size, ir.SymbolicDim) and size.value is not None


def _of_given_sizes(rule: Rule, context: Any, node: ir.Node) -> None:
    """The rule of Split, corrected: parts whose lengths are computed are not taken for equal ones."""
    rule(context, node)
    data, lengths = node.inputs[0], input_at(node, 1)
    if lengths is None or lengths.const_value is not None or data is None or data.shape is None:
        return
    known = context.get_symbolic_value(lengths) or [None] * len(node.outputs)
    for value, length in zip(node.outputs, known, strict=True):
        sizes = list(data.shape)
        sizes[node.attributes.get_int("axis", 0)] = length
        value.shape = context.name_anonymous_dims_in_shape(ir.Shape(sizes))


def _of_grouped_rows(rule: Rule, context: Any, node: ir.Node) -> None:
    """The rule of Concat, corrected: products of grouped rows have as many rows as there are.

    The rule itself would name their sum by all of them, which takes a second for 128.
    """
    first, groups = node.inputs[0], find_row_groups(node)
    if groups is None or groups.rows.shape is None or first is None or first.shape is None:
        rule(context, node)
    else:
        shape = ir.Shape([groups.rows.shape[0], *list(first.shape)[1:]])
        context.set_shape_and_dtype(node.outputs[0], shape, first.dtype)


def _of_named_sizes(rule: Rule, context: Any, node: ir.Node) -> None:
    """The rule of ConstantOfShape, corrected: it also takes symbolic sizes."""
    rule(context, node)
    sizes, made = context.get_symbolic_value(node.inputs[0]), node.outputs[0]
    if made.shape is None and sizes is not None:
        context.set_shape(made, ir.Shape(list(sizes)))


def _of_kept_sizes(rule: Rule, context: Any, node: ir.Node) -> None:
    """The rule of Expand, corrected: sizes beyond 1 stay, also if nothing is known of those that are asked for."""
    rule(context, node)
    data, asked, made = *node.inputs[:2], node.outputs[0]
    count = asked.shape[0] if asked is not None and asked.shape is not None and len(asked.shape) == 1 else None
    if made.shape is not None or data is None or data.shape is None or not isinstance(count, int):
        return
    kept = (size if isinstance(size, int) and size > 1 else None for size in data.shape)
    made.shape = context.name_anonymous_dims_in_shape(ir.Shape([*[None] * (count - len(data.shape)), *kept]))


def _in_numbers(rule: Rule, context: Any, node: ir.Node) -> None:
    """The rule of Reshape, corrected: a size -1 that is the same for all inputs is a number, not the symbol "32"."""
    rule(context, node)
    made = node.outputs[0]
    sizes = [_in_digits(size) for size in made.shape or ()]
    if made.shape is not None and sizes != list(made.shape):
        made.shape = ir.Shape(sizes)


def _in_digits(size: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    """A size as a number, if its symbol is one."""
    text = "" if isinstance(size, int) or size.value is None else size.value
    return int(text) if text.isdecimal() else size


def _of_compared_sizes(rule: Rule, context: Any, node: ir.Node) -> None:
    """The rule of Where, corrected: sizes are no negative numbers.

    torch's older exporter replaces -1 in the target of each Expand: Where(Equal(sizes, -1), ones, sizes).
    """
    rule(context, node)
    equal = made_by(node.inputs[0], "Equal")
    reads = [*(equal.inputs if equal is not None else ()), *node.inputs[1:], node.outputs[0]]
    known: list[Any] = [None if value is None else context.get_symbolic_value(value) for value in reads]
    lists = [entries for entries in known if entries is not None]
    if equal is None or len(lists) < len(reads) or len(set(map(len, lists))) > 1:
        return
    positive = all(value is not None and _holds_sizes(value, DEEPEST) for value in equal.inputs)
    chosen = [
        made if (same := _are_same(one, other, positive)) is None else (then if same else otherwise)
        for one, other, then, otherwise, made in zip(*lists, strict=True)
    ]
    context.set_symbolic_value(node.outputs[0], chosen)


def _are_same(one: int | ir.SymbolicDim, other: int | ir.SymbolicDim, positive: bool) -> bool | None:
    """Whether two entries of lists are the same; None if that is not known. `positive`: symbols are of sizes."""
    if one == other or (isinstance(one, int) and isinstance(other, int)):
        return one == other
    number = one if isinstance(one, int) else other
    return False if positive and isinstance(number, int) and number < 0 else None


def _holds_sizes(value: ir.Value, deepest: int) -> bool:
    """Whether a list has only sizes, what is computed from them without subtraction, and constants among them.

    At most `deepest` nodes are followed.
    """
    if value.const_value is not None:
        return True
    node = value.producer()
    if node is None or node.domain or not deepest:
        return False
    operator = operator_of(node)
    if operator.reads_shape:
        return True
    reads = inputs_of(node)
    if node.op_type in GROWING:
        if any(one.const_value is not None and (one.const_value.numpy() < 0).any() for one in reads):
            return False
    elif not operator.passes_sizes:
        return False
    elif node.op_type != "Concat":
        reads = reads[:1]
    return all(_holds_sizes(one, deepest - 1) for one in reads)


def _of_picked_sizes(rule: Rule, context: Any, node: ir.Node) -> None:
    """The rule of OneHot, corrected: it picks one of two sizes for each constant place, as torch writes repeats."""
    rule(context, node)
    places, depth, values = node.inputs[:3]
    picked = context.get_symbolic_value(values) if values is not None else None
    if places is None or depth is None or places.const_value is None or depth.const_value is None or not picked:
        return
    indices, count = places.const_value.numpy(), int(depth.const_value.numpy().item())
    if len(picked) == 2 and indices.size * count <= LONGEST:
        marked = marked_places(node, indices, count)
        context.set_symbolic_value(node.outputs[0], [picked[int(mark)] for mark in marked.flat])


def _of_certain_scales(rule: Rule, context: Any, node: ir.Node) -> None:
    """The rule of Resize or Upsample, corrected: a size is unknown where the precision of its scale decides it.

    Of 10 x 0.7 kernels make 7, in single precision, and the rule makes 6. By its own rule, which makes 6 too, ONNX
    Runtime folds a Shape of the result: whoever reads the size must get it from ONNX Runtime.
    """
    rule(context, node)
    data, made, place = node.inputs[0], node.outputs[0], 2 if node.op_type == "Resize" else 1
    scales = node.inputs[place] if len(node.inputs) == place + 1 else None
    if data is None or data.shape is None or made.shape is None or scales is None or scales.const_value is None:
        return
    axes = [axis % len(data.shape) for axis in node.attributes.get_ints("axes", range(len(data.shape)))]
    factors = dict(zip(axes, np.asarray(scales.const_value.numpy(), np.float32), strict=False))
    pairs = enumerate(zip(data.shape, made.shape, strict=True))
    sizes = [size if _is_certain(old, size, factors.get(axis)) else None for axis, (old, size) in pairs]
    made.shape = context.name_anonymous_dims_in_shape(ir.Shape(sizes))


def _is_certain(old: int | ir.SymbolicDim, size: int | ir.SymbolicDim, factor: np.float32 | None) -> bool:
    """Whether a kernel that multiplies in single precision makes an axis of this size."""
    return not isinstance(old, int) or factor is None or size == int(np.float32(old) * factor)


def _of_short_kernels(rule: Rule, context: Any, node: ir.Node) -> None:
    """The rule of ConvTranspose, corrected: with `auto_pad`, nothing pads what a kernel shorter than a stride leaves.

    ComputeTransposePadAndOutputShape in ONNX Runtime's core/providers/cpu/nn/conv_transpose_attributes.h.
    """
    rule(context, node)
    made, weight = node.outputs[0], node.inputs[1]
    if not node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME") or "output_shape" in node.attributes:
        return
    if made.shape is None or weight is None or weight.shape is None:
        return
    sizes = list(made.shape)
    kernel = node.attributes.get_ints("kernel_shape", list(weight.shape)[2:])
    ones = [1] * len(kernel)
    strides, dilations = (node.attributes.get_ints(name, ones) for name in ("strides", "dilations"))
    added = node.attributes.get_ints("output_padding", [0] * len(kernel))
    for axis, (length, stride, dilation, more) in enumerate(zip(kernel, strides, dilations, added, strict=True), 2):
        if isinstance(length, int):
            sizes[axis] = sizes[axis] - max(0, stride - more - (length - 1) * dilation - 1)
    made.shape = ir.Shape(sizes)


# The corrections of an operator's rule, in the order in which they are wrapped around it.
_CORRECTIONS: Mapping[str, Sequence[Callable[[Rule, Any, ir.Node], None]]] = {
    "Resize": [_of_certain_scales],
    "Upsample": [_of_certain_scales],
    "ConvTranspose": [_of_short_kernels],
    "ConstantOfShape": [_of_named_sizes],
    "Expand": [_of_kept_sizes],
    "Reshape": [_in_numbers],
    "OneHot": [_of_picked_sizes],
    "Where": [_of_compared_sizes],
    "Slice": [_not_beyond, _of_places],
    "ReduceProd": [_of_multiplied_sizes],
    "If": [_of_both_branches],
    "Loop": [_of_loops],
    "Split": [_of_given_sizes],
    "Concat": [_of_grouped_rows],
}


def corrected(domain: str, name: str, rule: Rule) -> Rule:
    """The library's rule of an operator, with its corrections."""
    for correction in () if domain else _CORRECTIONS.get(name, ()):
        rule = partial(correction, rule)
    return rule
