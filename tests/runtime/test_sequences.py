"""Stateful sequences: states stay on their ranks, and the tokens are those of the unsplit model in a plain loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from typer.testing import CliRunner

from models.llama import Size, build
from models.llama_fused import build as build_fused
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.cli.commands import app
from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeBackend
from splitc.runtime.errors import EngineError, MisuseError, SplitcError
from splitc.runtime.generate.sampling import Sampling, choose_token
from splitc.runtime.generate.tokens import Timings
from tests.conftest import DECODER, LAYER, Arrays, assert_close, decoder_feeds, run_whole, until

PROMPT = [5, 17, 33, 2, 90, 41, 8]
MODES = {
    "layer": ("3xcpu", Request()),
    "row": ("3xcpu", Request(split_mode="row", row_min=16)),
    "tensor": ("2xcpu", Request(split_mode="tensor")),
    "more ranks than heads": ("3xcpu", Request(split_mode="tensor")),
    "tensor in layers": ("4xcpu", Request(split_mode="tensor", pipeline_stages=2)),
    "one device": ("cpu0", Request()),
}


def plain_loop(model: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of the unsplit model, its cache fed by hand."""
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    outputs = [value.name for value in session.get_outputs()]
    cache: Arrays = {}
    for value in session.get_inputs():
        if value.name.startswith("past"):
            cache[value.name] = np.zeros((1, DECODER.kv_heads, 0, DECODER.head), np.float32)
    tokens, new = list(prompt), list(prompt)
    for _ in range(count):
        total = len(tokens)
        feeds: Arrays = {
            "input_ids": np.array([new], np.int64),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(total - len(new), total)[None],
        }
        results = dict(zip(outputs, session.run(None, {**feeds, **cache})))
        cache = {name: results[name.replace("past_key_values", "present")] for name in cache}
        new = [int(results["logits"][0, -1].argmax())]
        tokens += new
    return tokens[len(prompt) :]


