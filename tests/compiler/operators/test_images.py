"""Operators on images relate rows and channels, and need whole what they sample or rearrange."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.helpers.blocks import SHARES, Block
from tests.helpers.operators import INNER, Middle, Tiny, as_image, check_operator, sandwich

BLOCK = 2


def to_space(mode: str) -> Middle:
    """DepthToSpace: a quarter of the channels at four times as many places, of which pairs are added."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        image = as_square(b, b.op("Transpose", v, perm=[0, 2, 1]))
        larger = b.op("Relu", b.op("DepthToSpace", image, blocksize=BLOCK, mode=mode))
        return b.op("Transpose", b.op("ReduceSum", larger, b.ints(3), keepdims=0), perm=[0, 2, 1])

    return middle


def to_space_and_back(b: Block, v: ir.Value) -> ir.Value:
    image = as_square(b, b.op("Transpose", v, perm=[0, 2, 1]))
    larger = b.op("Tanh", b.op("DepthToSpace", image, blocksize=BLOCK))
    depth = b.op("SpaceToDepth", larger, blocksize=BLOCK)
    return b.op("Transpose", b.op("Squeeze", depth, b.ints(3)), perm=[0, 2, 1])


def as_square(b: Block, image: ir.Value) -> ir.Value:
    return b.op("Unsqueeze", image, b.ints(3))


def repeated(b: Block, v: ir.Value, places: ir.Value, *sizes: int) -> ir.Value:
    """An array, repeated for each row of a value."""
    return b.op("Expand", places, b.op("Concat", b.shape(v, 0), b.ints(*sizes), axis=0))


def sampled(b: Block, v: ir.Value) -> ir.Value:
    """Each channel, sampled at six places."""
    grid = repeated(b, v, b.op("Tanh", b.w("grid", 1, 6, 1, 2)), 6, 1, 2)
    return as_image(b, v, lambda b, image: b.op("Squeeze", b.op("GridSample", as_square(b, image), grid), b.ints(3)))


def sampled_by_columns(b: Block, v: ir.Value) -> ir.Value:
    """The inner axis as the width of an image, sampled in reverse order."""
    across = np.linspace(1, -1, INNER, dtype=np.float32)
    down = np.linspace(-1, 1, 5, dtype=np.float32)
    places = np.stack(np.meshgrid(across, down), axis=-1)[None]
    grid = repeated(b, v, b.constant(places, np.float32), 5, INNER, 2)
    image = b.op("Unsqueeze", v, b.ints(1))
    return b.op("Squeeze", b.op("GridSample", image, grid, align_corners=1), b.ints(1))


def from_columns(b: Block, v: ir.Value) -> ir.Value:
    """Col2Im: patches of two places, five that overlap, with half as many channels."""

    def middle(b: Block, columns: ir.Value) -> ir.Value:
        return b.op("Squeeze", b.op("Col2Im", columns, b.ints(1, 6), b.ints(1, 2)), b.ints(2))

    return as_image(b, v, middle)


GRAPHS: dict[str, Tiny] = {
    "DepthToSpace": sandwich(to_space("DCR"), narrow=INNER // BLOCK**2),
    "SpaceToDepth": sandwich(to_space_and_back),
    "GridSample": sandwich(sampled, needs=sampled_by_columns, whole="C", split="D", sums=2, opset=22),
    "Col2Im": sandwich(from_columns, narrow=INNER // 2, opset=18, shares=SHARES),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_operator_is_sharded(name: str, tmp_path: Path) -> None:
    check_operator(GRAPHS, name, tmp_path)


def test_channels_that_come_first(tmp_path: Path) -> None:
    sandwich(to_space("CRD"), narrow=INNER // BLOCK**2).check(tmp_path)
