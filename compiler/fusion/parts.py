"""Fuses patterns other than attention: norms, rotary embeddings, modulation, products, slices, indexed caches."""

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
from splitc.compiler.fusion.cache import ShapeOf
from splitc.compiler.fusion.divided import OPERATOR as PRODUCT
from splitc.compiler.fusion.divided import find_divided, write_divided
from splitc.compiler.fusion.errors import NotFusedError
from splitc.compiler.fusion.kernels import Gains, check_type
from splitc.compiler.fusion.modulation import OPERATOR as MODULATED
from splitc.compiler.fusion.modulation import find_modulation, write_modulation
from splitc.compiler.fusion.norm import (
    find_narrowed,
    find_norms,
    find_transposed,
    move_transpose,
    write_narrowed,
    write_norm,
)
from splitc.compiler.fusion.rotary import find_rotary, looks_rotary, merged_heads, pairs_among
from splitc.compiler.fusion.rotary_embedding import OPERATOR as ROTARY
from splitc.compiler.fusion.rotary_embedding import write_heads, write_rotary, write_rotary_among
from splitc.compiler.fusion.scattered import OPERATOR as SCATTERED
from splitc.compiler.fusion.scattered import find_scattered, write_scattered
from splitc.compiler.fusion.sizes import Sizes
from splitc.compiler.fusion.split_norms import find_split_norms, write_split_norms
from splitc.compiler.fusion.tables import Tables

# Fuses a pattern at a node. Returns the operator that replaces it; None if the node is not of that pattern. Raises
# NotFusedError if the pattern is there and can't be fused.
Attempt = Callable[[ir.Node], str | None]


@dataclass(frozen=True)
class Parts:
    """Tries each pattern at a node, and fuses it where the operator is faster. `states` are names of inputs.

    Sizes and tables take a second inference of all shapes, so they are made when a pattern first needs them.
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
        """The tables of cosines and sines that the model computes from positions."""
        return self.make_tables()

    @property
    def attempts(self) -> tuple[tuple[str, Attempt], ...]:
        """The kinds of patterns, each with the function that fuses it."""
        return (
            ("norm", self._norm),
            ("norm", self._split_norms),
            ("norm", self._transposed_norm),
            ("modulation", self._modulation),
            ("norm", self._narrowed_norm),
            ("rotary", self._rotary),
            ("rotary", self._moved_rotary),
            ("product", self._divided),
            ("cache", self._scattered),
            ("slices", self._assembled),
        )

    def _norm(self, mean: ir.Node) -> str | None:
        """Fuse the norm around a mean. Returns its operator; None if there is no norm."""
        norms = find_norms(mean)
        if not norms:
            return None
        check_type(norms[0].source, self.gains.parts)
        norm = write_norm(norms, self.editor, self.sizes)
        try:
            return self._modulation(norm) or norm.op_type
        except NotFusedError:  # the norm alone is better than its parts
            return norm.op_type

    def _transposed_norm(self, norm: ir.Node) -> str | None:
        """Move a Transpose from before a norm to behind it. Returns the norm's operator; None if there is none."""
        traced = find_transposed(norm)
        if traced is None:
            return None
        check_type(norm.outputs[0], self.gains.parts)
        move_transpose(norm, traced, self.editor, self.sizes)
        return norm.op_type

    def _narrowed_norm(self, norm: ir.Node) -> str | None:
        """Compute a norm in float16 that is cast to float32 and back. Returns its operator; None for other nodes."""
        narrowed = find_narrowed(norm)
        if narrowed is None:
            return None
        check_type(narrowed.output, self.gains.parts)
        write_narrowed(narrowed, self.editor, self.sizes)
        return norm.op_type

    def _split_norms(self, concat: ir.Node) -> str | None:
        """Fuse the norms of all parts of a Split, whose results a Concat joins. Returns their operator, or None."""
        norms = find_split_norms(concat)
        if norms is None:
            return None
        write_split_norms(norms, self.editor, self.sizes)
        return norms.norms[0].op_type

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

    def _moved_rotary(self, node: ir.Node) -> str | None:
        """Move ONNX's RotaryEmbedding before a Transpose or a Slice of heads. Returns it; None if it stays."""
        moved = rotary_embedding.find_moved(node, self.sizes, self.tables) if is_onnx(node, ROTARY) else None
        if moved is None:
            return None
        check_type(moved.data, self.gains.parts)
        rotary_embedding.write_moved(node, moved, self.editor, self.sizes)
        return ROTARY

    def _divided(self, product: ir.Node) -> str | None:
        """Replace a product and the Split of its columns by several products. Returns MatMul; None for other nodes."""
        divided = find_divided(product) if self.gains.divided else None
        if divided is None:
            return None
        check_type(divided.whole, self.gains.divided)
        shape = self.shape_of(divided.whole)
        if shape is None or math.prod(shape[:-1]) < self.gains.least_rows:
            raise NotFusedError("it has too few rows for several products to be faster")
        write_divided(divided, self.editor, self.sizes)
        return PRODUCT

    def _scattered(self, node: ir.Node) -> str | None:
        """Write a cache by index without transposing it. Returns the operator; None if the node writes no cache."""
        scattered = find_scattered(node, self.states if self.gains.scattered else frozenset())
        if scattered is None:
            return None
        check_type(scattered.past, self.gains.scattered)
        write_scattered(scattered, self.editor, self.sizes)
        return SCATTERED

    def _assembled(self, node: ir.Node) -> str | None:
        """Replace assignments to slices, of which the node is the last, by a Concat. Returns the operator, or None.

        If the slices are the rotated elements of pairs, they become a rotary embedding.
        """
        assembled = find_assembled(node, self.sizes, self.tables) if node.op_type == "ScatterND" else None
        if assembled is None:
            return None
        concat = write_assembled(assembled, self.editor, self.sizes)
        try:
            return self._rotary(concat) or ASSEMBLED
        except NotFusedError:  # the Concat is better than the assignments
            return ASSEMBLED
