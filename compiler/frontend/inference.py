"""Symbolic shape inference by onnx-shape-inference, with corrected rules, and ONNX Runtime where a rule fails."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import chain
from threading import RLock
from typing import Any

import onnx
import onnx.shape_inference
import onnx_ir as ir
import sympy
from onnx_shape_inference import (
    OpShapeInferenceRegistry,
    ShapeInferenceContext,
    _constraints,
    _registry,
    infer_symbolic_shapes,
    registry,
)

from splitc.compiler.frontend.folding import fold
from splitc.compiler.frontend.matching import made_by
from splitc.compiler.frontend.observation import MOST_SIZES, observe
from splitc.compiler.frontend.reads import all_nodes
from splitc.compiler.nodes import operator_name
from splitc.compiler.operators.registry import REGISTRY
from splitc.compiler.operators.row_groups import find_row_groups

logger = logging.getLogger(__name__)

# The dtypes of values of unknown type.
UNKNOWN = (None, ir.DataType.UNDEFINED)
# Sizes of inputs, also multiplied and added. Numbers that inference names itself (_d0) may be anything.
NOT_NEGATIVE = re.compile(r"(?!.*\b_d\d)[\w\s*/+(),]+")
Rule = Callable[[Any, ir.Node], None]
_observed: ContextVar[set[str]] = ContextVar("splitc.observed")


def infer_shapes_and_types(model: ir.Model, folds: bool = False) -> frozenset[str]:
    """Infer shapes and types from those of the inputs, in place. What can't be inferred stays unknown.

    If `folds`, shape arithmetic is folded during inference where possible, so that its readers' shapes are known at
    once. Returns the operators that had to be run in ONNX Runtime, since they have no rule or the rule failed.
    """
    observed: set[str] = set()
    _observed.set(observed)
    nodes = list(all_nodes(model.graph))
    operators = {(node.domain, node.op_type) for node in nodes}
    with _lock:  # a list of rules can't be read while another thread adds one
        rules = {
            (domain, name): _find_rule(domain, name, model.opset_imports.get(domain, 1)) for domain, name in operators
        }
    present = {operator: rule for operator, rule in rules.items() if rule is not None}
    if len(nodes) > len(model.graph) or len(present) < len(rules):
        _infer_by_library(model)
    else:
        _infer_in_order(model, nodes, present, folds)
    if any(value.dtype in UNKNOWN for node in model.graph for value in node.outputs if value.name):
        add_types(model)
    return frozenset(observed)


def _infer_by_library(model: ir.Model) -> None:
    """Infer by the library's own loop, which covers subgraphs and operators' function bodies too.

    Its last step, which relates symbols, can't parse some expressions of its own (ceiling). All shapes are set by then.
    """
    with _own_rules(), suppress(ValueError):
        infer_symbolic_shapes(model, warn_on_missing=False)


def _infer_in_order(
    model: ir.Model, nodes: Sequence[ir.Node], rules: Mapping[tuple[str, str], Rule], folds: bool
) -> None:
    """As `_infer_by_library`, for a model that has no subgraphs, and rules for all operators.

    It takes a fraction of the time, and may fold on the way.
    """
    for value in model.graph.initializers.values():
        if value.const_value is not None and value.shape != value.const_value.shape:
            value.shape = ir.Shape(value.const_value.shape.numpy())
    sizes = chain.from_iterable(value.shape or () for value in model.graph.inputs)
    context = ShapeInferenceContext(model.opset_imports)
    # By their words, unparsed: a file's sizes may be no expressions, or take for ever to evaluate.
    context.reserve_symbol_names(word for size in sizes for word in re.findall(r"\w+", str(size)))
    for value in model.graph.inputs:
        context.name_anonymous_dims(value)
    for node in nodes:
        if folds and fold(node):  # some rules, such as Where's, create symbols even for known values
            continue
        rules[node.domain, node.op_type](context, node)
    if context.generated_dim_names:
        with _own_rules(), suppress(ValueError):
            _constraints.record_reshape_numel_equalities(context, model.graph)
            _constraints.propagate_symbolic_constraints(context, model.graph)


def _find_rule(domain: str, name: str, version: int) -> Rule | None:
    """The rule of an operator; None if ONNX defines it as a function of other operators, whose rules are used instead.

    If the library has no rule for this version, one is registered.
    """
    registered: Rule | None = RULES.get(domain, name, version)
    if registered is not None:
        return registered
    rule = None
    if domain in ("", "ai.onnx"):
        if _is_function(name, version):
            return None
        # ONNX Runtime had some operators before ONNX did, such as LayerNormalization.
        rule = registry.get(domain, name, onnx.defs.onnx_opset_version())
    forgiving = _forgiving(rule)
    RULES.register(domain, name, version)(forgiving)
    return forgiving


def _is_function(operator: str, version: int) -> bool:
    """Whether ONNX defines the operator as a function in this opset version. (The oldest versions have no bodies.)"""
    try:
        schema: Any = onnx.defs.get_schema(operator, version)  # the library's stubs lack these attributes
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _forgiving(rule: Rule | None) -> Rule:
    """Wrap a rule: if it fails, the node is run in ONNX Runtime (`observe`), or its shapes stay unknown.

    A rule fails in a branch that is invalid with these sizes, or for a form of the operator that it does not cover.
    """

    def infer_one(context: Any, node: ir.Node) -> None:
        if rule is not None:
            try:
                rule(context, node)
                return
            except Exception as error:  # the library's loop, too, takes any error of a rule for one of its own
                logger.info("no shape for %s node '%s': %s", node.op_type, node.name, error)
        made = observe(node)
        if made is not None:
            _observed.get().add(operator_name(node))
            values = (value for value in node.outputs if value.name)
            for value, (shape, dtype) in zip(values, made, strict=True):
                context.set_shape_and_dtype(value, context.name_anonymous_dims_in_shape(ir.Shape(shape)), dtype)

    def infer(context: Any, node: ir.Node) -> None:
        infer_one(context, node)
        for value in node.outputs:
            _tell_bodies(value)

    return infer


def _tell_bodies(value: ir.Value) -> None:
    """Set the type of a value that is a sequence, or optional, in the bodies of loops that carry it.

    The library would take it for a tensor there, since it passes on only the type of elements.
    """
    if value.type is None or isinstance(value.type, ir.TensorType):
        return
    for node, number in value.uses():
        body = node.attributes.get("body")
        if node.op_type == "Loop" and node.domain in ("", "ai.onnx") and body is not None:
            carried = body.as_graph().inputs[number]
            if carried.type is None:
                carried.type = value.type
                _tell_bodies(carried)


def count_axes(model: ir.Model) -> dict[ir.Value, int]:
    """The number of axes of each input and computed value, from its shape, or else by ONNX's own inference.

    ONNX's inference finds fewer sizes, but handles the bodies of Scan, and shapes that the graph computes.
    """
    values = [*model.graph.inputs, *(value for node in model.graph for value in node.outputs if value.name)]
    counts = {value: len(value.shape) for value in values if value.shape is not None}
    if len(counts) < len(values):
        inferred = inferred_by_onnx(_with_constants_inside(model.clone()))
        shapes = {value.name: value.shape for node in inferred.graph for value in node.outputs}
        others = ((value, shapes.get(value.name)) for value in values if value not in counts)
        counts.update({value: len(shape) for value, shape in others if shape is not None})
    return counts


def _with_constants_inside(model: ir.Model) -> ir.Model:
    """Copy short constants into the subgraphs that read them, in place.

    ONNX's own inference evaluates sizes that are computed in a subgraph, but does not see constants outside it.
    """
    for node in all_nodes(model.graph):
        if node.graph is model.graph or node.graph is None:
            continue
        for number, value in enumerate(node.inputs):
            if value is None or value.graph is node.graph or value.const_value is None:
                continue
            if value.const_value.size <= MOST_SIZES:
                constant = ir.node("Constant", [], {"value": value.const_value})
                node.graph.insert_before(node, constant)
                node.replace_input_with(number, constant.outputs[0])
    return model


def add_types(model: ir.Model) -> None:
    """Set missing types, by ONNX's own inference."""
    types = {value.name: value.type for node in inferred_by_onnx(model.clone()).graph for value in node.outputs}
    for value in (value for node in model.graph for value in node.outputs):
        if value.dtype in UNKNOWN:
            value.type = types.get(value.name)
        if value.dtype in UNKNOWN:  # the file may declare UNDEFINED
            value.type = None