@pytest.fixture(params=MODES, scope="module")
def package_of(request: pytest.FixtureRequest, decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    devices, asked = MODES[request.param]
    package = tmp_path_factory.mktemp("package") / "package"
    compile_model(plan_model(decoder, [devices], asked), package)
    return package


@pytest.mark.parametrize("chunk", [512, 3])
def test_200_tokens_are_those_of_a_plain_loop(package_of: Path, decoder: Path, chunk: int) -> None:
    with Session(package_of, threads=1) as session:
        assert len(session.resident_states) == 2 * DECODER.layers
        timings = Timings()
        found = list(session.generate(PROMPT, max_new_tokens=200, prompt_chunk=chunk, timings=timings))
    assert found == plain_loop(decoder, PROMPT, 200)
    assert (timings.prompt_tokens, timings.tokens) == (len(PROMPT), 199)


def test_prompt_through_a_package_of_its_own(package: Path, decoder: Path, tmp_path: Path) -> None:
    """The same model without caches to go on from: what exporters write as the model for the prompt."""
    model = ir.load(decoder)
    for value in [value for value in model.graph.inputs if (value.name or "").startswith("past")]:
        (join,) = [use.node for use in value.uses()]
        present, new = join.outputs[0], ir.node("Identity", [join.inputs[1]]).outputs[0]
        new.name, new.type, new.shape, present.name = present.name, present.type, present.shape, "unused"
        model.graph.insert_before(join, new.producer())
        present.replace_all_uses_with(new, replace_graph_outputs=True)
        model.graph.remove(join, safe=True)
        model.graph.inputs.remove(value)
    ir.save(model, decoder.with_name("prefill.onnx"))
    request = Request(
        split_mode="layer", shapes={"input_ids": (1, 7), "attention_mask": (1, 7), "position_ids": (1, 7)}
    )
    compile_model(plan_model(decoder.with_name("prefill.onnx"), ["2xcpu"], request), tmp_path / "prefill")
    with Session(package) as session, Session(tmp_path / "prefill") as prefill:
        assert list(session.generate(PROMPT, max_new_tokens=30, prefill=prefill)) == plain_loop(decoder, PROMPT, 30)
    found = CliRunner().invoke(app, ["generate", str(package), "--prompt-ids", "1,2", "--prefill", str(package)])
    assert isinstance(found.exception, SplitcError)


def test_states_do_not_go_to_the_caller(package_of: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(package_of, threads=1) as session, session.start() as sequence:
        feeds = decoder_feeds(1, 4, 0)
        fed = {name: array for name, array in feeds.items() if not name.startswith("past")}
        sequence.run(fed)
        moved: list[int] = []
        for name in ("upload", "download"):
            known = getattr(OnnxRuntimeBackend, name)

            def count(self: Any, value: Any, name: str = name, known: Any = known) -> Any:
                result = known(self, value)
                moved.extend(each.nbytes for each in ([value] if name == "upload" else result.values()))
                return result

            monkeypatch.setattr(OnnxRuntimeBackend, name, count)
        outputs = sequence.run({**fed, "attention_mask": np.ones((1, 8), np.int64)})
        assert list(outputs) == ["logits"]
        ranks = len(session.manifest.ranks)
        assert sum(moved) <= outputs["logits"].nbytes + 3 * ranks * 8 * 8, "only what is fed and the logits move"


def test_sequences_do_not_disturb_each_other(package_of: Path, decoder: Path) -> None:
    prompts = [PROMPT, PROMPT[::-1], PROMPT[2:]]
    with Session(package_of, threads=1) as session:
        streams = [session.generate(prompt, max_new_tokens=20) for prompt in prompts]
        found = [list(tokens) for tokens in zip(*zip(*streams))]
    assert found == [plain_loop(decoder, prompt, 20) for prompt in prompts]


def test_sequence_ends_with_its_first_failure(package_of: Path) -> None:
    feeds = {name: array for name, array in decoder_feeds(1, 4, 0).items() if not name.startswith("past")}
    wrong = {**feeds, "attention_mask": np.ones((1, 3), np.int64)}
    with Session(package_of, threads=1) as session:
        sequence = session.start()
        sequence.run(feeds)
        with pytest.raises(EngineError):
            sequence.run(wrong)
        with pytest.raises(SplitcError, match="states are lost: start another one"):
            sequence.run(feeds)
        sequence.close()
        with session.start() as another:
            another.run(feeds)
        until(lambda: not any(worker.sequences for worker in session._workers))


def test_loaded_states_may_change_later(package_of: Path, decoder: Path) -> None:
    feeds = decoder_feeds(1, 2, 5)
    states = {name: array.copy() for name, array in feeds.items() if name.startswith("past")}
    with Session(package_of, threads=1) as session, session.start() as sequence:
        sequence.load(states)
        for array in states.values():
            array[...] = 0
        found = sequence.run({name: array for name, array in feeds.items() if name not in states})
    assert_close(found, {"logits": run_whole(decoder, feeds)["logits"]}, 2e-5)


@pytest.mark.parametrize("runs", [0, 1])
def test_closed_sequence_refuses(package: Path, runs: int) -> None:
    feeds = {name: array for name, array in decoder_feeds(1, 4, 0).items() if not name.startswith("past")}
    with Session(package, threads=1) as session:
        sequence = session.start()
        for _ in range(runs):
            sequence.run(feeds)
        sequence.close()
        sequence.close()
        with pytest.raises(SplitcError, match="this sequence is closed"):
            sequence.run(feeds)
        with pytest.raises(SplitcError, match="this sequence is closed"):
            sequence.load({})
        until(lambda: not any(worker.sequences for worker in session._workers))


def test_states_of_a_first_run_that_failed_go_too(package_of: Path) -> None:
    feeds = {name: array for name, array in decoder_feeds(1, 4, 0).items() if not name.startswith("past")}
    with Session(package_of, threads=1) as session:
        engine = session._workers[-1]._program.engines[-1]

        def fail(*_: Any) -> Any:
            raise EngineError("on purpose")

        engine.run = fail  # type: ignore[method-assign]
        with session.start() as sequence, pytest.raises(EngineError, match="on purpose"):
            sequence.run(feeds)
        until(lambda: not any(worker.sequences for worker in session._workers))


def write_lstm(model: Path) -> None:
    """An LSTM that is fed step by step: x goes in, y comes out, h and c become hn and cn."""
    from tests.helpers.blocks import Block, save

    b = Block()
    x = b.data("x", (3, 2, 6), ["t", "n", 6])
    states = [b.data(name, (1, 2, 5), [1, "n", 5]) for name in ("h", "c")]
    wide, deep = b.w("W", 1, 20, 6), b.w("R", 1, 20, 5)
    outputs = b.ops("LSTM", x, wide, deep, None, None, *states, outputs=3, hidden_size=5)
    b.give(outputs[0], "y", ["t", 1, "n", 5])
    b.give(outputs[1], "hn", [1, "n", 5])
    b.give(outputs[2], "cn", [1, "n", 5])
    save(b.model(), model)


def test_recurrent_states_are_states_too(tmp_path: Path) -> None:
    """They stay, and begin as zeros."""
    model = tmp_path / "model.onnx"
    write_lstm(model)
    compile_model(plan_model(model, ["cpu0"], LAYER), tmp_path / "package")
    whole = ort.InferenceSession(str(model))
    steps = [np.random.default_rng(number).random((1 + number, 2, 6), np.float32) for number in range(4)]
    h = c = np.zeros((1, 2, 5), np.float32)
    with Session(tmp_path / "package") as session, session.start() as sequence:
        assert {(state.input, state.output, state.grows) for state in session.resident_states} == {
            ("h", "hn", None),
            ("c", "cn", None),
        }
        for step in steps:
            expected, h, c = whole.run(None, {"x": step, "h": h, "c": c})
            np.testing.assert_allclose(sequence.run({"x": step})["y"], expected, atol=1e-6)


def test_model_without_states_has_no_sequences(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x) => (int64[m] y) { y = Shape(x) }'
    ir.save(ir.from_onnx_text(text), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["cpu0"], LAYER), tmp_path / "package")
    with Session(tmp_path / "package") as session:
        with pytest.raises(MisuseError, match="has no states"):
            session.start()
        with pytest.raises(MisuseError, match=r"can't generate with model\.onnx: it takes x"):
            list(session.generate([1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "hello"], "needs a --tokenizer"),
        (["--prompt-ids", "1,a"], "can't read --prompt-ids 1,a"),
        (["--prompt-ids", "1,5000"], "the token 5000, and the model has a vocabulary of 96"),
        (["--prompt-ids", "1", "--temperature", "-1"], "temperature -1"),
        (["--prompt-ids", "1", "--tokenizer", "nowhere"], "no such tokenizer"),
        ([], "give the prompt as --prompt"),
    ],
)
def test_misuse_of_generate_is_said(package: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["generate", str(package), *arguments])
    assert isinstance(result.exception, MisuseError)
    assert message in str(result.exception)


