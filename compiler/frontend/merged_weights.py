"""Merges adapters (LoRA) into weights. A merged weight is lazy: it is computed when it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.graph import Graph
from splitc.compiler.frontend.linear_layers import LinearLayer, find_linear_layers
from splitc.runtime.adapters.adapter import Adapter, LowRank
from splitc.runtime.adapters.matching import Matches, match, need_matches
from splitc.runtime.arrays.array import Array


class MergedTensor(ir.LazyTensor):
    """A lazy weight: `base` plus the product of an adapter's two matrices. It is computed each time that it is read."""

    __slots__ = ("base", "layer", "strength", "update")

    def __init__(self, base: ir.TensorProtocol, layer: LinearLayer, update: LowRank, strength: float) -> None:
        super().__init__(self._compute, base.dtype, ir.Shape(base.shape.numpy()), name=base.name)
        self.base, self.layer, self.update, self.strength = base, layer, update, strength

    def _compute(self) -> ir.TensorProtocol:
        base = self.base.numpy()
        product = _product(self.update) * np.float32(self.strength * self.update.scale / self.layer.factor)
        product = product.T if self.layer.is_transposed else product.reshape(base.shape)
        wide = np.float64 if base.dtype == np.float64 else np.float32
        return ir.Tensor((base.astype(wide) + product).astype(base.dtype), self.dtype, name=self.name)


def _product(update: LowRank) -> Array:
    """B A: [outputs, inputs], with a kernel's elements along the inputs."""
    a, b = update.read_a(), update.read_b()
    product: Array = b.astype(np.float32).reshape(len(b), -1) @ a.astype(np.float32).reshape(len(a), -1)
    return product


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

    Raises MisuseError for an adapter of another model. Single updates that match no layer are in the result, with
    reasons.
    """
    merged = []
    layers = find_linear_layers(graph) if adapters else []
    for adapter, strength in adapters:
        matching = match(adapter, [layer.layer for layer in layers])
        refused = {
            update.module: layers[number].why_not
            for number, update in matching.updates.items()
            if layers[number].why_not
        }
        updates = {number: update for number, update in matching.updates.items() if not layers[number].why_not}
        matches = Matches(updates, {**matching.unmatched, **refused})
        need_matches(adapter, matches, [layer.layer for layer in layers])
        changed: dict[str, ir.TensorProtocol] = {}
        for number, update in updates.items():
            weight = layers[number].weight
            assert weight.const_value is not None, "it is an initializer"
            weight.const_value = MergedTensor(weight.const_value, layers[number], update, strength)
            changed[weight.name or ""] = weight.const_value
        merged.append(Merged(adapter, strength, len(layers), matches, changed))
    return tuple(merged)