def shapes_by_onnx(model: ir.Model) -> dict[str | None, ir.Shape]:
    """The shapes of values by name, as far as ONNX's own inference finds them without those of dynamic inputs."""
    graph = inferred_by_onnx(model.clone()).graph
    values = chain(graph.inputs, graph.initializers.values(), (value for node in graph for value in node.outputs))
    return {value.name: value.shape for value in values if value.shape is not None}


def inferred_by_onnx(model: ir.Model) -> ir.Model:
    """The model with the shapes and types of ONNX's own inference. The argument is changed: long weights become inputs.

    onnx_ir's pass would take a sequence for a tensor. A model that ONNX considers invalid is returned without them.
    """
    for value in tuple(model.graph.initializers.values()):
        if value.const_value is not None and value.const_value.size > MOST_SIZES:
            value.shape, value.dtype = ir.Shape(value.const_value.shape.numpy()), value.const_value.dtype
            del model.graph.initializers[value.name or ""]
            if not value.is_graph_input():
                model.graph.inputs.append(value)
    for value in (value for node in all_nodes(model.graph) for value in node.outputs if value.type is None):
        value.shape = None  # a file has no shapes without types
    with suppress(onnx.shape_inference.InferenceError):
        return ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(model), data_prop=True))
    return model


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
        shape = node.outputs[0].shape
        texts = [None if size is None or isinstance(size, int) else size.value for size in shape or ()]
        if shape is not None and any(text and text.isdecimal() for text in texts):
            pairs = zip(shape, texts, strict=True)
            node.outputs[0].shape = ir.Shape([int(text) if text and text.isdecimal() else size for size, text in pairs])

    return infer


