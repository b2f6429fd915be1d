"""Stateful sequences: states stay on their ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from models import llama_fused
from models.llama import Size
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeBackend
from splitc.runtime.errors import EngineError, FeedError, MisuseError, SplitcError
from splitc.runtime.ranks.computation import Computation
from tests.conftest import DECODER, LAYER, assert_close, decoder_feeds, run_whole, until, whole_session
from tests.helpers.blocks import Block
from tests.helpers.freed import code_as_freed
from tests.helpers.greedy import plain_loop
from tests.helpers.needs import needs_later_operators
from tests.helpers.packages import compile_mode
from tests.helpers.recurrent import write_lstm
from tests.helpers.workers import workers_of

PROMPT = [5, 17, 33, 2, 90, 41, 8]


@pytest.fixture(params=["layer", "tensor in groups"])
def package_of(request: pytest.FixtureRequest, decoder: Path) -> Path:
    """States that each rank has, or each replica. generate/test_tokens.py has them in each split mode."""
    return compile_mode(decoder, request.param)


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
        hidden = 4 * feeds["input_ids"].size * DECODER.hidden
        most = outputs["logits"].nbytes + 3 * ranks * 8 * 8 + 2 * hidden
        assert sum(moved) <= most, "only what is fed, the hidden state between two ranks, and the logits move"


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
        with pytest.raises(EngineError, match=r"The request had .*attention_mask \[1, 3\]"):
            sequence.run(wrong)
        with pytest.raises(SplitcError, match="states are lost: start another one"):
            sequence.run(feeds)
        sequence.close()
        with session.start() as another:
            another.run(feeds)
        until(lambda: not any(worker.computation.sequences for worker in workers_of(session)))


def test_loaded_states_may_change_later(package_of: Path, decoder: Path) -> None:
    feeds = decoder_feeds(1, 2, 5)
    states = {name: array.copy() for name, array in feeds.items() if name.startswith("past")}
    with Session(package_of, threads=1) as session, session.start() as sequence:
        sequence.load(states)
        for array in states.values():
            array[...] = 0
        found = sequence.run({name: array for name, array in feeds.items() if name not in states})
    assert_close(found, {"logits": run_whole(decoder, feeds)["logits"]}, 2e-5)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_loaded_states_outlive_other_requests(ranks: str, tmp_path: Path) -> None:
    """Including states written in place, in memory that brings later requests' feeds to a process."""
    save(llama_fused.build(DECODER), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["cpu0"], LAYER), tmp_path / "package", verify=False)
    names = [value.name for value in whole_session(tmp_path / "model.onnx").get_inputs()]
    whole = {name: array for name, array in decoder_feeds(3, 1, 12).items() if name in names}
    states = {name: array for name, array in whole.items() if name.startswith("past")}
    with Session(tmp_path / "package", ranks=ranks) as session, session.start(capacity=20) as sequence:
        sequence.load(states)
        for _ in range(4):
            outputs = run_whole(tmp_path / "model.onnx", {**whole, **states})
            given = sequence.run({name: array for name, array in whole.items() if name not in states})
            np.testing.assert_allclose(given["logits"], outputs["logits"], rtol=0, atol=1e-5)
            states = {name: outputs[name.replace("past_key_values", "present")] for name in states}
            whole["attention_mask"] = np.ones((3, whole["attention_mask"].shape[1] + 1), np.int64)
            other = {name: array for name, array in decoder_feeds(5, 1, 1).items() if name in names}
            session.run(other)


@pytest.mark.parametrize("devices", ["1xcpu", "2xcpu"])
def test_lengths_that_are_read_from_a_cache_keep_it_as_long_as_its_tokens(devices: str, tmp_path: Path) -> None:
    """Other caches are written in place, with room for more tokens. A stage without that cache is fed it."""
    b, width, head = Block(), 32, 16
    hidden = b.data("x", (1, 1, width), [1, 1, width])
    pasts = [b.data(f"past_{n}", (1, 2, 3, head), [1, 2, "p", head]) for n in range(8)]
    total = b.op("Add", b.op("Shape", pasts[3], start=2, end=3), b.constant([1], np.int64))
    lengths = b.op("Cast", total, to=ir.DataType.INT32)
    filled, length = b.op("Sub", lengths, b.constant([1], np.int32)), b.op("Squeeze", lengths)
    for layer in range(0, 8, 2):
        parts = [b.op("MatMul", hidden, b.w(f"w{layer}{part}", width, width)) for part in range(3)]
        hidden, *presents = b.ops(
            "com.microsoft.GroupQueryAttention",
            *parts,
            *pasts[layer : layer + 2],
            filled,
            length,
            outputs=3,
            num_heads=2,
            kv_num_heads=2,
        )
        for n, present in enumerate(presents):
            b.give(present, f"present_{layer + n}", [1, 2, "s", head])
    b.give(hidden, "y", shape=[1, 1, width])
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", devices, replace(LAYER, spread=True))
    assert [state.in_place for state in plan.analysis.states] == [number not in (2, 3) for number in range(8)]
    compile_model(plan, tmp_path / "package", verify=False)
    random = np.random.default_rng(0)
    states = {f"past_{n}": np.zeros((1, 2, 0, head), np.float32) for n in range(8)}
    with Session(tmp_path / "package") as session, session.start(capacity=8) as sequence:
        for _ in range(3):
            x = random.standard_normal((1, 1, width), np.float32)
            outputs = run_whole(tmp_path / "model.onnx", {"x": x, **states})
            np.testing.assert_allclose(sequence.run({"x": x})["y"], outputs["y"], rtol=0, atol=1e-6)
            states = {name: outputs[name.replace("past", "present")] for name in states}


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
        until(lambda: not any(worker.computation.sequences for worker in workers_of(session)))
        held: list[object] = [sequence]
        del sequence
        assert code_as_freed(held) == []


