"""Corrections of onnx-shape-inference's rules: functions that wrap a rule of the library."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from splitc.compiler.frontend.matching import made_by
from splitc.compiler.operators.row_groups import find_row_groups

Rule = Callable[[Any, ir.Node], None]
# Sizes of inputs, also multiplied and added. Numbers that inference names itself (_d0) may be anything.
NOT_NEGATIVE = re.compile(r"(?!.*\b_d\d)[\w\s*/+(),]+")


def _not_beyond(rule: Rule) -> Rule:
    """The rule of Slice, corrected: a constant end may lie beyond the end of a dynamic axis."""

    def infer(context: Any, node: ir.Node) -> None:
        rule(context, node)
        data, output = node.inputs[0], node.outputs[0]
        if data is None or data.shape is None or output.shape is None:
            return
        pairs = list(zip(data.shape, output.shape, strict=True))
        if any(isinstance(size, ir.SymbolicDim) and isinstance(cut, int) and cut > 1 for size, cut in pairs):
            sizes = [_least(size, cut) for size, cut in pairs]
            output.shape = context.name_anonymous_dims_in_shape(ir.Shape(sizes))

    return infer


def _of_both_branches(rule: Rule) -> Rule:
    """The rule of If, corrected: a result has no shape if that of either branch is unknown."""

    def infer(context: Any, node: ir.Node) -> None:
        rule(context, node)
        branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
        for number, value in enumerate(node.outputs):
            if any(branch.outputs[number].shape is None for branch in branches):
                value.shape = None

    return infer


def _of_given_sizes(rule: Rule) -> Rule:
    """The rule of Split, corrected: parts whose lengths are computed are not taken for equal ones."""

    def infer(context: Any, node: ir.Node) -> None:
        rule(context, node)
        data, lengths = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
        if lengths is None or lengths.const_value is not None or data is None or data.shape is None:
            return
        known = context.get_symbolic_value(lengths) or [None] * len(node.outputs)
        for value, length in zip(node.outputs, known, strict=True):
            sizes = list(data.shape)
            sizes[node.attributes.get_int("axis", 0)] = length
            value.shape = context.name_anonymous_dims_in_shape(ir.Shape(sizes))

    return infer


def _of_grouped_rows(rule: Rule) -> Rule:
    """The rule of Concat, corrected: products of grouped rows have as many rows as there are.

    The rule itself would name their sum by all of them, which takes a second for 128.
    """

    def infer(context: Any, node: ir.Node) -> None:
        first, groups = node.inputs[0], find_row_groups(node)
        if groups is None or groups.rows.shape is None or first is None or first.shape is None:
            rule(context, node)
        else:
            shape = ir.Shape([groups.rows.shape[0], *list(first.shape)[1:]])
            context.set_shape_and_dtype(node.outputs[0], shape, first.dtype)

    return infer


def _of_named_sizes(rule: Rule) -> Rule:
    """The rule of ConstantOfShape, corrected: it also takes symbolic sizes."""

    def infer(context: Any, node: ir.Node) -> None:
        rule(context, node)
        sizes, made = context.get_symbolic_value(node.inputs[0]), node.outputs[0]
        if made.shape is None and sizes is not None:
            context.set_shape(made, ir.Shape(list(sizes)))

    return infer


def _in_numbers(rule: Rule) -> Rule:
    """The rule of Reshape, corrected: a size -1 that is the same for all inputs is a number, not the symbol "32"."""

    def infer(context: Any, node: ir.Node) -> None:
        rule(context, node)
        made = node.outputs[0]
        sizes = [_in_digits(size) for size in made.shape or ()]
        if made.shape is not None and sizes != list(made.shape):
            made.shape = ir.Shape(sizes)

    return infer


def _in_digits(size: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    """A size as a number, if its symbol is one."""
    text = "" if isinstance(size, int) or size.value is None else size.value
    return int(text) if text.isdecimal() else size


def _of_compared_sizes(rule: Rule) -> Rule:
    """The rule of Where, corrected: sizes are no negative numbers.

    torch's older exporter replaces -1 in the target of each Expand: Where(Equal(sizes, -1), ones, sizes).
    """

    def infer(context: Any, node: ir.Node) -> None:
        rule(context, node)
        equal = made_by(node.inputs[0], "Equal")
        reads = [*(equal.inputs if equal is not None else ()), *node.inputs[1:]]
        known: list[Any] = [None if value is None else context.get_symbolic_value(value) for value in reads]
        lists = [entries for entries in known if entries is not None]
        if len(lists) < 4 or len(set(map(len, lists))) > 1:
            return
        chosen = [
            None if (same := _are_same(a, b)) is None else (x if same else y) for a, b, x, y in zip(*lists, strict=True)
        ]
        if None not in chosen:
            context.set_symbolic_value(node.outputs[0], chosen)

    return infer


def _are_same(one: int | ir.SymbolicDim, other: int | ir.SymbolicDim) -> bool | None:
    """Whether two entries of lists of sizes are the same; None if that is not known."""
    if one == other or (isinstance(one, int) and isinstance(other, int)):
        return one == other
    size, number = (other, one) if isinstance(one, int) else (one, other)
    is_positive = isinstance(size, ir.SymbolicDim) and NOT_NEGATIVE.fullmatch(size.value or "")
    return False if is_positive and isinstance(number, int) and number < 0 else None


CORRECTED = {
    ("", "ConstantOfShape"): _of_named_sizes,
    ("", "Reshape"): _in_numbers,
    ("", "Where"): _of_compared_sizes,
    ("", "Slice"): _not_beyond,
    ("", "If"): _of_both_branches,
    ("", "Split"): _of_given_sizes,
    ("", "Concat"): _of_grouped_rows,
}


def _least(size: int | ir.SymbolicDim, cut: int | ir.SymbolicDim) -> int | ir.SymbolicDim | None:
    """The size of a sliced axis: `cut`, or less if the axis is shorter. (At least 1 unless it is empty.)"""
    if isinstance(size, int) or not isinstance(cut, int) or cut <= 1:
        return cut
    return ir.SymbolicDim(f"Min({size.value}, {cut})") if size.value and size.value.isidentifier() else None
