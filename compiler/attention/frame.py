"""Tells which leading axes of an attention's scores are the batch, and which are heads.

Exporters write two axes, one merged axis, or more. The fused operators have exactly two: batch and heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitc.compiler.attention.attention import Attention
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.operand import ADDED, Operand, axes_of, traced_back, unmerged
from splitc.compiler.patterns.sizes import ONE, Axis, Sizes, fixed_axis, joined, product_of

Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Frame:
    """The axes of an attention: `length` new tokens attend to `all` tokens. Heads and their sizes are fixed.

    `leading` are the leading axes of the product of queries and keys, and `weighed` those of the product with values.
    """

    batch: Axis
    heads: Axis
    length: Axis
    all: Axis
    size: int
    value_size: int
    leading: Axes
    weighed: Axes

    @property
    def head_count(self) -> int:
        """The number of heads."""
        assert self.heads.fixed is not None
        return self.heads.fixed

    def divided(self, leading: Sequence[Axis]) -> int | None:
        """How many of the leading axes are the batch; the rest are heads. None if batch and heads share an axis."""
        count = len(leading)
        sizes = [axis.size for axis in leading]
        likely: list[int] = [max(0, count - 1), count, *range(count)]
        for number in likely:
            if (product_of(sizes[:number]), product_of(sizes[number:])) == (self.batch.size, self.heads.size):
                return number
        return None


def find_frame(attention: Attention, sizes: Sizes) -> Frame:
    """The axes of an attention. Raises NotFusedError if they are not known, or its operands do not fit together."""
    query, keys, values = (axes_of(operand, sizes) for operand in (attention.query, attention.keys, attention.values))
    leading, length, size = query[:-2], query[-2], query[-1].fixed
    rows, value_size = keys[-1], values[-1].fixed
    if keys[-2].size != query[-1].size or values[-2].size != rows.size:
        raise NotFusedError("the shapes of its queries, keys and values do not fit together")
    if not _fits(keys[:-2], leading, attention.groups):
        raise NotFusedError("its keys have more heads than its queries")
    if size is None or value_size is None:
        raise NotFusedError("the size of its heads is dynamic")
    layouts = [sizes.known(value, "its scores") for value in attention.layouts]
    if any([axis.size for axis in layout[-2:]] != [length.size, rows.size] for layout in layouts):
        raise NotFusedError("the last two axes of its scores change before the product with the values")
    if any(product_of(a.size for a in layout[:-2]) != product_of(a.size for a in leading) for layout in layouts):
        raise NotFusedError("its mask, bias or values have more batch entries or heads than its queries")
    weighed = layouts[1][:-2]
    if len(weighed) != len(values) - 2 or not _fits(values[:-2], weighed, attention.groups):
        raise NotFusedError("its values have more heads than its queries")
    for operand in (attention.keys, attention.values):
        _check_added(operand, leading, length)
    batch, heads = _divide([leading, weighed, *(layout[:-2] for layout in layouts)], attention.query, sizes)
    return Frame(batch, heads, length, rows, size, value_size, leading, weighed)


def _check_added(operand: Operand, leading: Axes, length: Axis) -> None:
    """Raise NotFusedError if keys or values would be repeated for tokens: there are fewer heads than tokens."""
    repeated = [axis.fixed for axis, own in zip(leading, operand.axes, strict=False) if own == ADDED]
    if any(count is None or (length.fixed is not None and count > length.fixed) for count in repeated):
        raise NotFusedError("its tokens are multiplied with the keys of another axis than its queries")


def _fits(own: Axes, leading: Axes, groups: int) -> bool:
    """Whether leading axes broadcast to those of queries, with `groups` query heads for each head."""
    times = [1] * (len(own) - 1) + [groups]
    return all(
        b.size == ONE or product_of([b.size, (n, n)]) == a.size for a, b, n in zip(leading, own, times, strict=True)
    )


def _divide(layouts: Sequence[Axes], query: Operand, sizes: Sizes) -> tuple[Axis, Axis]:
    """The batch and the heads: of the first layout that separates them; else all leading axes are one or the other."""
    traced = traced_back(query, scaled=True)
    before = unmerged(traced, sizes, scaled=True)
    for leading in (*layouts, *([] if before is None else [axes_of(before, sizes)[:-2]])):
        if len(leading) > 1 and leading[-1].fixed is not None:
            return joined(leading[:-1]), leading[-1]
    leading = layouts[0]
    one = fixed_axis(1)
    # Queries that the model transposes from [length, heads, size] have no batch.
    if len(leading) == 1 and leading[0].fixed is not None and traced.axes == (1, 0, 2):
        return one, leading[0]
    return joined(leading), one
