"""Checks the types of values that enter and leave ranks: tensors of types that the runtime has arrays for."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from splitc.compiler.errors import ModelError
from splitc.compiler.normal_form.graph import Graph
from splitc.runtime.arrays.onnx_types import KNOWN


def check_ends(graph: Graph) -> None:
    """Raise ModelError if ranks can't pass on an input or an output of the model."""
    check_passed("input", graph.graph.inputs)
    check_passed("output", graph.outputs)


def check_passed(place: str, values: Iterable[ir.Value]) -> None:
    """Raise ModelError if ranks can't pass on one of these values. `place` says what they are: "input", "output"."""
    for value in values:
        if (why := why_not_passed(value)) is not None:
            raise ModelError(f"the {place} '{value.name}' is {why}")


def why_not_passed(value: ir.Value) -> str | None:
    """What a value is that ranks can't pass on, and what to do; None if they can."""
    if not isinstance(value.type, ir.TensorType):
        kind = "an optional value" if isinstance(value.type, ir.OptionalType) else "a sequence"
        return f"{kind}, and splitc passes on only tensors. Export the model with tensors in its place"
    is_text = value.type.dtype == ir.DataType.STRING
    if not is_text and str(value.type.dtype.numpy()) in KNOWN:
        return None
    remedy = "Turn text into numbers outside of the model" if is_text else "Let the model begin and end with a Cast"
    return f"of type {value.type.dtype.name}, and splitc passes on only {', '.join(KNOWN)}. {remedy}"
