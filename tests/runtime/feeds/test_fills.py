"""Made-up arrays for inputs, and the user's options for them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from splitc.runtime.cli.app import app
from splitc.runtime.errors import MisuseError
from splitc.runtime.feeds.asked_shapes import parse_shapes, resized
from splitc.runtime.feeds.fills import make_inputs, parse_fills
from splitc.runtime.package.manifest import Fill, Tensor
from splitc.runtime.package.manifest_file import read_manifest

INPUTS = [
    Tensor("ids", "int64", ["n"], [100], Fill("randint", high=7)),
    Tensor("mask", "int64", ["n"], [4], Fill("ones")),
    Tensor("place", "int64", [2, "n"], [2, 3], Fill("arange")),
    Tensor("few", "int64", ["n"], [5], Fill("arange", high=2)),
    Tensor("x", "float16", ["n"], [5], Fill("normal")),
    Tensor("scalar", "int64", [], [], Fill("ones")),
    Tensor("step", "int64", [], [], Fill("arange", high=9)),
]


def test_inputs_are_made_up_as_the_compiler_says() -> None:
    made = make_inputs(INPUTS, seed=1)
    assert (made["ids"].min(), made["ids"].max()) == (0, 6)
    assert made["mask"].tolist() == [1, 1, 1, 1]
    assert made["place"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert made["few"].tolist() == [0, 1, 0, 1, 0]
    assert made["x"].dtype == np.float16
    assert made["scalar"].shape == ()
    assert made["step"].shape == ()
    np.testing.assert_array_equal(made["x"], make_inputs(INPUTS, seed=1)["x"])
    assert (made["x"] != make_inputs(INPUTS, seed=2)["x"]).any()


def test_user_says_how_inputs_are_made_up() -> None:
    fills = parse_fills(["ids=zeros", "mask=randint:-3:-1", "x=arange", "a=b=ones"])
    assert fills["a=b"] == Fill("ones")
    del fills["a=b"]
    made = make_inputs(INPUTS, fills=fills)
    assert not made["ids"].any()
    assert set(made["mask"]) <= {-3, -2}
    assert made["x"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "text",
    [
        "ids",
        "=ones",
        "ids=twos",
        "ids=randint",
        "ids=randint:1",
        "ids=randint:a:b",
        "ids=randint:--1:5",
        "ids=randint:²:5",
    ],
)
def test_fill_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(MisuseError, match="write NAME= and normal, ones, zeros, arange, or randint:LOW:HIGH"):
        parse_fills([text])


def test_fill_without_numbers_or_input_is_refused() -> None:
    with pytest.raises(MisuseError, match=r"LOW \(3\) must be less than HIGH \(3\)"):
        parse_fills(["ids=randint:3:3"])
    with pytest.raises(MisuseError, match=r"from -2\^63 to 2\^63"):
        parse_fills(["ids=randint:0:99999999999999999999"])
    with pytest.raises(MisuseError, match="--fill names 'nothing', and there is no such input: there are ids, mask"):
        make_inputs(INPUTS, fills=parse_fills(["nothing=ones"]))


def sizes_of(inputs: list[Tensor], *texts: str) -> dict[str, list[int] | None]:
    return {tensor.name: tensor.sample_shape for tensor in resized(inputs, parse_shapes(texts))}


def test_shapes_are_those_asked_for_and_others_follow_by_their_symbols() -> None:
    inputs = [
        Tensor("ids", "int64", ["b", "t"], [1, 16]),
        Tensor("mask", "int64", ["b", "p + t"], [1, 20]),
        Tensor("past", "float32", ["b", 4, "p", 8], [1, 4, 4, 8]),
        Tensor("one", "float32", ["b", "q"], [1, 7]),
        Tensor("any", "float32", None, [3]),
    ]
    planned = {tensor.name: tensor.sample_shape for tensor in inputs}
    assert sizes_of(inputs) == planned
    assert sizes_of(INPUTS)["mask"] == [4], "one symbol may have several planned sizes"
    assert sizes_of(inputs, "ids:2x5") == {
        **planned,
        "ids": [2, 5],
        "mask": [2, 9],
        "past": [2, 4, 4, 8],
        "one": [2, 7],
    }
    assert sizes_of(inputs, "past:1x4x0x8,any:[]") == {**planned, "past": [1, 4, 0, 8], "mask": [1, 16], "any": []}
    assert sizes_of(inputs, "ids:1x5,mask:1x6")["mask"] == [1, 6]
    with pytest.raises(MisuseError, match="--shapes names 'idz', and the package has no such input: it has ids, mask"):
        sizes_of(inputs, "idz:1")
    with pytest.raises(MisuseError, match="--shapes gives 'ids' as 5, and the model takes b x t"):
        sizes_of(inputs, "ids:5")


def test_commands_take_fills(decoder: Path, tmp_path: Path) -> None:
    package, fill = str(tmp_path / "package"), ["--fill", "input_ids=randint:90:96"]
    found = CliRunner().invoke(app, ["compile", str(decoder), "-o", package, "-d", "2xcpu", *fill])
    assert found.exit_code == 0, found.output
    ids = next(tensor for tensor in read_manifest(tmp_path / "package").inputs if tensor.name == "input_ids")
    assert ids.fill == Fill("randint", 90, 96)
    check = ["check", package, "-m", str(decoder), "--no-memory"]
    assert CliRunner().invoke(app, [*check, "--fill", "input_ids=ones"]).exit_code == 0
    # The model has 96 rows for tokens: that it fails says that it got what was asked for.
    assert CliRunner().invoke(app, [*check, "--fill", "input_ids=randint:96:97"]).exit_code != 0
    shown = CliRunner().invoke(app, [*check, "--shapes", "input_ids:2x5", "--json"])
    assert len(json.loads(shown.output)["outputs"][0]["where"]) == 3
    bench = ["bench", package, "--runs", "1", "--no-memory"]
    assert CliRunner().invoke(app, [*bench, "--shapes", "input_ids:2x5"]).exit_code == 0
    assert CliRunner().invoke(app, [*bench, "--shapes", "nothing:2x5"]).exit_code != 0
    assert CliRunner().invoke(app, [*bench, "--fill", "input_ids=zeros"]).exit_code == 0
    np.savez(tmp_path / "in.npz", x=np.zeros(1))
    both = CliRunner().invoke(app, [*check, "--inputs", str(tmp_path / "in.npz"), *fill])
    assert isinstance(both.exception, MisuseError)
