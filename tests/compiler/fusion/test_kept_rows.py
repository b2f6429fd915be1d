"""Requests choose the tokens whose logits are computed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.errors import FeedError
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.requests.sequence import StateSequence
from splitc.runtime.serving.stage_engines import find_stages, write_stage_file
from tests.conftest import DECODER, assert_close, run_whole
from tests.helpers.adapters import random_pairs, write_peft
from tests.helpers.command import splitc
from tests.helpers.feeds import decoder_feeds
from tests.helpers.packages import MODES, compile_mode
from tests.helpers.written_decoder import without_states

# What may stand between the last product and the logits, and why rows can't be chosen (None if they can).
APART = "node_logits does not compute its rows independently"
ENDS: dict[str, tuple[str, str | None]] = {
    "a softcap": ("t = Tanh (product) logits = Mul (t, two)", None),
    "log probabilities": ("logits = LogSoftmax <axis = -1> (product)", None),
    "turned twice": ("t = Transpose <perm = [0, 2, 1]> (product) logits = Transpose <perm = [0, 2, 1]> (t)", None),
    "a softmax over tokens": ("logits = Softmax <axis = 1> (product)", APART),
    "another reader": ("s = ReduceMax (product) d = Tanh (product) logits = Mul (d, s)", "are read by other nodes"),
    "a shape": ("s = Shape (ids) v = Shape <start = 2> (product) all = Concat <axis = 0> (s, v) "
                "logits = Expand (product, all)", None),
}  # fmt: skip


def save(model: onnx.ModelProto, path: Path, **weights: tuple[int, ...]) -> None:
    """Write a model with random weights of these shapes. Its nodes are named after their first output."""
    random = np.random.default_rng(0)
    for name, shape in weights.items():
        array = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for node in model.graph.node:
        node.name = f"node_{node.output[0]}"
    onnx.save(model, path)


def write(nodes: str, path: Path) -> None:
    """Write a model with a state, whose logits come from a product by these nodes."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 18]>
        g (int64[batch, tokens] ids, float[batch, past, 8] old)
            => (float[batch, tokens, 40] logits, float[batch, all, 8] new)
        <float two = {{2}}> {{
            hidden = Gather (table, ids)
            new = Concat <axis = 1> (old, hidden)
            product = MatMul (hidden, weight)
            {nodes}
        }}"""
    )
    save(model, path, table=(40, 8), weight=(8, 40))


GIVEN: dict[str, Any] = {"ids": np.arange(10).reshape(2, 5), "old": np.ones((2, 3, 8), np.float32)}


@pytest.mark.parametrize("name", ENDS)
def test_what_may_follow_the_last_product(tmp_path: Path, name: str) -> None:
    nodes, why = ENDS[name]
    write(nodes, tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="layer"))
    (outcome,) = [outcome for outcome in plan.analysis.outcomes if outcome.kind == "rows"]
    assert (outcome.operator is None) == (why is not None) and (why or "") in (outcome.why or "")
    compile_model(plan, tmp_path / "package", verify=False)
    expected = run_whole(tmp_path / "model.onnx", GIVEN)
    with Session(tmp_path / "package") as session:
        assert_close(session.run(GIVEN), expected)
        assert [tensor.name for tensor in session.optional] == ([] if why else ["logits_to_keep"])
        if why is None:
            chosen = session.run({**GIVEN, "logits_to_keep": np.array([4, 0])})
            assert_close(chosen, {**expected, "logits": expected["logits"][:, [4, 0]]})


@pytest.mark.parametrize("mode", MODES)
def test_chosen_rows_are_those_of_the_whole_model(decoder: Path, mode: str) -> None:
    """In requests of their own, and in sequences. Without a choice, all are computed."""
    given = decoder_feeds(2, 4, 0)
    expected = run_whole(decoder, given)
    with Session(compile_mode(decoder, mode)) as session:
        assert_close(session.run(given), expected, 2e-5)
        for rows in ([3], [-1], [0, 2], [1, 1, 3, 0, 2]):
            outputs = session.run({**given, "logits_to_keep": np.array(rows)})
            assert_close(outputs, {**expected, "logits": expected["logits"][:, rows]}, 2e-5)
        with session.start(16) as sequence:
            outputs = sequence.run({**without_states(given), "logits_to_keep": np.array([3, 0])})
            assert_close(outputs, {"logits": expected["logits"][:, [3, 0]]}, 2e-5)
        for rows, wrong in (([4], 4), ([0, -5], -5)):
            with pytest.raises(FeedError, match=f"'logits_to_keep' has the token {wrong}, and the request has 4"):
                session.run({**given, "logits_to_keep": np.array(rows)})


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_rows_of_a_layer_with_a_slot_are_chosen(decoder: Path, tmp_path: Path, mode: str) -> None:
    """Its product and the slot's both have rows of the logits. All were computed, also without an adapter."""
    plan = plan_model(decoder, "2xcpu", Request(split_mode=mode, lora_slots=4))
    manifest = compile_model(plan, tmp_path / "package", verify=False)
    slot = max(manifest.slots, key=lambda slot: slot.outputs)
    pairs = random_pairs({slot.names[0]: (slot.inputs, slot.outputs)})
    given, rows = decoder_feeds(2, 4, 0), np.array([3, 1])
    with Session(tmp_path / "package") as session:
        session.adapters.load("style", write_peft(tmp_path / "style", pairs))
        plain = session.run(given)
        assert_close(plain, run_whole(decoder, given), 2e-5)
        for expected, adapters in ((plain, None), (session.run(given, adapters="style"), "style")):
            outputs = session.run({**given, "logits_to_keep": rows}, adapters=adapters)
            assert_close(outputs, {**expected, "logits": expected["logits"][:, rows]}, 2e-5)
        assert np.abs(expected["logits"] - plain["logits"]).max() > 0.1


