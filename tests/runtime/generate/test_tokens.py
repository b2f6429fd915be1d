"""Generated tokens are those of the unsplit model in a simple loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from msgspec.structs import replace as replace_struct
from typer.testing import CliRunner

from models.llama import Size, build
from models.llama_fused import build as build_fused
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.cli.app import app
from splitc.runtime.errors import EngineError, MisuseError
from splitc.runtime.generate import conversation
from splitc.runtime.generate.capacity import find_capacity
from splitc.runtime.generate.conversation import round_capacity
from splitc.runtime.generate.signature import LanguageSignature
from splitc.runtime.generate.tokens import Timings, generate
from splitc.runtime.package.manifest import Manifest, Role, Tensor
from splitc.runtime.package.states import State
from splitc.runtime.requests import sequence as sequences
from splitc.runtime.requests.empty_states import empty_states
from tests.conftest import DECODER, LAYER, until
from tests.helpers.folders import text_encoder
from tests.helpers.greedy import plain_loop
from tests.helpers.packages import KINDS, compile_mode
from tests.helpers.workers import workers_of

PROMPT = [5, 17, 33, 2, 90, 41, 8]


@pytest.fixture(params=KINDS)
def package_of(request: pytest.FixtureRequest, decoder: Path) -> Path:
    """A package in each split mode."""
    return compile_mode(decoder, request.param)


def test_tokens_are_those_of_a_plain_loop(package_of: Path, decoder: Path) -> None:
    """Also after a prompt that is read in chunks, whose errors would show in the first tokens."""
    expected = plain_loop(decoder, PROMPT, 24)
    with Session(package_of, threads=1) as session:
        assert len(session.manifest.resident_states) == 2 * DECODER.layers
        timings = Timings()
        assert list(session.generate(PROMPT, max_new_tokens=24, timings=timings)) == expected
        assert (timings.prompt_tokens, timings.tokens) == (len(PROMPT), 23)
        timings = Timings()
        assert list(session.generate(PROMPT, max_new_tokens=8, prompt_chunk=3, timings=timings)) == expected[:8]
        assert (timings.prompt_tokens, timings.tokens) == (len(PROMPT), 7)


def test_prompts_may_be_arrays(package: Path) -> None:
    """As tokenizers return them, but without a batch axis."""
    with Session(package, threads=1) as session:
        expected = list(session.generate(PROMPT, max_new_tokens=4))
        for dtype in ("i4", "i8"):
            assert list(session.generate(np.array(PROMPT, dtype), max_new_tokens=4)) == expected
        for wrong in ([PROMPT], np.array(PROMPT, "f4"), "text"):
            with pytest.raises(MisuseError, match="a prompt is a list of token ids"):
                list(session.generate(wrong, max_new_tokens=4))
        for unknown in (-1, 96, 2**40, 2**63, 2**80):
            with pytest.raises(MisuseError, match=f"has the token {unknown}, and the model has a vocabulary of 96"):
                list(session.generate([1, unknown, -1], max_new_tokens=4))
        with pytest.raises(MisuseError, match=r"sampling is a Sampling, such as .*, not 0\.7"):
            list(session.generate(PROMPT, sampling=0.7))


def test_numbers_that_the_models_type_lacks_are_refused() -> None:
    """If the model does not say its vocabulary's size: they would wrap to other tokens."""
    ids = Tensor("input_ids", "int32", [1, "n"])
    manifest: Any = SimpleNamespace(
        inputs=[ids], outputs=[Tensor("logits", "float32", [1, "n", 9])], states=[], lengths=[]
    )
    with pytest.raises(MisuseError, match="the token 4294967297, and the model takes numbers from 0, of type int32"):
        next(generate(SimpleNamespace(manifest=manifest), [2**32 + 1]))  # type: ignore[arg-type]


def test_prompt_through_a_package_of_its_own(package: Path, decoder: Path, tmp_path: Path) -> None:
    """The same model without caches as inputs: what exporters write as the model for the prompt."""
    model = ir.load(decoder)
    for value in [value for value in model.graph.inputs if (value.name or "").startswith("past")]:
        (join,) = [use.node for use in value.uses()]
        copied = ir.node("Identity", [join.inputs[1]])
        present, new = join.outputs[0], copied.outputs[0]
        new.name, new.type, new.shape, present.name = present.name, present.type, present.shape, "unused"
        model.graph.insert_before(join, copied)
        present.replace_all_uses_with(new, replace_graph_outputs=True)
        model.graph.remove(join, safe=True)
        model.graph.inputs.remove(value)
    ir.save(model, decoder.with_name("prefill.onnx"))
    request = Request(
        split_mode="layer", shapes={"input_ids": (1, 7), "attention_mask": (1, 7), "position_ids": (1, 7)}
    )
    compile_model(plan_model(decoder.with_name("prefill.onnx"), ["2xcpu"], request), tmp_path / "prefill", verify=False)
    with Session(package) as session, Session(tmp_path / "prefill") as prefill:
        assert list(session.generate(PROMPT, max_new_tokens=10, prefill=prefill)) == plain_loop(decoder, PROMPT, 10)
    # One that has caches reads a prompt with empty ones.
    alone, itself = (
        CliRunner().invoke(app, ["generate", str(package), "--prompt-ids", "1,2", *prefill]).stdout
        for prefill in ([], ["--prefill", str(package)])
    )
    assert alone == itself != ""


