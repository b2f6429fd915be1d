"""Symbolic shape inference by onnx-shape-inference, which goes on where one node defeats it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass
from onnx_shape_inference import OpUsageError, ShapeInferenceError, infer_symbolic_shapes, registry

from splitc.compiler.frontend.observation import observe
from splitc.compiler.nodes import operator_name
from splitc.compiler.operators.registry import REGISTRY

logger = logging.getLogger(__name__)


registry.collect()  # imports its rules, which it would do when first used
for _operator in REGISTRY.values():
    _domain, _, _name = _operator.name.rpartition(".")
    if _operator.shapes is not None and not registry.has(_domain, _name):
        registry.register(_domain, _name)(_operator.shapes)

Rule = Callable[[Any, ir.Node], None]


def infer_shapes_and_types(model: ir.Model) -> frozenset[str]:
    """Give values the shapes and types that follow from the inputs, in place; what can't be found stays unknown.

    Returns the operators of which ONNX Runtime was asked, since no rule for them is known, or theirs did not do.
    """
    find_rule = registry.get
    observed: set[str] = set()

    def find(domain: str, operator: str, version: int) -> Rule | None:
        rule = find_rule(domain, operator, version)
        if rule is None and domain in ("", "ai.onnx"):
            if _is_defined(operator, version):
                return None  # by other operators, and inferred by these
            # ONNX Runtime had some operators, LayerNormalization for one, before ONNX did.
            rule = find_rule(domain, operator, onnx.defs.onnx_opset_version())
        return _forgiving(rule, observed)

    with mock.patch.object(registry, "get", find):
        infer_symbolic_shapes(model, warn_on_missing=False)
    if any(value.dtype is None for node in model.graph for value in node.outputs if value.name):
        _add_types(model)
    return frozenset(observed)


def _is_defined(operator: str, version: int) -> bool:
    """Whether ONNX has an operator in that version of it."""
    try:
        onnx.defs.get_schema(operator, version)
    except onnx.defs.SchemaError:
        return False
    return True


def _forgiving(rule: Rule | None, observed: set[str]) -> Rule:
    """The rule of an operator, such that a node that it can't make sense of is observed, or left unknown.

    That may be a branch that is invalid with the sizes at hand, or a use of the operator that the rule does not know.
    Operators that are observed are added to `observed`.
    """

    def infer(context: Any, node: ir.Node) -> None:
        if rule is not None:
            try:
                rule(context, node)
                return
            except (OpUsageError, ShapeInferenceError, ValueError, TypeError, IndexError, KeyError) as error:
                logger.info("no shape for %s node '%s': %s", node.op_type, node.name, error)
        made = observe(node)
        if made is not None:
            observed.add(operator_name(node))
            for value, (shape, dtype) in zip((value for value in node.outputs if value.name), made):
                context.set_shape_and_dtype(value, context.name_anonymous_dims_in_shape(ir.Shape(shape)), dtype)

    return infer


def _add_types(model: ir.Model) -> None:
    """Types from ONNX's own inference for the values that have none."""
    inferred = ShapeInferencePass()(model.clone()).model
    types = {value.name: value.type for node in inferred.graph for value in node.outputs}
    for value in (value for node in model.graph for value in node.outputs):
        if value.dtype is None:
            value.type = types.get(value.name)
