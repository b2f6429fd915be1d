"""onnx-shape-inference, imported in a way that works on Python 3.9 too.

Its versions up to 0.4.0 declare 3.9, but one module evaluates `object | None` when it is imported, which 3.9 can't.
While they are imported there, `object` is a class that can.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from typing import Any
from unittest import mock

import numpy as np  # noqa: F401  # what onnx-shape-inference imports should see the real object
import onnx_ir as ir  # noqa: F401


class _WithUnions(type):
    def __or__(cls, other: Any) -> Any:
        return cls


_STAND_IN = _WithUnions("object", (object,), {})

with mock.patch.object(builtins, "object", _STAND_IN) if sys.version_info < (3, 10) else contextlib.nullcontext():
    from onnx_shape_inference import OpUsageError, ShapeInferenceError, infer_symbolic_shapes, registry

    registry.collect()  # imports its rules, which it would do when first used

__all__ = ["OpUsageError", "ShapeInferenceError", "infer_symbolic_shapes"]
