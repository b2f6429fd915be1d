"""Binds inputs to constants (`--set`), folds what depends on them alone, and removes branches and inputs left unused.

onnxscript's optimizer resolves If too, but not Where, and would be one more library to install.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from splitc.compiler.graphs.editor import add_initializer
from splitc.compiler.graphs.optional import defaults_hidden, optional_inputs, unmark
from splitc.compiler.graphs.unused import remove_unused, remove_unused_inputs
from splitc.compiler.inference.folding import fold_from, known_array, stand_in, take_branches
from splitc.compiler.inference.shapes import infer_shapes, sizes_of
from splitc.compiler.normal_form.constants import keep_folded
from splitc.compiler.normal_form.normalize import name_apart
from splitc.runtime.arrays.array import Array
from splitc.runtime.arrays.settings import setting_array
from splitc.runtime.errors import MisuseError


@dataclass(frozen=True)
class Fixed:
    """A removed input, with the value that it was bound to; None if it was removed because nothing reads it."""

    input: ir.Value
    value: Array | None


def bind_inputs(model: ir.Model, settings: Mapping[str, Any]) -> list[Fixed]:
    """Replace the inputs in `settings` by constants, in place, and fold what depends on them alone.

    Inputs that nothing reads afterwards are removed too. Returns all removed inputs. Raises MisuseError for an unknown
    input, or for a value that does not fit the input's type or shape.
    """
    graph = model.graph
    inputs = {value.name or "": value for value in (*graph.inputs, *optional_inputs(graph))}
    if unknown := [name for name in settings if name not in inputs]:
        raise MisuseError(f"--set names '{unknown[0]}', and the model has no such input: it has {', '.join(inputs)}")
    arrays = {name: _as_array(inputs[name], value) for name, value in settings.items()}
    used = [value for value in graph.inputs if value.uses()]
    known = {_make_constant(graph, inputs[name], array) for name, array in arrays.items()}
    with defaults_hidden(graph):
        while fold_from(graph, known) + take_branches(graph) + _take_choices(model):
            name_apart(model)  # two branches may have used one name
        keep_folded(graph, known)
    remove_unused(graph)
    bound = (Fixed(inputs[name], array) for name, array in arrays.items())
    return [*bound, *(Fixed(value, None) for value in remove_unused_inputs(graph, used))]


def _make_constant(graph: ir.Graph, value: ir.Value, array: Array) -> ir.Value:
    """Replace an input by an initializer, and return the initializer."""
    if value.is_initializer():  # an optional input
        unmark(value)
        del graph.initializers[value.name or ""]
    else:
        graph.inputs.remove(value)
    constant = add_initializer(graph, ir.tensor(array, name=value.name))
    value.replace_all_uses_with(constant, replace_graph_outputs=True)
    return constant


def _take_choices(model: ir.Model) -> int:
    """Replace each Where with a known condition of one element by the input that it selects. Returns their number.

    A Where broadcasts its inputs, so it stays if the other input may make the result larger. Shapes are inferred for
    that, since the file's own may be wrong.
    """
    conditions = {node: known_array(node.inputs[0]) for node in model.graph if node.op_type == "Where"}
    choices = {node: array.item() for node, array in conditions.items() if array is not None and array.size == 1}
    if not choices:
        return 0
    inferred = model.clone()
    infer_shapes(inferred)
    made = (value for node in inferred.graph for value in node.outputs)
    values = (*inferred.graph.inputs, *inferred.graph.initializers.values(), *made)
    shapes = {value.name: value.shape for value in values}
    count = 0
    for node, is_true in choices.items():
        condition, first, second = node.inputs
        taken, other = (first, second) if is_true else (second, first)
        assert condition is not None and taken is not None and other is not None
        if _keeps_shape(*(shapes.get(value.name) for value in (taken, other, condition))):
            stand_in(node, node.outputs[0], taken)
            model.graph.remove(node, safe=True)
            count += 1
    return count


def _keeps_shape(own: ir.Shape | None, *others: ir.Shape | None) -> bool:
    """Whether a shape stays the same when it is broadcast with the others."""
    if own is None or any(other is None or len(other) > len(own) for other in others):
        return False
    pairs = [pair for other in others for pair in zip(reversed(own), reversed(other or ()), strict=False)]
    return all(size == 1 or (size == mine and (isinstance(mine, int) or mine.value)) for mine, size in pairs)


def _as_array(value: ir.Value, given: Any) -> Array:
    """The value as an array of the input's type and shape."""
    dtype = str(value.dtype.numpy()) if value.dtype is not None else "float32"
    sizes = None if value.shape is None else sizes_of(value.shape)
    return setting_array(value.name or "", given, dtype, sizes)
