"""Merges adapters (LoRA) into weights. A merged weight is lazy: it is computed when it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from splitc.compiler.adapters.linear_layers import LinearLayer, find_linear_layers
from splitc.compiler.graphs.lazy_tensors import computed
from splitc.compiler.normal_form.graph import Graph
from splitc.runtime.adapters.adapter import Adapter, LowRank, read_pair
from splitc.runtime.adapters.matching import Matches, match, need_matches
from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import MisuseError


@dataclass(frozen=True)
class Merged:
    """A merged adapter and its strength.

    - `layers`: the number of the model's linear layers.
    - `matches`: the updates of layers, and those that match no layer.
    - `weights`: the changed weights, by the names of initializers.
    """

    adapter: Adapter
    strength: float
    layers: int
    matches: Matches
    weights: Mapping[str, ir.TensorProtocol]


def merge(graph: Graph, adapters: Sequence[tuple[Adapter, float]]) -> tuple[Merged, ...]:
    """Add adapters to the weights of a graph, in place, each multiplied by its strength.

    Raises MisuseError for an adapter of another model, and for one with numbers that are not finite. Single updates
    that match no layer are in the result, with reasons.
    """
    merged = []
    layers = find_linear_layers(graph) if adapters else []
    for adapter, strength in adapters:
        matching = match(adapter, [layer.layer for layer in layers])
        reasons = {update.module: layers[number].why_not for number, update in matching.updates.items()}
        refused = {module: why for module, why in reasons.items() if why}
        updates = {number: update for number, update in matching.updates.items() if not layers[number].why_not}
        matches = Matches(updates, {**matching.unmatched, **refused})
        need_matches(adapter, matches, [layer.layer for layer in layers])
        changed: dict[str, ir.TensorProtocol] = {}
        for number, update in updates.items():
            weight = layers[number].weight
            assert weight.const_value is not None, "it is an initializer"
            read_pair(update, adapter.name)  # raises before one waits for a plan
            weight.const_value = _merged(weight.const_value, layers[number], update, adapter.name, strength)
            changed[weight.name or ""] = weight.const_value
        merged.append(Merged(adapter, strength, len(layers), matches, changed))
    return tuple(merged)


def _merged(
    base: ir.TensorProtocol, layer: LinearLayer, update: LowRank, adapter: str, strength: float
) -> ir.TensorProtocol:
    """A lazy weight: `base` plus the product of an adapter's two matrices. It is computed each time that it is read.

    Reading it raises MisuseError for an adapter that makes numbers which are not finite.
    """
    factor = strength * update.scale / layer.factor

    def compute(array: Array) -> Array:
        wide = np.float64 if array.dtype == np.float64 else np.float32
        a, b = read_pair(update, adapter)
        with np.errstate(over="ignore", invalid="ignore"):
            # B A: [outputs, inputs], with a kernel's elements along the inputs.
            product = b.reshape(len(b), -1) @ a.reshape(len(a), -1) * np.float32(factor)
            product = product.T if layer.is_transposed else product.reshape(array.shape)
            merged: Array = (array.astype(wide) + product).astype(array.dtype)
        if not np.isfinite(merged).all() and np.isfinite(array).all():
            raise MisuseError(
                f"the adapter {adapter}, its '{update.module}' times {factor:g}, makes numbers that are not finite in "
                f"{array.dtype}, the type of {base.name}: ask for a smaller strength"
            )
        return merged

    return computed(base, base.shape.numpy(), base.name or "", compute)