def test_model_that_gives_no_logits_is_refused(tmp_path: Path) -> None:
    """As a text-to-speech model, whose output has as many axes as logits."""
    save(text_encoder(1).model(), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["cpu0"]), tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session, pytest.raises(MisuseError, match="none of its outputs"):
        list(generate(session, [1, 2]))
    result = CliRunner().invoke(app, ["generate", str(tmp_path / "package"), "--prompt-ids", "1,2"])
    assert "can't generate with model.onnx: none of its outputs (last_hidden_state) is its logits" in str(
        result.exception
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "hello"], "needs a --tokenizer"),
        (["--prompt-ids", "1,a"], "can't read --prompt-ids 1,a"),
        (["--prompt-ids", "1,5000"], "the token 5000, and the model has a vocabulary of 96"),
        (["--prompt-ids", "1", "--temperature", "-1"], "temperature -1"),
        (["--prompt-ids", "1", "--stop", "96"], "the end token 96 is none of the model's tokens: they are 0 to 95"),
        (["--prompt-ids", "1", "--stop", "3", "--stop", "-1"], "the end token -1 is none of the model's tokens"),
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


def test_a_tokenizer_may_know_more_ends_than_the_model(package: Path, decoder: Path) -> None:
    expected = plain_loop(decoder, PROMPT, 8)
    with Session(package, threads=1) as session:
        ended = session.generate(PROMPT, max_new_tokens=8, other_stop_tokens=[96, expected[4]])
        assert list(ended) == expected[: expected.index(expected[4])]
        wrong: list[Any] = [5, ["w5"]]
        for stops in wrong:
            with pytest.raises(MisuseError, match="the tokens to end at are a list of token ids"):
                next(session.generate(PROMPT, stop_tokens=stops))


SMALL = Size(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=96, vocabulary=50)


def tokens_of(model: ir.Model, folder: Path, count: int, **options: Any) -> list[int]:
    path = folder / "model.onnx"
    save(model, path)
    compile_model(plan_model(path, ["2xcpu"], LAYER), folder / "package", verify=False)
    with Session(folder / "package") as session:
        return list(session.generate([3, 1, 4, 1, 5], max_new_tokens=count, **options))


def test_caches_with_room_give_the_tokens_of_caches_that_grow(tmp_path: Path) -> None:
    """With room in the graph or in the runtime: masks are as long as the caches from the start."""
    growing = tokens_of(build(SMALL), tmp_path / "growing", 20)
    assert tokens_of(build(replace(SMALL, capacity=32)), tmp_path / "fixed", 20) == growing
    assert len(set(growing)) > 3
    fused = build_fused(SMALL)
    whole = tokens_of(fused, tmp_path / "fused", 20)
    assert tokens_of(build_fused(SMALL), tmp_path / "pieces", 20, prompt_chunk=1) == whole


def test_more_than_the_room_is_refused_before_the_first_token(tmp_path: Path) -> None:
    """Without a limit by the caller, generation ends when the room is full."""
    save(build(replace(SMALL, capacity=8)), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["2xcpu"], LAYER), tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        tokens = list(session.generate([3, 1, 4, 1, 5]))
        assert len(tokens) == 4, "the last one is not read again"
        assert list(session.generate([3, 1, 4, 1, 5], max_new_tokens=4)) == tokens
        with pytest.raises(MisuseError, match=r"room for 8 tokens, .* and 5 new ones need 9 .* ask for 4"):
            next(session.generate([3, 1, 4, 1, 5], max_new_tokens=5))
        with pytest.raises(MisuseError, match="room for 8 tokens, and the prompt has 9"):
            next(session.generate([1] * 9))
        assert list(session.generate([1] * 8, max_new_tokens=1))


def test_rooms_that_the_manifest_knows() -> None:
    """From a table of positions, a fixed mask, or the engines' sizes: caches are read without the newest token."""
    ids = Tensor("input_ids", "int64", [1, "n"], max_shape=[1, 4])
    mask = Tensor("mask", "int64", [1, "total"], role=Role("mask"), max_shape=[1, 50])
    positions = Tensor("positions", "int64", [1, "n"], role=Role("positions", 40))
    cache = Tensor("past", "float32", [1, "past", 8], max_shape=[1, 30, 8])
    whole = LanguageSignature("input_ids", "mask", "positions", logits="logits")

    def room(inputs: list[Tensor], signature: LanguageSignature, *states: State) -> int | None:
        manifest: Any = SimpleNamespace(inputs=inputs, states=list(states), lengths=[])
        return find_capacity(manifest, signature)

    assert room([ids, mask, positions, cache], whole, State("past", "present", 1)) == 31
    assert room([ids, mask, positions, cache], whole, State("past", "present", 1, in_place=True)) == 30
    assert room([ids, mask, positions], whole) == 4
    longer = [ids, mask, positions, replace_struct(cache, max_shape=None)]
    assert room(longer, whole, State("past", "present", 1)) == 40
    assert room(longer, replace(whole, positions=None), State("past", "present", 1)) == 50
    assert (
        room(longer, LanguageSignature("input_ids", None, None, logits="logits"), State("past", "present", 1)) is None
    )


