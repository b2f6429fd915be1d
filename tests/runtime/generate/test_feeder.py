"""What a model is fed for tokens, by the forms of its inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from splitc.runtime.errors import MisuseError
from splitc.runtime.generate.capacity import find_capacity
from splitc.runtime.generate.feeder import Feeder
from splitc.runtime.generate.signature import LanguageSignature, find_signature
from splitc.runtime.package.manifest import Role, Shape, Tensor

IDS = Tensor("ids", "int64", ["b", "t"], role=Role("indices", 9))


def manifest_of(*inputs: Tensor) -> Any:
    outputs = [Tensor("logits", "float32", ["b", "t", 9])]
    source = SimpleNamespace(name="m.onnx")
    return SimpleNamespace(inputs=[IDS, *inputs], outputs=outputs, states=[], kept_rows=None, source=source)


def fed(tensor: Tensor, new: int, total: int) -> Any:
    manifest = manifest_of(tensor)
    return Feeder(manifest, find_signature(manifest)).feeds([1] * new, total)[tensor.name]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([], 3),
        (["t"], [3, 4]),
        (["b", "t"], [[3, 4]]),
        ([4, "b", "t"], [[[3, 4]]] * 4),
        (["r", "b", "t"], [[[3, 4]]] * 3),
    ],
)
def test_positions_are_one_or_a_list(shape: Shape, expected: object) -> None:
    """A single one is the first token's. Models that also read images have several for a token."""
    array = fed(Tensor("at", "int32", shape, role=Role("positions")), 2, 5)
    assert array.dtype == np.int32 and array.tolist() == expected


@pytest.mark.parametrize("room", ["all", 6])
def test_masks_that_are_added_to_scores_hide_later_tokens(room: int | str) -> None:
    mask = Tensor("mask", "float32", ["b", 1, "t", room], role=Role("bias"))
    array = fed(mask, 2, 5)
    seen = [[True, True, True, True, False, False], [True, True, True, True, True, False]]
    assert array.dtype == np.float32
    assert np.array_equal(array[0, 0] == 0, np.array(seen)[:, : array.shape[-1]])
    assert array.shape[-1] == (6 if room == 6 else 5) and array.min() < -6e4
    signature = LanguageSignature("ids", "mask", None, logits="logits")
    assert find_capacity(manifest_of(mask), signature) == (6 if room == 6 else None)


def test_other_inputs_are_refused_with_what_to_do() -> None:
    with pytest.raises(MisuseError, match=r"takes ids, keep, and .* can be bound when .* \(--set NAME=VALUE"):
        find_signature(manifest_of(Tensor("keep", "int64", [])))
    with pytest.raises(MisuseError, match="can't generate with a mask of"):
        fed(Tensor("mask", "int64", ["b", 1, "t", "all"], role=Role("mask")), 1, 1)
