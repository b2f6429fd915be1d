"""Merges adapters (LoRA) into weights. A merged weight is lazy: it is computed when it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.graph import Graph
from splitc.compiler.frontend.linear_layers import LinearLayer, find_linear_layers
from splitc.runtime.adapters.adapter import Adapter, LowRank, read_pair
from splitc.runtime.adapters.matching import Matches, match, need_matches
from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import MisuseError


class MergedTensor(ir.LazyTensor):
    """A lazy weight: `base` plus the product of an adapter's two matrices. It is computed each time that it is read."""

    __slots__ = ("adapter", "base", "layer", "strength", "update")

    def __init__(
        self, base: ir.TensorProtocol, layer: LinearLayer, update: LowRank, adapter: str, strength: float
    ) -> None:
        super().__init__(self._compute, base.dtype, ir.Shape(base.shape.numpy()), name=base.name)
        self.base, self.layer, self.update, self.adapter, self.strength = base, layer, update, adapter, strength

    def _compute(self) -> ir.TensorProtocol:
        """Raises MisuseError for an adapter that makes numbers which are not finite."""
        base = self.base.numpy()
        wide = np.float64 if base.dtype == np.float64 else np.float32
        with np.errstate(over="ignore", invalid="ignore"):
            product = _product(self.update, self.adapter) * np.float32(self._factor)
            product = product.T if self.layer.is_transposed else product.reshape(base.shape)
            merged = (base.astype(wide) + product).astype(base.dtype)
        if not np.isfinite(merged).all() and np.isfinite(base).all():
            raise MisuseError(
                f"the adapter {self.adapter}, its '{self.update.module}' times {self._factor:g}, makes numbers that "
                f"are not finite in {base.dtype}, the type of {self.name}: ask for a smaller strength"
            )
        return ir.Tensor(merged, self.dtype, name=self.name)

    @property
    def _factor(self) -> float:
        """What the product of A and B is multiplied by."""
        return self.strength * self.update.scale / self.layer.factor


def _product(update: LowRank, adapter: str) -> Array:
    """B A: [outputs, inputs], with a kernel's elements along the inputs."""
    a, b = read_pair(update, adapter)
    product: Array = b.reshape(len(b), -1) @ a.reshape(len(a), -1)
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

    Raises MisuseError for an adapter of another model, and for one with numbers that are not finite. Single updates
    that match no layer are in the result, with reasons.
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
            read_pair(update, adapter.name)  # raises before one waits for a plan
            weight.const_value = MergedTensor(weight.const_value, layers[number], update, adapter.name, strength)
            changed[weight.name or ""] = weight.const_value
        merged.append(Merged(adapter, strength, len(layers), matches, changed))
    return tuple(merged)
