"""The contents of model repositories for Triton."""

from __future__ import annotations

import json
from pathlib import Path

import onnx_ir as ir
import pytest

from splitc.compiler import compile_model, plan_model
from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest import Tensor
from splitc.runtime.package.verification import STAMP
from splitc.runtime.serving.interface import Interface
from splitc.runtime.serving.triton_config import model_config
from splitc.runtime.serving.triton_repository import choose_rows
from tests.conftest import LAYER
from tests.helpers.command import splitc


def test_decoder_is_a_model_of_sequences(package: Path, tmp_path: Path) -> None:
    found = splitc("export", "triton", package, "-o", tmp_path, "--idle", 60, "--capacity", 512, "--json")
    folder = tmp_path / package.name
    assert json.loads(found.stdout) == {"server": "triton", "folders": [str(folder)]}
    assert (folder / "config.pbtxt").read_text() == (
        f'name: "{package.name}"\n'
        'backend: "python"\n'
        "max_batch_size: 0\n"
        'input { name: "input_ids" data_type: TYPE_INT64 dims: [ -1, -1 ] }\n'
        'input { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1, -1 ] }\n'
        'input { name: "position_ids" data_type: TYPE_INT64 dims: [ -1, -1 ] }\n'
        'output { name: "logits" data_type: TYPE_FP32 dims: [ -1, -1, 96 ] }\n'
        "sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 64 } }\n"
        "instance_group { kind: KIND_CPU count: 1 }\n"
    )
    serving = json.loads((folder / "1" / "serving.json").read_text())
    assert (serving["sequences"], serving["capacity"], serving["idle_seconds"]) == (True, 512, 60)
    compile((folder / "1" / "model.py").read_text(), "model.py", "exec")
    for path in (path for path in package.rglob("*") if path.is_file() and path.name != STAMP):
        linked = folder / "1" / "package" / path.relative_to(package)
        assert linked.stat().st_ino == path.stat().st_ino, "weights are on the disk once"


def test_rows_are_joined_where_they_do_not_meet(package: Path, tmp_path: Path) -> None:
    splitc("export", "triton", package, "-o", tmp_path, "--no-sequences")
    text = (tmp_path / package.name / "config.pbtxt").read_text()
    assert "max_batch_size: 32\n" in text and "dynamic_batching { }" in text
    assert 'input { name: "past_key_values.0.key" data_type: TYPE_FP32 dims: [ 2, -1, 16 ] }' in text
    splitc("export", "triton", package, "-o", tmp_path, "--no-sequences", "--name", "single", "--batch", 0)
    assert "max_batch_size: 0\n" in (tmp_path / "single" / "config.pbtxt").read_text()


def test_model_that_is_there_is_not_written_over(package: Path, tmp_path: Path) -> None:
    splitc("export", "triton", package, "-o", tmp_path)
    before = sorted(tmp_path.rglob("*"))
    found = splitc("export", "triton", package, "-o", tmp_path, code=2)
    assert "exists already: remove it, or choose another name" in found.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_killed_export_left_is_removed_by_the_next(package: Path, tmp_path: Path) -> None:
    (tmp_path / ".decoder.partial" / "1").mkdir(parents=True)
    splitc("export", "triton", package, "-o", tmp_path, "--name", "decoder")
    assert [path.name for path in tmp_path.iterdir()] == ["decoder"]


def test_servers_and_options_without_effect_are_refused(package: Path, tmp_path: Path) -> None:
    for server in ("tritn", "triton --ensemble"):
        found = splitc("export", server, package, "-o", tmp_path, code=2)
        assert f"can't export for '{server}': there are triton, mlserver, openai, genai" in found.stderr
    found = splitc("export", "mlserver", package, "-o", tmp_path, "--ensemble", code=2)
    assert "--ensemble has no effect with 'mlserver'" in found.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["triton", "--batch", "4"], "--batch 4 is for requests that are no sequences: leave it out, or add --no-seq"),
        (
            ["triton", "--no-sequences", "--capacity", "64"],
            "--capacity 64 is for requests that are sequences",
        ),
        (["mlserver", "--no-sequences", "--capacity", "64"], "--capacity 64 is for requests that are sequences"),
        (["triton", "-d", "cpu0"], "the package has 3 ranks, and 1 device is named for it"),
        (["mlserver", "-d", "cpu0"], "the package has 3 ranks, and 1 device is named for it"),
    ],
)
def test_what_no_session_would_do_is_not_exported(options: list[str], said: str, package: Path, tmp_path: Path) -> None:
    server, *others = options
    assert said in splitc("export", server, package, "-o", tmp_path, *others, code=2).stderr
    assert not list(tmp_path.iterdir())


def test_rows_that_meet_are_not_joined(tmp_path: Path) -> None:
    body = "g (float[n,4] x) => (float y) { y = ReduceSum <keepdims: int = 0> (x) }"
    ir.save(ir.from_onnx_text(f'<ir_version: 8, opset_import: ["" : 17]> {body}'), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["cpu0"], LAYER), tmp_path / "total")
    splitc("export", "triton", tmp_path / "total", "-o", tmp_path / "repository")
    config = (tmp_path / "repository" / "total" / "config.pbtxt").read_text()
    assert "max_batch_size: 0" in config and "dynamic" not in config
    assert 'output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }' in config, "Triton has no scalars"
    for options, said in (
        (("--batch", 4), "can't be batched, as their rows are not independent"),
        (("--sequences",), "has no states"),
    ):
        found = splitc("export", "triton", tmp_path / "total", "-o", tmp_path / "other", *options, code=2)
        assert said in found.stderr
    assert not (tmp_path / "other").exists(), "nothing half written"


def test_input_of_all_rows_keeps_requests_from_being_batched(tmp_path: Path) -> None:
    """As the timestep of a U-Net."""
    body = "g (float[n,4] x, float step) => (float[n,4] y) { y = Mul(x, step) }"
    ir.save(ir.from_onnx_text(f'<ir_version: 8, opset_import: ["" : 17]> {body}'), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["cpu0"], LAYER), tmp_path / "unet")
    found = splitc("export", "triton", tmp_path / "unet", "-o", tmp_path / "other", "--batch", 4, code=2)
    assert "the first, dynamic axis of 'step'" in found.stderr


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (Tensor("x", "bfloat16", [1]), "'x' is bfloat16"),
        (Tensor("x", "float32", None), "'x' may have any number of dimensions"),
    ],
)
def test_what_triton_can_not_have_is_refused(tensor: Tensor, said: str) -> None:
    with pytest.raises(MisuseError, match=said):
        model_config("m", Interface([], [], [tensor]))


def test_names_are_quoted_and_optional_inputs_marked() -> None:
    text = model_config('a"b', Interface([], [Tensor("x\\y", "bool", [2])], []))
    assert text.startswith('name: "a\\"b"\n')
    assert 'input { name: "x\\\\y" data_type: TYPE_BOOL dims: [ 2 ] optional: true }' in text


def test_rows_are_those_of_the_engines() -> None:
    assert (choose_rows(None, None, "m"), choose_rows(0, None, "m"), choose_rows(8, None, "m")) == (0, 32, 8)
    assert choose_rows(0, 100, "m") == 100
    with pytest.raises(MisuseError, match="built for 8 rows at most"):
        choose_rows(8, 9, "m")