def test_states_of_a_first_run_that_failed_go_too(package_of: Path) -> None:
    feeds = {name: array for name, array in decoder_feeds(1, 4, 0).items() if not name.startswith("past")}
    with Session(package_of, threads=1) as session:

        def fail(*_: Any) -> Any:
            raise EngineError("on purpose")

        size = len(session.manifest.ranks)
        for worker in workers_of(session)[size - 1 :: size]:
            worker.computation._program.engines[-1].run = fail  # type: ignore[method-assign, assignment]
        with session.start() as sequence, pytest.raises(EngineError, match="on purpose"):
            sequence.run(feeds)
        until(lambda: not any(worker.computation.sequences for worker in workers_of(session)))


def test_recurrent_states_are_states_too(tmp_path: Path) -> None:
    """They stay on the ranks, start as zeros, and are as before after a request that is refused."""
    model = tmp_path / "model.onnx"
    write_lstm(model)
    compile_model(plan_model(model, ["cpu0"], LAYER), tmp_path / "package", verify=False)
    whole = whole_session(model)
    steps = [np.random.default_rng(number).random((1 + number, 2, 6), np.float32) for number in range(4)]
    h = c = np.zeros((1, 2, 5), np.float32)
    with Session(tmp_path / "package") as session, session.start() as sequence:
        assert {(state.input, state.output, state.grows) for state in session.manifest.resident_states} == {
            ("h", "hn", None),
            ("c", "cn", None),
        }
        for step in steps:
            with pytest.raises(FeedError, match="'n' is 0 in the input 'x'"):
                sequence.run({"x": step[:, :0]})
            expected, h, c = whole.run(None, {"x": step, "h": h, "c": c})
            np.testing.assert_allclose(sequence.run({"x": step})["y"], expected, atol=1e-6)


SCATTERS = {
    "TensorScatter": "present = TensorScatter <axis = 1> (past, x, at)",
    "ScatterElements": """
        ones = Shape (x)
        places = Expand (at, ones)
        present = ScatterElements <axis = 1> (past, places, x)""",
    "ScatterND": """
        row = Constant <value = int64[1, 1, 1] {0}> ()
        column = Constant <value = int64[3] {1, 1, 1}> ()
        turned = Reshape (at, column)
        places = Concat <axis = 2> (row, turned)
        present = ScatterND (past, places, x)""",
}


