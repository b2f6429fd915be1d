"""Symbolic shape inference by onnx-shape-inference, which goes on where one node defeats it, and imports on Python 3.9.

Its versions up to 0.4.0 declare 3.9, but one module evaluates `object | None` when it is imported, which 3.9 can't.
While they are imported there, `object` is a class that can.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import sys
from typing import Any, Callable, Optional
from unittest import mock

import numpy as np  # noqa: F401  # what onnx-shape-inference imports should see the real object
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

logger = logging.getLogger(__name__)


class _WithUnions(type):
    def __or__(cls, other: Any) -> Any:
        return cls


_STAND_IN = _WithUnions("object", (object,), {})

with mock.patch.object(builtins, "object", _STAND_IN) if sys.version_info < (3, 10) else contextlib.nullcontext():
    from onnx_shape_inference import OpUsageError, ShapeInferenceError, infer_symbolic_shapes, registry

    registry.collect()  # imports its rules, which it would do when first used

Rule = Callable[[Any, ir.Node], None]


def infer_shapes_and_types(model: ir.Model) -> None:
    """Give values the shapes and types that follow from the inputs, in place; what can't be found stays unknown."""
    find_rule = registry.get
    with mock.patch.object(registry, "get", lambda *args, **kwargs: _forgiving(find_rule(*args, **kwargs))):
        infer_symbolic_shapes(model, warn_on_missing=False)
    if any(value.dtype is None for node in model.graph for value in node.outputs if value.name):
        _add_types(model)


def _forgiving(rule: Optional[Rule]) -> Optional[Rule]:
    """The rule of an operator, such that a node that it can't make sense of is left unknown instead of ending it all.

    That may be a branch that is invalid with the sizes at hand, or a use of the operator that the rule does not know.
    """
    if rule is None:
        return None

    def infer(context: Any, node: ir.Node) -> None:
        try:
            rule(context, node)
        except (OpUsageError, ShapeInferenceError, ValueError, TypeError, IndexError, KeyError) as error:
            logger.info("no shape for %s node '%s': %s", node.op_type, node.name, error)

    return infer


def _add_types(model: ir.Model) -> None:
    """Types from ONNX's own inference for the values that have none."""
    inferred = ShapeInferencePass()(model.clone()).model
    types = {value.name: value.type for node in inferred.graph for value in node.outputs}
    for value in (value for node in model.graph for value in node.outputs):
        if value.dtype is None:
            value.type = types.get(value.name)
