"""Symbolic shape inference by onnx-shape-inference, which continues if it fails for a node."""

from __future__ import annotations

import logging
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass
from onnx_shape_inference import OpUsageError, ShapeInferenceError, infer_symbolic_shapes, registry

from splitc.compiler.frontend.forms import Rule, once_a_form
from splitc.compiler.frontend.observation import observe
from splitc.compiler.nodes import operator_name
from splitc.compiler.operators.registry import REGISTRY

logger = logging.getLogger(__name__)

# The types of values whose type is not known.
UNKNOWN = (None, ir.DataType.UNDEFINED)
# The metadata key of nodes whose shapes were observed, of each form one.
_OBSERVED = "splitc.observed"


def infer_shapes_and_types(model: ir.Model) -> frozenset[str]:
    """Set the shapes and types that follow from the inputs, in place. What can't be inferred stays unknown.

    Returns the operators whose shapes were observed in ONNX Runtime, since there is no rule for them or it failed.
    """
    nodes = list(model.graph.all_nodes())
    for node in nodes:
        node.meta.pop(_OBSERVED, None)
    for domain, name in {(node.domain, node.op_type) for node in nodes}:
        _register_missing(domain, name, model.opset_imports.get(domain, 1))
    infer_symbolic_shapes(model, warn_on_missing=False)
    if any(value.dtype in UNKNOWN for node in model.graph for value in node.outputs if value.name):
        _add_types(model)
    return frozenset(operator_name(node) for node in nodes if _OBSERVED in node.meta)


def _register_missing(domain: str, name: str, version: int) -> None:
    """Register a rule for an operator if the library has none for this version."""
    if registry.get(domain, name, version) is not None:
        return
    rule = None
    if domain in ("", "ai.onnx"):
        if _is_defined(name, version):
            return  # it is a function of other operators, and inferred through them
        # ONNX Runtime had some operators before ONNX did, such as LayerNormalization.
        rule = registry.get(domain, name, onnx.defs.onnx_opset_version())
    registry.register(domain, name, version)(_forgiving(rule))


def _is_defined(operator: str, version: int) -> bool:
    """Whether ONNX defines the operator in this opset version."""
    try:
        onnx.defs.get_schema(operator, version)
    except onnx.defs.SchemaError:
        return False
    return True


def _forgiving(rule: Rule | None) -> Rule:
    """Wrap a rule so that a node for which it fails is observed, or left unknown.

    A rule fails for a branch that is invalid with these sizes, or for a form of the operator that it does not know.
    """

    @once_a_form
    def infer(context: Any, node: ir.Node) -> None:
        if rule is not None:
            try:
                rule(context, node)
                return
            except (OpUsageError, ShapeInferenceError, ValueError, TypeError, IndexError, KeyError) as error:
                logger.info("no shape for %s node '%s': %s", node.op_type, node.name, error)
        made = observe(node)
        if made is not None:
            node.meta[_OBSERVED] = True
            values = (value for value in node.outputs if value.name)
            for value, (shape, dtype) in zip(values, made, strict=True):
                context.set_shape_and_dtype(value, context.name_anonymous_dims_in_shape(ir.Shape(shape)), dtype)

    return infer


def _add_types(model: ir.Model) -> None:
    """Set types that are missing, by ONNX's own inference."""
    inferred = ShapeInferencePass()(model.clone()).model
    types = {value.name: value.type for node in inferred.graph for value in node.outputs}
    for value in (value for node in model.graph for value in node.outputs):
        if value.dtype in UNKNOWN:
            value.type = types.get(value.name)
        if value.dtype in UNKNOWN:  # the file may say so too
            value.type = None


def _complete_library() -> None:
    """Register the missing shape functions, and wrap all rules to be forgiving. A later registration replaces one."""
    for operator in REGISTRY.values():
        domain, _, name = operator.name.rpartition(".")
        if operator.shapes is not None and not registry.has(domain, name):
            registry.register(domain, name)(operator.shapes)
    for domain, name, versions in list(registry.iter_supported()):
        for version in versions:
            registry.register(domain, name, version)(_forgiving(registry.get(domain, name, version)))


_complete_library()