def test_a_decoder_counts_its_own_tokens(tmp_path: Path) -> None:
    """Its encoder's length, which is the same where sizes are planned, comes first among the inputs."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18]>
        g (int64[batch, source] seen, int64[batch, target] ids) => (float[batch, target, 40] logits)
        {
            keys = Gather (table, seen)
            mean = ReduceMean <keepdims = 1> (keys, axis)
            own = Gather (table, ids)
            hidden = Add (own, mean)
            logits = MatMul (hidden, weight)
        }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axis"))
    save(model, tmp_path / "model.onnx", table=(40, 8), weight=(8, 40))
    request = Request(split_mode="layer", shapes={"seen": (2, 6), "ids": (2, 6)})
    compile_model(plan_model(tmp_path / "model.onnx", ["2xcpu"], request), tmp_path / "package")
    kept = read_manifest(tmp_path / "package").kept_rows
    assert kept is not None and kept.reads == ("ids", 1)
    given = {"seen": np.ones((2, 9), np.int64), "ids": np.arange(8).reshape(2, 4)}
    with Session(tmp_path / "package") as session:
        assert_close(session.run(given), run_whole(tmp_path / "model.onnx", given))


def test_check_compares_the_chosen_rows(decoder: Path, tmp_path: Path) -> None:
    package = compile_mode(decoder, "tensor")
    given: dict[str, Any] = {**decoder_feeds(2, 4, 0), "logits_to_keep": np.array([1, -1])}
    np.savez(tmp_path / "feeds.npz", **given)
    checked = json.loads(splitc("check", package, decoder, "--inputs", tmp_path / "feeds.npz", "--json").stdout)
    assert [output["passed"] for output in checked["outputs"]] == [True] * (1 + 2 * DECODER.layers)


def test_generate_computes_the_last_tokens_logits(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    run = StateSequence.run

    def recorded(self: StateSequence, feeds: Any) -> Any:
        outputs = run(self, feeds)
        computed.append(outputs["logits"].shape[1])
        return outputs

    monkeypatch.setattr(StateSequence, "run", recorded)
    tokens = [3, 14, 15, 92, 65]
    with Session(compile_mode(decoder, "tensor")) as session:
        made = list(session.generate(tokens, max_new_tokens=4, prompt_chunk=3))
    assert computed == [1] * 5, "of two parts of the prompt, and of three tokens"
    for _ in range(4):
        feeds = decoder_feeds(1, len(tokens), 0)
        feeds["input_ids"] = np.array([tokens])
        tokens = [*tokens, int(run_whole(decoder, feeds)["logits"][0, -1].argmax())]
    assert made == tokens[5:]


@pytest.mark.parametrize(("columns", "name", "chosen"), [(40, "y", True), (30, "y", False), (30, "Logits.1", True)])
def test_models_without_states_are_known_by_their_vocabulary(
    tmp_path: Path, columns: int, name: str, chosen: bool
) -> None:
    """A wide output may also be the cache of a model that reads a prompt."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 18]>
        g (int64[batch, tokens] ids) => (float[batch, tokens, {columns}] "{name}", float[batch, tokens, 20] cache)
        {{
            hidden = Gather (table, ids)
            cache = MatMul (hidden, keys)
            "{name}" = MatMul (hidden, weight)
        }}"""
    )
    save(model, tmp_path / "model.onnx", table=(40, 8), keys=(8, 20), weight=(8, columns))
    compile_model(plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="tensor")), tmp_path / "package")
    kept = read_manifest(tmp_path / "package").kept_rows
    assert (None if kept is None else kept.outputs) == ({name: 1} if chosen else None)
    given = {"ids": np.arange(8).reshape(2, 4)}
    expected = run_whole(tmp_path / "model.onnx", given)
    with Session(tmp_path / "package") as session:
        assert_close(session.run(given), expected)
        if chosen:
            outputs = session.run({**given, "logits_to_keep": np.array([2])})
            assert_close(outputs, {**expected, name: expected[name][:, [2]]})


def test_other_programs_get_engines_that_compute_all(tmp_path: Path) -> None:
    write(ENDS["a softcap"][0], tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="layer")), tmp_path / "package")
    manifest, values = read_manifest(tmp_path / "package"), dict(GIVEN)
    shutil.copytree(tmp_path / "package", tmp_path / "exported")
    for stage in find_stages(manifest, "a server"):
        (tmp_path / "exported" / stage.path).unlink()
        write_stage_file(manifest, tmp_path / "package" / stage.path, tmp_path / "exported" / stage.path)
        session = ort.InferenceSession(str(tmp_path / "exported" / stage.path), providers=["CPUExecutionProvider"])
        assert {value.name for value in session.get_inputs()} == set(stage.inputs)
        outputs = session.run(stage.outputs, {name: values[name] for name in stage.inputs})
        values.update(zip(stage.outputs, outputs, strict=True))
    expected = run_whole(tmp_path / "model.onnx", GIVEN)
    assert_close({name: values[name] for name in expected}, expected)
