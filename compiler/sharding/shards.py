"""One rank's shards: their sizes, and which elements of a value they hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.graphs.lazy_tensors import CutTensor, as_slice, part_of_file, runs_of
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis, Factor
from splitc.compiler.operators.operation import Axes
from splitc.compiler.sharding.shares import Range
from splitc.runtime.package.manifest import AxisPart, Part


@dataclass(frozen=True)
class Shards:
    """One rank's range of each sharded atom."""

    ranges: Mapping[Factor, Range]
    _sizes: dict[Axis, int] = field(default_factory=dict, repr=False, compare=False)
    _shares: dict[Axes, float] = field(default_factory=dict, repr=False, compare=False)
    _cut: dict[tuple[int, bytes], ir.TensorProtocol] = field(default_factory=dict, repr=False, compare=False)

    def size(self, axis: Axis) -> int:
        """The rank's size of an axis."""
        if axis not in self._sizes:
            self._sizes[axis] = math.prod(self._leaf(leaf) for leaf in ax.leaves(axis))
        return self._sizes[axis]

    def _leaf(self, leaf: Factor) -> int:
        if leaf.is_atom:
            return self.ranges[leaf].size if leaf in self.ranges else leaf.size
        return sum(self.size(section) for section in leaf.sections)

    def is_split(self, axis: Axis) -> bool:
        """Whether the rank has less than the whole axis."""
        return self.size(axis) != ax.size_of(axis)

    def splits(self, axes: Axes) -> bool:
        """Whether the rank has only a shard of a value with these axes."""
        return any(map(self.is_split, axes or ()))

    def share(self, axes: Axes) -> float:
        """The rank's share of the elements of a value with these axes."""
        if axes not in self._shares:
            self._shares[axes] = math.prod(self.size(axis) / max(1, ax.size_of(axis)) for axis in axes or ())
        return self._shares[axes]

    def ratio(self, axis: Axis) -> tuple[int, int] | None:
        """The ratio of the rank's size of an axis to the whole size; None if the rank has nothing of it.

        The ratio is the same for all sizes of whole factors. Factors in sections, of which one is split, belong to
        weights, so their sizes are fixed.
        """
        own, whole = 1, 1
        for leaf in ax.leaves(axis):
            if leaf in self.ranges:
                own, whole = own * self.ranges[leaf].size, whole * leaf.size
            elif not leaf.is_atom and self.is_split((leaf,)):
                own, whole = own * self._leaf(leaf), whole * leaf.size
        return (own, whole) if own else None

    def indices(self, axis: Axis) -> npt.NDArray[np.int64]:
        """The indices of the rank's elements along an axis, ascending."""
        indices = np.zeros(1, np.int64)
        for leaf in ax.leaves(axis):
            indices = (indices[:, None] * leaf.size + self._leaf_indices(leaf)[None, :]).reshape(-1)
        return indices

    def _leaf_indices(self, leaf: Factor) -> npt.NDArray[np.int64]:
        if leaf.is_atom:
            own = self.ranges.get(leaf, Range(0, leaf.size))
            return np.arange(own.start, own.stop)
        starts = np.cumsum([0, *(ax.size_of(section) for section in leaf.sections)])
        return np.concatenate(
            [start + self.indices(section) for start, section in zip(starts, leaf.sections, strict=False)]
        )

    def owns(
        self,
        axis: Axis,
        sections: Callable[[Iterable[bool]], bool] = any,
        present: Collection[Factor] | None = None,
    ) -> bool:
        """Whether the rank owns its elements along an axis, rather than that they are replicas of another rank's.

        `sections` is `any` or `all`: a rank may own units of some sections only. `present` are the atoms of the value,
        or of the sum, if it has other axes.
        """
        atoms = set(ax.atoms(axis)) if present is None else present
        return all(
            (leaf not in self.ranges or self.ranges[leaf].is_owned(atoms))
            if leaf.is_atom
            else sections(self.owns(section, sections, atoms) for section in leaf.sections)
            for leaf in ax.leaves(axis)
        )

    def owned_mask(self, axis: Axis, present: Collection[Factor] | None = None) -> npt.NDArray[np.bool_]:
        """For each of the rank's elements along an axis, whether the rank owns it. `present`: as in `owns`."""
        atoms = set(ax.atoms(axis)) if present is None else present
        mask = np.ones(1, np.bool_)
        for leaf in ax.leaves(axis):
            mask = (mask[:, None] & self._leaf_owned(leaf, atoms)[None, :]).reshape(-1)
        return mask

    def _leaf_owned(self, leaf: Factor, present: Collection[Factor]) -> npt.NDArray[np.bool_]:
        if leaf.is_atom:
            return np.full(self._leaf(leaf), self.owns((leaf,), present=present))
        return np.concatenate([self.owned_mask(section, present) for section in leaf.sections])

    def key(self, axes: Axes) -> bytes:
        """A key that is equal for equal shards of a value."""
        return b"|".join(self.indices(axis).tobytes() for axis in axes or () if self.is_split(axis))

    def places(self, axes: Axes) -> dict[int, npt.NDArray[np.int64]]:
        """The indices of the rank's elements along each split axis, by the axis's number."""
        return {number: self.indices(axis) for number, axis in enumerate(axes or ()) if self.is_split(axis)}

    def part(self, name: str, axes: Axes, shape: ir.Shape | None) -> Part | None:
        """The manifest's entry of how a rank's shard is sliced from a model input or output; None for the whole.

        All ranks slice along the same axes. If one of these has sections, ranks with the whole have an entry too.
        """
        cut = [number for number, axis in enumerate(axes or ()) if not self.ranges.keys().isdisjoint(ax.atoms(axis))]
        parts = []
        for number, axis in ((number, axes[number]) for number in cut if axes is not None):
            leaves = ax.leaves(axis)
            # The factors before the first split one may be dynamic, such as the batch.
            first = next(n for n, leaf in enumerate(leaves) if not self.ranges.keys().isdisjoint(ax.atoms((leaf,))))
            if not all(leaf.is_atom for leaf in leaves[first:]):
                parts.append(AxisPart(number, [ax.size_of(axis)], [None], runs_of(self.indices(axis))))
                continue
            fixed = shape is not None and isinstance(shape[number], int)
            head = ax.size_of(tuple(leaves[:first]))
            sizes = [head if fixed else -1, *(leaf.size for leaf in leaves[first:])]
            ranges = [self.ranges.get(leaf) for leaf in leaves[first:]]
            parts.append(AxisPart(number, sizes, [None, *((r.start, r.stop) if r else None for r in ranges)]))
        is_cut = self.splits(axes) or any(part.places for part in parts)
        return Part(name, parts) if is_cut else None

    def weight(self, tensor: ir.TensorProtocol, axes: Axes, name: str) -> ir.TensorProtocol:
        """The rank's shard of a weight, as a lazy tensor. Equal shards are one tensor, so that it is written once."""
        key = (id(tensor), self.key(axes))
        if key not in self._cut:
            self._cut[key] = self._cut_weight(tensor, axes, name)
        return self._cut[key]

    def _cut_weight(self, tensor: ir.TensorProtocol, axes: Axes, name: str) -> ir.TensorProtocol:
        places = {number: as_slice(indices) for number, indices in self.places(axes).items()}
        if not axes or not places:
            return tensor
        sizes = [self.size(axis) for axis in axes]
        if list(places) == [0] and isinstance(places[0], slice) and isinstance(tensor, ir.ExternalTensor):
            row = tensor.nbytes * 8 // max(1, int(tensor.shape.numpy()[0]))
            if row % 8 == 0:
                return part_of_file(tensor, places[0].start * row // 8, sizes[0] * row // 8, ir.Shape(sizes), name)
        return CutTensor(tensor, places, ir.Shape(sizes), name)