def test_generate_on_the_command_line(package: Path, decoder: Path) -> None:
    prompt = ",".join(map(str, PROMPT))
    result = CliRunner().invoke(app, ["generate", str(package), "--prompt-ids", prompt, "-n", "8"])
    assert result.exit_code == 0
    expected = plain_loop(decoder, PROMPT, 8)
    assert result.stdout.split()[:8] == [str(token) for token in expected]
    stopped = CliRunner().invoke(app, ["generate", str(package), "--prompt-ids", prompt, "--stop", str(expected[2])])
    assert stopped.stdout.split()[: expected.index(expected[2])] == [
        str(t) for t in expected[: expected.index(expected[2])]
    ]


def test_sampling_follows_the_chances() -> None:
    generator = np.random.default_rng(0)
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    drawn = [choose_token(logits, Sampling(temperature=1.0), generator) for _ in range(4000)]
    np.testing.assert_allclose(np.bincount(drawn) / 4000, [0.5, 0.3, 0.15, 0.05], atol=0.03)
    assert {choose_token(logits, Sampling(temperature=1.0, top_k=2), generator) for _ in range(200)} == {0, 1}
    assert {choose_token(logits, Sampling(temperature=1.0, top_p=0.6), generator) for _ in range(200)} == {0, 1}
    assert {choose_token(logits, Sampling(temperature=1.0, top_p=0.4), generator) for _ in range(200)} == {0}
    assert choose_token(logits, Sampling(), generator) == 0


SMALL = Size(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=96, vocabulary=50)


def tokens_of(model: ir.Model, folder: Path, count: int, **options: Any) -> list[int]:
    path = folder / "model.onnx"
    save(model, path)
    compile_model(plan_model(path, ["2xcpu"], LAYER), folder / "package")
    with Session(folder / "package") as session:
        return list(session.generate([3, 1, 4, 1, 5], max_new_tokens=count, **options))


def test_caches_with_room_give_the_tokens_of_caches_that_grow(tmp_path: Path) -> None:
    """Whether the room is the graph's, or ours: masks are as long as the caches from the beginning then."""
    growing = tokens_of(build(SMALL), tmp_path / "growing", 20)
    assert tokens_of(build(replace(SMALL, capacity=32)), tmp_path / "fixed", 20) == growing
    assert len(set(growing)) > 3
    fused = build_fused(SMALL)
    whole = tokens_of(fused, tmp_path / "fused", 20)
    assert tokens_of(build_fused(SMALL), tmp_path / "pieces", 20, prompt_chunk=1) == whole


def test_full_cache_is_said(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="the model has room for 8 tokens, and the sequence comes to 9"):
        tokens_of(build(replace(SMALL, capacity=8)), tmp_path, 20)
