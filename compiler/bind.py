"""Inputs that are bound to constants (`--set`), and what follows from that: branches, choices, inputs left unused."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Optional

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common as passes

from splitc.compiler.fold import fold_from, known_array, stand_in, take_branches
from splitc.compiler.shapes import infer_shapes
from splitc.runtime.errors import MisuseError

Array = npt.NDArray[Any]


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Values from `NAME=true`, `NAME=16000` or `NAME=[1,2]`. Raises MisuseError for what is none of these."""
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            settings[name] = json.loads(value if value not in ("True", "False") else value.lower())
        except ValueError:
            equals = ""
        if not name or not equals:
            raise MisuseError(f"can't read --set {text}: write NAME=VALUE, with true, false, a number, or [1,2,3]")
    return settings


def bind_inputs(model: ir.Model, settings: Mapping[str, Any]) -> dict[str, Array]:
    """Make constants of the inputs in `settings`, in place, and fold what follows from them. Returns their values.

    Inputs that nothing reads any more then are taken off as well. Raises MisuseError for an input that the model does
    not have, or a value that it does not take.
    """
    graph = model.graph
    inputs = {value.name or "": value for value in graph.inputs}
    if unknown := [name for name in settings if name not in inputs]:
        raise MisuseError(f"--set names '{unknown[0]}', and the model has no such input: it has {', '.join(inputs)}")
    arrays = {name: _as_array(inputs[name], value) for name, value in settings.items()}
    used = [value for value in graph.inputs if value.uses()]
    for name, array in arrays.items():
        graph.inputs.remove(inputs[name])
        _make_initializer(graph, inputs[name], array)
    known = {inputs[name] for name in arrays}
    while fold_from(graph, known) + take_branches(graph) + _take_choices(model):
        passes.NameFixPass()(model)  # two branches may have used one name
    _keep_folded(graph, known)
    passes.RemoveUnusedNodesPass()(model)
    for value in used:
        if value.is_graph_input() and not value.uses() and not value.is_graph_output():
            graph.inputs.remove(value)
    return arrays


def _make_initializer(graph: ir.Graph, value: ir.Value, array: Array) -> None:
    value.const_value = ir.tensor(array, name=value.name)
    value.shape, value.type = ir.Shape(array.shape), ir.TensorType(value.const_value.dtype)
    graph.register_initializer(value)


def _keep_folded(graph: ir.Graph, known: Collection[ir.Value]) -> None:
    """Put initializers in the place of what was found to be constant."""
    for node in [node for node in graph if node.outputs and all(value in known for value in node.outputs)]:
        for old in node.outputs:
            array = known_array(old)
            assert array is not None
            new = ir.Value(name=old.name)
            old.name = None
            _make_initializer(graph, new, array)
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        graph.remove(node, safe=True)


def _take_choices(model: ir.Model) -> int:
    """Hand on what each Where takes whose condition is one known truth value. Returns how many.

    The result has the shape of both together, so the other one must be known not to make it larger: by inference, as
    what the file says of shapes may be wrong.
    """
    found = [node for node in model.graph if node.op_type == "Where" and _is_known_choice(node)]
    if not found:
        return 0
    inferred = model.clone()
    infer_shapes(inferred)
    values = (*inferred.graph.inputs, *inferred.graph.initializers.values(), *(v for n in inferred.graph for v in n.outputs))
    shapes = {value.name: value.shape for value in values}
    count = 0
    for node in found:
        condition, first, second = node.inputs
        taken, other = (first, second) if _truth(condition) else (second, first)
        assert condition is not None and taken is not None and other is not None
        if _keeps_shape(*(shapes.get(value.name) for value in (taken, other, condition))):
            stand_in(node, node.outputs[0], taken)
            model.graph.remove(node, safe=True)
            count += 1
    return count


def _is_known_choice(node: ir.Node) -> bool:
    array = known_array(node.inputs[0])
    return array is not None and array.size == 1


def _truth(value: Optional[ir.Value]) -> bool:
    array = known_array(value)
    return array is not None and bool(array.item())


def _keeps_shape(own: Optional[ir.Shape], *others: Optional[ir.Shape]) -> bool:
    """Whether a value has the same shape when it is broadcast together with others."""
    if own is None or any(other is None or len(other) > len(own) for other in others):
        return False
    pairs = [pair for other in others for pair in zip(reversed(own), reversed(other or ()))]
    return all(size == 1 or (size == mine and (isinstance(mine, int) or mine.value)) for mine, size in pairs)


def _as_array(value: ir.Value, given: Any) -> Array:
    """The value as an array of the input's type and shape: a number stands for all elements."""
    name, dtype = value.name, value.dtype
    array = np.asarray(given)
    if dtype is None or array.dtype.kind not in "bif":
        raise MisuseError(f"--set {name}={given}: the input is a {dtype}, and takes numbers, true or false")
    wanted = array.astype(dtype.numpy())
    if not np.array_equal(wanted.astype(array.dtype), array):
        raise MisuseError(f"--set {name}={given}: the input is of the type {dtype}, which has no such value")
    sizes = list(value.shape or ())
    if array.ndim == 0 and value.shape is not None and all(isinstance(size, int) for size in sizes):
        return np.full([int(str(size)) for size in sizes], wanted)
    fits = value.shape is None or len(sizes) == array.ndim
    if not fits or any(isinstance(a, int) and a != b for a, b in zip(sizes, array.shape)):
        raise MisuseError(f"--set {name}={given}: the input has the shape {value.shape}, so give a value of that shape")
    return wanted
