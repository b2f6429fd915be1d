"""Symbolic shape inference by onnx-shape-inference, with corrected rules, and ONNX Runtime where a rule fails."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
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

from splitc.compiler.graphs.reads import all_nodes
from splitc.compiler.inference.corrected_rules import Rule, corrected
from splitc.compiler.inference.folding import fold
from splitc.compiler.inference.observation import MOST_SIZES, observe
from splitc.compiler.nodes import operator_name
from splitc.compiler.operators.registry import REGISTRY

logger = logging.getLogger(__name__)

# The dtypes of values of unknown type.
UNKNOWN = (None, ir.DataType.UNDEFINED)
# The shapes that ONNX's own inference finds, by the names of values.
Shapes = Mapping[str | None, ir.Shape]
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
    for value in (value for node in nodes for value in node.outputs if value.dtype in UNKNOWN):
        value.type = None  # no file can hold a sequence of unknown elements
    if any(value.type is None for node in model.graph for value in node.outputs if value.name):
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
        shapes = inner_shapes(model)
        counts |= {value: len(shapes[value.name]) for value in values if value not in counts and value.name in shapes}
    return counts


def _with_constants_inside(model: ir.Model) -> ir.Model:
    """Copy short constants into the subgraphs that read them, in place.

    ONNX's own inference evaluates sizes that are computed in a subgraph, but does not see constants outside it. A copy
    must not have the name of any value outside, whose shape would contradict its own.
    """
    for place, node in enumerate(list(all_nodes(model.graph))):
        if node.graph is model.graph or node.graph is None:
            continue
        for number, value in enumerate(node.inputs):
            if value is None or value.graph is node.graph or value.const_value is None:
                continue
            if value.const_value.size <= MOST_SIZES:
                constant = ir.node("Constant", [], {"value": value.const_value})
                constant.outputs[0].name = f"{value.name}/inside{place}.{number}"
                node.prepend(constant)
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


def shapes_by_onnx(model: ir.Model) -> Shapes:
    """The shapes of values by name, as far as ONNX's own inference finds them without those of dynamic inputs."""
    graph = inferred_by_onnx(model.clone()).graph
    values = chain(graph.inputs, graph.initializers.values(), (value for node in graph for value in node.outputs))
    return {value.name: value.shape for value in values if value.shape is not None}


def inner_shapes(model: ir.Model) -> Shapes:
    """The shapes of computed values by name, as by `shapes_by_onnx`, also of those in subgraphs."""
    nodes = all_nodes(inferred_by_onnx(_with_constants_inside(model.clone())).graph)
    return {value.name: value.shape for node in nodes for value in node.outputs if value.shape is not None}


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


def _own_registry() -> OpShapeInferenceRegistry:
    """The library's rules, or the operators' own shape functions where they have one, all wrapped by `_forgiving`."""
    rules = OpShapeInferenceRegistry()
    registry.collect()
    own = {operator.name for operator in REGISTRY.values() if operator.shapes is not None}
    for domain, name, versions in registry.iter_supported():
        for version in versions if (f"{domain}.{name}" if domain else name) not in own else ():
            rule = corrected(domain, name, registry.get(domain, name, version))
            rules.register(domain, name, version)(_forgiving(rule))
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
