"""The number of rows of a request, which states have from the first one on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from splitc.runtime.package.manifest import Manifest, Shape, Tensor
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.states import State
from splitc.runtime.requests.empty_states import count_batch, empty_states

FEEDS = {"ids": np.zeros((2, 5), np.int64), "places": np.zeros((3, 2, 5), np.int64), "position": np.arange(5)}


@pytest.fixture
def manifest(package: Path) -> Manifest:
    """Of a decoder whose positions are those of all rows: one axis of tokens, or three kinds of them."""
    shapes: dict[str, Shape] = {
        "ids": ["rows", "tokens"],
        "places": [3, "rows", "tokens"],
        "position": ["tokens"],
        "past": ["rows", 4, "length", 8],
    }
    inputs = [Tensor(name, "float32" if name == "past" else "int64", shape) for name, shape in shapes.items()]
    return replace(read_manifest(package), inputs=inputs, states=[State("past", "present", grows=2)], batch=None)


def test_rows_are_those_of_the_batch(manifest: Manifest) -> None:
    manifest = with_past(manifest, ["others", 4, "length", 8])
    manifest = replace(manifest, batch={"ids": 0, "places": 1, "past": 0, "logits": 0})
    assert count_batch(manifest, FEEDS) == 2
    assert empty_states(manifest, FEEDS)["past"].shape == (2, 4, 0, 8)


def test_rows_that_depend_on_each_other_are_those_of_the_states(manifest: Manifest) -> None:
    assert count_batch(manifest, FEEDS) == 2
    assert empty_states(manifest, FEEDS)["past"].shape == (2, 4, 0, 8)


@pytest.mark.parametrize("rows", ["others", None])
def test_an_axis_of_tokens_has_no_rows(manifest: Manifest, rows: str | None) -> None:
    manifest, feeds = with_past(manifest, [rows, 4, "length", 8]), {n: FEEDS[n] for n in ("ids", "position")}
    assert count_batch(manifest, feeds) == 2
    assert empty_states(manifest, feeds)["past"].shape == (2, 4, 0, 8)


def test_a_single_axis_has_the_rows_if_there_is_no_other(manifest: Manifest) -> None:
    manifest = replace(manifest, inputs=[Tensor("token", "int64", ["n"]), *with_past(manifest, None).inputs[-1:]])
    assert count_batch(manifest, {"token": np.zeros(3, np.int64)}) == 3
    assert count_batch(manifest, {}) == 1


def with_past(manifest: Manifest, shape: Shape) -> Manifest:
    return replace(manifest, inputs=[*manifest.inputs[:-1], Tensor("past", "float32", shape, [1, 4, 0, 8])])
