"""Fuses all but attention: norms, rotary embeddings, modulation, products, slices, and caches written by index."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.matching import is_onnx
from splitc.compiler.fusion import rotary_embedding
from splitc.compiler.fusion.assembled import OPERATOR as ASSEMBLED
from splitc.compiler.fusion.assembled import find_assembled, write_assembled
from splitc.compiler.fusion.attention import NotFusedError
from splitc.compiler.fusion.cache import ShapeOf
from splitc.compiler.fusion.divided import OPERATOR as PRODUCT
from splitc.compiler.fusion.divided import find_divided, write_divided
from splitc.compiler.fusion.kernels import Gains, Types
from splitc.compiler.fusion.modulation import OPERATOR as MODULATED
from splitc.compiler.fusion.modulation import find_modulation, write_modulation
from splitc.compiler.fusion.norm import OPERATOR as NORM
from splitc.compiler.fusion.norm import find_narrowed, find_norm, find_turned, write_narrowed, write_norm, write_turned
from splitc.compiler.fusion.parted_norms import find_parted_norms, write_parted_norms
from splitc.compiler.fusion.rotary import find_rotary, looks_rotary, merged_heads, pairs_among
from splitc.compiler.fusion.rotary_embedding import OPERATOR as ROTARY
from splitc.compiler.fusion.rotary_embedding import write_heads, write_rotary, write_rotary_among
from splitc.compiler.fusion.scattered import OPERATOR as SCATTERED
from splitc.compiler.fusion.scattered import find_scattered, write_scattered
from splitc.compiler.fusion.sizes import Sizes
from splitc.compiler.fusion.tables import Tables

# Returns the operator that it has fused, None if there is nothing to fuse. Raises NotFusedError if it can't be.
Attempt = Callable[[ir.Node], str | None]


@dataclass(frozen=True)
class Parts:
    """Tries each pattern at a node, and fuses it where that gains. `states` are names of inputs.

    Sizes and tables need all shapes to be inferred, so they are made only where something may be fused.
    """

    gains: Gains
    states: frozenset[str]
    editor: Editor
    shape_of: ShapeOf
    make_sizes: Callable[[], Sizes]
    make_tables: Callable[[], Tables]

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes of all values."""
        return self.make_sizes()

    @cached_property
    def tables(self) -> Tables:
        """The tables that the model computes from positions."""
        return self.make_tables()

    @property
    def attempts(self) -> tuple[tuple[str, Attempt], ...]:
        """The function that fuses each kind of pattern."""
        return (
            ("norm", self._norm),
            ("norm", self._parted_norms),
            ("norm", self._turned_norm),
            ("modulation", self._modulation),
            ("norm", self._narrowed_norm),
            ("rotary", self._rotary),
            ("rotary", self._turned_rotary),
            ("product", self._divided),
            ("cache", self._scattered),
            ("slices", self._assembled),
        )

    def _norm(self, mean: ir.Node) -> str | None:
        """Fuse the norm around a mean. Returns its operator; None if there is no norm."""
        norm = find_norm(mean)
        if norm is None:
            return None
        check_type(norm.source, self.gains.parts)
        write_norm(norm, self.editor, self.sizes)
        return NORM

    def _turned_norm(self, norm: ir.Node) -> str | None:
        """Move a Transpose behind a norm. Returns the norm's operator; None if there is no such Transpose."""
        seen = find_turned(norm)
        if seen is None:
            return None
        check_type(norm.outputs[0], self.gains.parts)
        write_turned(norm, seen, self.editor, self.sizes)
        return norm.op_type

    def _narrowed_norm(self, norm: ir.Node) -> str | None:
        """Norm halves, rather than numbers cast from and to halves. Returns the operator; None for other nodes."""
        narrowed = find_narrowed(norm)
        if narrowed is None:
            return None
        check_type(narrowed.output, self.gains.parts)
        write_narrowed(narrowed, self.editor, self.sizes)
        return norm.op_type

    def _parted_norms(self, concat: ir.Node) -> str | None:
        """Fuse the norms that a node concatenates. Returns their operator; None if there are none."""
        parted = find_parted_norms(concat)
        if parted is None:
            return None
        write_parted_norms(parted, self.editor, self.sizes)
        return parted.norms[0].op_type

    def _modulation(self, node: ir.Node) -> str | None:
        """Fuse a norm and its modulation. Returns their operator; None if there is no modulation."""
        modulation = find_modulation(node) if self.gains.modulations else None
        if modulation is None:
            return None
        check_type(modulation.output, self.gains.modulations)
        write_modulation(modulation, self.editor, self.sizes)
        return MODULATED

    def _rotary(self, last: ir.Node) -> str | None:
        """Fuse the rotary embedding that a node ends. Returns its operator; None if it ends none."""
        if (place := pairs_among(last)) is not None:
            check_type(last.outputs[0], self.gains.parts)
            is_rotary = write_rotary_among(last, place, self.editor, self.sizes, self.tables)
            return ROTARY if is_rotary else None
        if not looks_rotary(last):
            return None
        if (pairs := merged_heads(last, self.sizes)) is not None:
            write_heads(pairs, self.editor, self.sizes)
        rotary = find_rotary(last, self.sizes, self.tables)
        if rotary is None:
            return None
        check_type(rotary.data, self.gains.parts)
        write_rotary(rotary, self.editor, self.sizes, self.tables)
        return ROTARY

    def _turned_rotary(self, node: ir.Node) -> str | None:
        """Write ONNX's operator of whole heads, before their Transpose. Returns it; None if it stays as it is."""
        turned = rotary_embedding.find_turned(node, self.sizes, self.tables) if is_onnx(node, ROTARY) else None
        if turned is None:
            return None
        check_type(turned.data, self.gains.parts)
        rotary_embedding.write_turned(node, turned, self.editor, self.sizes)
        return ROTARY

    def _divided(self, product: ir.Node) -> str | None:
        """Divide a product that is split by columns. Returns its operator; None if there is none."""
        divided = find_divided(product) if self.gains.divided else None
        if divided is None:
            return None
        check_type(divided.whole, self.gains.divided)
        shape = self.shape_of(divided.whole)
        if shape is None or math.prod(shape[:-1]) < self.gains.least_rows:
            raise NotFusedError("it has too few rows to be faster as several products")
        write_divided(divided, self.editor, self.sizes)
        return PRODUCT

    def _scattered(self, node: ir.Node) -> str | None:
        """Write a cache by index along the axis where it is. Returns the operator; None if the node writes no cache."""
        scattered = find_scattered(node, self.states if self.gains.scattered else frozenset())
        if scattered is None:
            return None
        check_type(scattered.past, self.gains.scattered)
        write_scattered(scattered, self.editor, self.sizes)
        return SCATTERED

    def _assembled(self, node: ir.Node) -> str | None:
        """Concatenate slices whose last assignment a node is. Returns the operator; None if it is none.

        It is that of a rotary embedding if they are the rotated elements of pairs.
        """
        assembled = find_assembled(node, self.sizes, self.tables) if node.op_type == "ScatterND" else None
        if assembled is None:
            return None
        concat = write_assembled(assembled, self.editor, self.sizes)
        try:
            return self._rotary(concat) or ASSEMBLED
        except NotFusedError:  # the Concat is better than the assignments
            return ASSEMBLED


def check_type(value: ir.Value, types: Types) -> None:
    """Raise NotFusedError if a value is of another type than these."""
    if (dtype := value.dtype) not in types:
        raise NotFusedError(f"no kernel is faster for its type, {'unknown' if dtype is None else dtype.name}")