@needs_later_operators
@pytest.mark.parametrize("name", SCATTERS)
def test_states_of_a_size_are_written_where_they_are(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sequence only. A caller's feeds are not written to."""
    at = "int64[1]" if name == "TensorScatter" else "int64[1, 1, 1]"
    text = f"""<ir_version: 11, opset_import: ["" : 24]> g (float[1, 1, 4] x, {at} at, float[1, m, 4] past)
        => (float[1, 4] y, float[1, m, 4] present) {{
            {SCATTERS[name]}
            one = Constant <value = int64[1] {{1}}> ()
            y = ReduceSum <keepdims = 0> (present, one) }}"""
    model = tmp_path / "model.onnx"
    ir.save(ir.from_onnx_text(text), model)
    request = Request(split_mode="layer", shapes={"past": (1, 6, 4)})
    compile_model(plan_model(model, ["cpu0"], request), tmp_path / "package", verify=False)
    places, known = set[int](), Computation.run

    def watch(self: Computation, request: Any) -> Any:
        result = known(self, request)
        places.update(value.data_ptr() for held in self.sequences.values() for value in held.values())
        return result

    monkeypatch.setattr(Computation, "run", watch)
    past = np.random.default_rng(0).random((1, 6, 4), np.float32)
    with Session(tmp_path / "package") as session, session.start() as sequence:
        sequence.load({"past": past})
        state = past
        for number in range(3):
            fed = {"x": np.full((1, 1, 4), number, np.float32), "at": np.full([1] * at.count("1"), number)}
            whole = run_whole(model, {**fed, "past": state})
            assert_close(session.run({**fed, "past": state}), whole)
            assert_close(sequence.run(fed), {"y": whole["y"]})
            state = whole["present"]
    assert len(places) == 1


def test_model_without_states_has_no_sequences(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x) => (int64[m] y) { y = Shape(x) }'
    ir.save(ir.from_onnx_text(text), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["cpu0"], LAYER), tmp_path / "package")
    with Session(tmp_path / "package") as session:
        with pytest.raises(MisuseError, match="has no states"):
            session.start()
        with pytest.raises(MisuseError, match=r"can't generate with model\.onnx: it takes x"):
            list(session.generate([1]))


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_sequence_is_for_one_thread_at_a_time(decoder: Path, ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads are refused meanwhile and change nothing; `close` waits for the request."""
    feeds = {name: array for name, array in decoder_feeds(1, 4, 0).items() if not name.startswith("past")}
    package = compile_mode(decoder, "tensor")
    with Session(package, threads=1, ranks=ranks) as session, ThreadPoolExecutor(1) as another:
        with session.start() as sequence:
            expected = sequence.run(feeds)
        in_it, go_on, join = threading.Event(), threading.Event(), session.join

        def wait(request: Any) -> Any:
            in_it.set()
            assert go_on.wait(20)
            return join(request)

        monkeypatch.setattr(session, "join", wait)
        sequence = session.start(capacity=8)
        under_way = another.submit(sequence.run, feeds)
        assert in_it.wait(20)
        for use in (lambda: sequence.run(feeds), lambda: sequence.load({}), lambda: sequence.grow(9)):
            with pytest.raises(MisuseError, match="another thread uses this sequence"):
                use()
        forgotten: list[int] = []
        monkeypatch.setattr(session, "forget", lambda number, reusable: forgotten.append(number))
        sequence.close()
        assert not forgotten, "the request has its states until it ends"
        go_on.set()
        assert_close(under_way.result(20), expected)
        assert len(forgotten) == 1
        with pytest.raises(SplitcError, match="this sequence is closed"):
            sequence.run(feeds)
        sequence.close()
        assert len(forgotten) == 1


@needs_later_operators
def test_an_engine_that_lacks_room_in_a_cache_is_explained(tmp_path: Path) -> None:
    """The filled length is in a mask, so that only the engine knows when the cache is full."""
    size = Size(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=64, vocabulary=50)
    save(llama_fused.build(size), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["2xcpu"], LAYER), tmp_path / "package", verify=False)
    feeds = {"input_ids": np.array([[5, 17, 33]]), "attention_mask": np.ones((1, 3), np.int64)}
    more = {"input_ids": np.array([[2]]), "attention_mask": np.ones((1, 4), np.int64)}
    with Session(tmp_path / "package", threads=1) as session:
        with session.start() as sequence:
            expected = [sequence.run(feeds), sequence.run(more)]
        with session.start(capacity=3) as sequence:
            assert_close(sequence.run(feeds), expected[0])
            with pytest.raises(EngineError, match=r"has room for 3 tokens\. For more, start it"):
                sequence.run(more)
        with session.start(capacity=4) as sequence:
            assert_close(sequence.run(feeds), expected[0])
            assert_close(sequence.run(more), expected[1])


@pytest.mark.parametrize("capacity", [None, 16])
def test_masks_are_of_the_tokens_so_far(capacity: int | None, tmp_path: Path) -> None:
    """By a longer or a shorter one, kernels would read and write other rows of caches with room."""
    save(llama_fused.build(replace(DECODER, layers=2)), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["2xcpu"], LAYER), tmp_path / "package", verify=False)
    more = {"input_ids": np.array([[2]])}
    with Session(tmp_path / "package", threads=1) as session, session.start(capacity=capacity) as sequence:
        sequence.run({"input_ids": np.array([[5, 17, 33]]), "attention_mask": np.ones((1, 3), np.int64)})
        for columns in (1, 3, 5, 16):
            with pytest.raises(FeedError, match=f"'attention_mask' is for {columns} tokens, and .* comes to 4"):
                sequence.run({**more, "attention_mask": np.ones((1, columns), np.int64)})
        expected = sequence.run({**more, "attention_mask": np.ones((1, 4), np.int64)})
    whole = {"input_ids": np.array([[5, 17, 33, 2]]), "attention_mask": np.ones((1, 4), np.int64)}
    with Session(tmp_path / "package", threads=1) as session, session.start(capacity=capacity) as sequence:
        assert_close({"logits": sequence.run(whole)["logits"][:, -1:]}, expected)
        # Zeros behind the tokens mean nothing.
        padded = np.ones((1, 8), np.int64) * (np.arange(8) < 5)
        if capacity is not None:
            sequence.run({**more, "attention_mask": padded})


def test_odd_capacities_are_refused(package: Path) -> None:
    with Session(package, threads=1) as session:
        for wrong in (0, -1, 2.5, True, "8", 1 << 40, np.inf):
            with pytest.raises(MisuseError, match="it is a number of tokens from 1 to"):
                session.start(capacity=wrong)  # type: ignore[arg-type]
        with session.start(capacity=np.int64(8)) as sequence:  # type: ignore[arg-type]
            sequence.grow(8)
            with pytest.raises(MisuseError, match="a sequence with a capacity of 8 can't grow to 7"):
                sequence.grow(7)
        with session.start() as sequence, pytest.raises(MisuseError, match="has no capacity that could grow"):
            sequence.grow(7)
