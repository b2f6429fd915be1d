"""The sizes at which a block is run alone, and what it takes at these."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from itertools import compress
from operator import not_
from pathlib import Path

import msgspec
import numpy as np
import onnx_ir as ir

from splitc.compiler.analysis.stages import Stage
from splitc.compiler.frontend.shapes import BoundShapes
from splitc.compiler.planning.plan import Plan
from splitc.compiler.request.shapes import Shape
from splitc.compiler.sharding.axis_map import small_sizes
from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import SplitcError
from splitc.runtime.feeds.fills import fill_array, make_inputs
from splitc.runtime.package.manifest import Fill, Manifest
from splitc.runtime.requests.preamble import rank_feeds

# The elements of a block's values that are few enough for sizes that make more than the planned ones. A choice: to
# compute as many takes about a second.
FEW = 1 << 24


class CannotCompareError(SplitcError):
    """A block can't be compared."""


class BlockInputs:
    """Makes up what blocks of a plan take, for a package in `folder`."""

    def __init__(self, plan: Plan, folder: Path, manifest: Manifest) -> None:
        self._plan, self._folder, self.manifest = plan, folder, manifest
        # Of the sizes of the last block: most blocks run at the same ones.
        self._last: tuple[BoundShapes, Mapping[str, Array]] | None = None

    def sizes(self, stage: Stage) -> list[BoundShapes]:
        """The sizes to run a block at, in this order: small ones, probe sizes, the planned ones.

        Those that make many elements, and more than the planned ones, come last: small ones if most sizes are fixed, as
        those of images may be, and probe sizes if each cache has a symbol of its own.
        """
        planned = self._plan.analysis.costs.bound

        def elements(bound: BoundShapes) -> int:
            return sum(math.prod(bound.shapes.get(v.name or "", ())) for node in stage.nodes for v in node.outputs)

        most = max(FEW, elements(planned))
        others = [*small_sizes(self._plan.analysis), self._plan.split.probe_shapes]
        large = [elements(bound) > most for bound in others]
        return [*compress(others, map(not_, large)), planned, *compress(others, large)]

    def make(self, values: Iterable[ir.Value], bound: BoundShapes) -> dict[str, Array]:
        """Arrays for values, and for the model's inputs, at these sizes.

        Raises SplitcError if the package refuses a request of these sizes, and CannotCompareError.
        """
        if self._last is None or self._last[0] is not bound:
            self._last = bound, self._model_inputs(bound.shapes)
        inputs = self._last[1]
        return {
            name: inputs[name] if name in inputs else _made_up(value, bound)
            for value in dict.fromkeys([*values, *self._plan.analysis.graph.graph.inputs])
            for name in [value.name or ""]
        }

    def _model_inputs(self, shapes: Mapping[str, Shape]) -> Mapping[str, Array]:
        """The model's inputs, and what the runtime adds: lengths of caches, and the preamble's masks and tables."""
        manifest = self.manifest
        if lacking := next((tensor.name for tensor in manifest.inputs if tensor.name not in shapes), None):
            raise CannotCompareError(f"the sizes of '{lacking}' are not known")
        tensors = [msgspec.structs.replace(one, sample_shape=list(shapes[one.name])) for one in manifest.inputs]
        given = make_inputs(tensors)
        return {**given, **rank_feeds(self._folder, manifest, given, keeps_masks=True)}


def _made_up(value: ir.Value, bound: BoundShapes) -> Array:
    """An array for a value that a block takes: a constant if sizes determine it, else random or ones."""
    name = value.name or ""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    dtype = value.dtype or ir.DataType.FLOAT
    if name not in bound.shapes:
        raise CannotCompareError(f"the sizes of '{name}' are not known")
    if (constant := bound.constants.get(name)) is not None:
        return constant.astype(dtype.numpy()).reshape(bound.shapes[name])
    fallback = Fill("randint", 0, 8) if dtype.bitwidth <= 8 and dtype != ir.DataType.BOOL else Fill("ones")
    fill = Fill("normal") if dtype.is_floating_point() else fallback
    return fill_array(fill, str(dtype.numpy()), bound.shapes[name], generator)
