"""Moves norms from single to half precision, between casts from and to half precision.

Diffusers norms in single precision. The operators compute in it anyway, and read and write halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.matching import is_onnx, value_before
from splitc.compiler.frontend.optional import source_of
from splitc.compiler.fusion.attention import NotFusedError
from splitc.compiler.fusion.norm import OPERATORS, cast_to_halves
from splitc.compiler.fusion.sizes import Sizes
from splitc.compiler.fusion.writing import Writer
from splitc.compiler.nodes import settings_of


@dataclass(frozen=True)
class Narrowed:
    """A `norm` of `data` in half precision, cast to single and back: `output` is the result in half precision."""

    norm: ir.Node
    data: ir.Value
    weights: tuple[ir.Value | None, ...]
    output: ir.Value


def find_narrowed(norm: ir.Node) -> Narrowed | None:
    """A norm between casts; None for any other node, and if its weights have more digits than halves."""
    if not is_onnx(norm, *OPERATORS) or any(value.uses() for value in norm.outputs[1:]):
        return None
    data, output = None if norm.inputs[0] is None else halves_of(norm.inputs[0]), cast_to_halves(norm.outputs[0])
    if data is None or output is None:
        return None
    given: Sequence[ir.Value | None] = norm.inputs[1:]
    if any(value is not None and halves_of(value) is None and not _is_exact(value) for value in given):
        return None
    return Narrowed(norm, data, tuple(given), output)


def halves_of(value: ir.Value) -> ir.Value | None:
    """The value in half precision that a value is cast from; None if it is not."""
    source = value_before(value, "Cast")
    return source if source is not None and source.dtype == ir.DataType.FLOAT16 else None


def _is_exact(value: ir.Value) -> bool:
    """Whether a weight has only numbers that halves have, and no request overrides it."""
    if value.const_value is None or source_of(value) is not None:
        return False
    numbers = value.const_value.numpy()
    with np.errstate(over="ignore"):
        return bool(np.array_equal(numbers.astype(np.float16).astype(numbers.dtype), numbers))


def write_narrowed(narrowed: Narrowed, editor: Editor, sizes: Sizes) -> None:
    """Replace the norm and its casts by the norm of halves, in place.

    Raises NotFusedError if sizes are not known.
    """
    norm, data, output = narrowed.norm, narrowed.data, narrowed.output
    axes = sizes.axes(data)
    if axes is None or sizes.axes(output) is None:
        raise NotFusedError("it has no known sizes")
    work = Writer.of(output, (), editor, sizes)
    weights = [value if value is None else _in_halves(value, editor) for value in narrowed.weights]
    made = work.add("norm", norm.op_type, [data, *weights], data, axes, **settings_of(norm))
    work.take_place(made, output)


def _in_halves(value: ir.Value, editor: Editor) -> ir.Value:
    """A weight in half precision."""
    source = halves_of(value)
    if source is not None:
        return source
    assert value.const_value is not None
    return editor.constant(value.const_value.numpy().astype(np.float16))