GROWING = {
    "layer": ("2xcpu", Request(split_mode="layer")),
    "tensor": ("2xcpu", Request(split_mode="tensor")),
    "row": ("2xcpu", Request(split_mode="row", row_min=16)),
}


@pytest.fixture(scope="module", params=["tensor"])
def in_place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose caches have room."""
    devices, asked = GROWING[request.param]
    folder = tmp_path_factory.mktemp("in-place")
    save(build_fused(SMALL), folder / "model.onnx")
    compile_model(plan_model(folder / "model.onnx", [devices], asked), folder / "package", verify=False)
    return folder / "package"


@pytest.mark.parametrize(
    ("in_place", "ranks"), [*((mode, "threads") for mode in GROWING), ("tensor", "processes")], indirect=["in_place"]
)
def test_rooms_grow(in_place: Path, ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens equal those of a conversation with all the room from the start."""
    with Session(in_place, ranks=ranks) as session:
        expected = list(session.generate([3, 1, 4, 1, 5], max_new_tokens=30))
        for ahead in (1, 7):
            with monkeypatch.context() as patch:
                patch.setattr(conversation, "AHEAD", ahead)
                assert list(session.generate([3, 1, 4, 1, 5], max_new_tokens=30)) == expected
                # Rounded rooms, as replays have them.
                patch.setattr(conversation, "LEAST_CAPACITY", 8)
                patch.setattr(Session, "replays", True)
                assert list(session.generate([3, 1, 4, 1, 5], max_new_tokens=30)) == expected
        if ranks == "threads":
            until(lambda: not any(worker.computation.sequences for worker in workers_of(session)))
    assert len(set(expected)) > 3


def test_a_room_that_is_too_large_for_a_model_does_not_end_the_text(
    in_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest sufficient room is tried then, and all tokens are read again."""
    tried = []

    def limited(manifest: Manifest, feeds: Any, room: Mapping[str, int]) -> Any:
        tried.append(max(room.values()))
        if tried[-1] > 20:
            raise EngineError("on purpose")
        return empty_states(manifest, feeds, room)

    with Session(in_place) as session:
        expected = list(session.generate([3, 1, 4, 1, 5], max_new_tokens=16))
        monkeypatch.setattr(conversation, "AHEAD", 2)
        monkeypatch.setattr(conversation, "LEAST_CAPACITY", 8)
        monkeypatch.setattr(conversation, "round_capacity", lambda tokens: 16 if tokens < 16 else 32)
        monkeypatch.setattr(Session, "replays", True)
        monkeypatch.setattr(sequences, "empty_states", limited)
        assert list(session.generate([3, 1, 4, 1, 5], max_new_tokens=16)) == expected
    assert tried == [16, 32, 20]


def test_a_billion_tokens_take_no_memory_before_they_come(in_place: Path) -> None:
    with Session(in_place) as session:
        stream = session.generate([3, 1, 4, 1, 5], max_new_tokens=2_000_000_000)
        assert [next(stream) for _ in range(5)] == list(session.generate([3, 1, 4, 1, 5], max_new_tokens=5))
        del stream
        with (
            session.start(capacity=2_000_000_000) as sequence,
            pytest.raises(EngineError, match=r"the states of a sequence need \d+ GiB, and .* is free"),
        ):
            sequence.run({"input_ids": np.array([[1]]), "attention_mask": np.ones((1, 1), np.int64)})


def test_rooms_are_few_and_not_much_larger() -> None:
    rooms = {tokens: round_capacity(tokens) for tokens in range(1, 5000)}
    assert all(tokens <= room <= max(256, 1.25 * tokens) for tokens, room in rooms.items())
    assert len(set(rooms.values())) < 25
    assert {256, 512, 1024, 2048, 4096} <= set(rooms.values()), "what models usually have tables for"


@pytest.mark.parametrize("prefills", [False, True])
def test_model_that_takes_so_many_tokens_and_no_others_is_refused(prefills: bool) -> None:
    ids = SimpleNamespace(name="input_ids", shape=(1, 8), max_shape=None, role=None, dtype="int64")
    logits = SimpleNamespace(name="logits", shape=(1, 8, 10))
    state = SimpleNamespace(input="past", output="present", grows=None, in_place=True)
    states = [state] if prefills else []
    source = SimpleNamespace(name="m.onnx")
    manifest = SimpleNamespace(inputs=[ids], outputs=[logits], states=states, lengths=[], kept_rows=None, source=source)
    sequence = SimpleNamespace(close=lambda: None)
    session: Any = SimpleNamespace(manifest=manifest, replays=False, start=lambda capacity: sequence)
    with pytest.raises(MisuseError, match="takes exactly 8 tokens at a time"):
        next(generate(session, [1, 2], prefill=session if prefills else None))