def _of_compared_sizes(rule: Rule) -> Rule:
    """The rule of Where, corrected: sizes are no negative numbers.

    torch's older exporter replaces -1 in the target of each Expand: Where(Equal(sizes, -1), ones, sizes).
    """

    def infer(context: Any, node: ir.Node) -> None:
        rule(context, node)
        equal = made_by(node.inputs[0], "Equal")
        one, other, *choices = (
            None if value is None else context.get_symbolic_value(value)
            for value in (*(equal.inputs if equal is not None else (None, None)), *node.inputs[1:])
        )
        if one is None or other is None or None in choices or len({len(one), len(other), *map(len, choices)}) > 1:
            return
        chosen = [
            None if (same := _are_same(a, b)) is None else (x if same else y)
            for a, b, x, y in zip(one, other, *choices, strict=True)
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


def _own_registry() -> OpShapeInferenceRegistry:
    """The library's rules, or the operators' own shape functions where they have one, all wrapped by `_forgiving`."""
    rules = OpShapeInferenceRegistry()
    registry.collect()
    own = {operator.name for operator in REGISTRY.values() if operator.shapes is not None}
    for domain, name, versions in registry.iter_supported():
        for version in versions if (f"{domain}.{name}" if domain else name) not in own else ():
            rule = registry.get(domain, name, version)
            corrected = CORRECTED.get((domain, name))
            rules.register(domain, name, version)(_forgiving(corrected(rule) if corrected else rule))
    for operator in REGISTRY.values():
        domain, _, name = operator.name.rpartition(".")
        if operator.shapes is not None:
            rules.register(domain, name)(_forgiving(operator.shapes))
    return rules


def _without_common_factor(one: sympy.Expr, other: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Two expressions of the same number, divided by their common factors. Replaces a function of the library.

    The library's also simplifies the quotients by sympy, which takes up to a second for the windows of an image with
    dynamic sides. Cancelling suffices, and takes a twentieth of the time.
    """
    try:
        factor = sympy.gcd(one, other)
        if factor in (0, 1):
            return one, other
        return sympy.cancel(one / factor), sympy.cancel(other / factor)
    except sympy.PolynomialError:
        return one, other


@contextmanager
def _own_rules() -> Iterator[None]:
    """Make the library infer by the rules of RULES inside the context."""
    with _lock:
        theirs = _constraints._reduce_common_factor
        _registry.registry, _constraints._reduce_common_factor = RULES, _without_common_factor
        try:
            yield
        finally:
            _registry.registry, _constraints._reduce_common_factor = registry, theirs


RULES = _own_registry()
# Held while RULES is read or changed.
_lock = RLock()
