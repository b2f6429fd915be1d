"""Checks the types of values that enter and leave ranks."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from splitc.compiler.errors import ModelError
from splitc.compiler.frontend.graph import Graph
from splitc.compiler.planning.rank_plan import CutPlan
from splitc.runtime.arrays.onnx_types import KNOWN


def check_types(graph: Graph, cuts: Sequence[CutPlan]) -> None:
    """Raise ModelError if an input, an output or a value that crosses a cut has a type that can't be passed on."""
    places = {"input": graph.graph.inputs, "output": graph.outputs}
    crossing = (value for cut in cuts for value in cut.values)
    for place, values in {**places, "value that crosses a cut": crossing}.items():
        for value in values:
            _check_type(place, value)


def _check_type(place: str, value: ir.Value) -> None:
    if not isinstance(value.type, ir.TensorType):
        raise ModelError(f"the {place} '{value.name}' is a {value.type}, and splitc passes on only tensors")
    is_text = value.type.dtype == ir.DataType.STRING
    if is_text or str(value.type.dtype.numpy()) not in KNOWN:
        remedy = "Turn text into numbers outside of the model" if is_text else "Let the model begin and end with a Cast"
        raise ModelError(
            f"the {place} '{value.name}' is of type {value.type.dtype.name}, and splitc passes on only "
            f"{', '.join(KNOWN)}. {remedy}"
        )
