"""Requests that are replayed as CUDA graphs, on fake GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from msgspec import structs

from models.llama import Size, build
from models.llama_fused import build as build_fused
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.errors import EngineError
from splitc.runtime.gpu.replayable import UNLOADED, why_not_replayed, why_unsafe_to_replay
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.ranks.kept_recordings import NEW
from splitc.runtime.ranks.loaded import make_backend_of
from splitc.runtime.ranks.loop import Replay
from splitc.runtime.ranks.recording import capture
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.requests.admission import Admission
from tests.conftest import assert_close, decoder_feeds, run_whole
from tests.helpers import fake_cupy, grouped_rows
from tests.helpers.blocks import Block
from tests.helpers.fake_gpu_sessions import package
from tests.helpers.fake_gpus import FAILING, FROM_HOST, WRONG, FakeBackend
from tests.helpers.grouped_rows import Grouped
from tests.helpers.needs import needs_gated_experts, needs_later_operators
from tests.helpers.recurrent import write_lstm
from tests.helpers.workers import workers_of
from tests.helpers.written_decoder import Style, feeds, following, without_states, write

pytestmark = pytest.mark.usefixtures("gpus")

# More runs than it takes until a request is replayed.
RUNS = NEW + 4
# A thread, and processes.
PLACES = [
    ("layer", ["cuda1"]),
    ("layer", ["cuda0", "cuda1"]),
    ("row", ["cuda0", "cuda1"]),
    ("tensor", ["cuda2", "cuda0", "cuda1"]),
]
# Ranks that exchange over the host.
MIXED = [
    ("layer", ["cuda1", "cuda1"]),
    ("tensor", ["cpu0", "cuda0", "cuda0"]),
    ("row", ["cuda0", "cpu1"]),
]


def shifted(feeds: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Feeds of the same sizes with other numbers."""
    ids, cache = (feeds["input_ids"] + number) % 50, "past_key_values.1.key"
    return {**feeds, "input_ids": ids, cache: feeds[cache] * (number + 1)}


def make_known(session: Session) -> None:
    """Run the feeds until the next request with their sizes is recorded."""
    for _ in range(NEW + 1):
        session.run(decoder_feeds())


def is_replayed(session: Session, feeds: Mapping[str, Any]) -> bool:
    _, served = session.run_timed(feeds)
    return all([type(span.step) for span in each.spans] == [Replay] for each in served.values())


@pytest.mark.parametrize(("mode", "devices"), PLACES)
def test_known_shapes_are_replayed(decoder: Path, mode: str, devices: list[str]) -> None:
    options = {"row_min": 16} if mode == "row" else {}
    with Session(package(decoder, mode, len(devices), **options), devices=devices) as session:
        for number in range(RUNS):
            for sizes in ((1, 1, 4), (2, 3, 5)):
                feeds = shifted(decoder_feeds(*sizes), number)
                assert_close(session.run(feeds), run_whole(decoder, feeds))
        assert is_replayed(session, decoder_feeds(2, 3, 5))
        assert not is_replayed(session, decoder_feeds(2, 4, 5))
        assert session.notes == []


@pytest.mark.parametrize(("mode", "devices"), MIXED)
def test_ranks_without_a_gpu_each_exchange_over_the_host_and_replay_nothing(
    decoder: Path, mode: str, devices: list[str]
) -> None:
    options = {"row_min": 16} if mode == "row" else {}
    with Session(package(decoder, mode, len(devices), **options), devices=devices) as session:
        for number in range(RUNS):
            feeds = shifted(decoder_feeds(2, 3, 5), number)
            assert_close(session.run(feeds), run_whole(decoder, feeds))
        assert not is_replayed(session, decoder_feeds(2, 3, 5))
        assert any("exchange values over the host" in note for note in session.notes)


def test_nothing_is_replayed_where_nobody_wants_it(decoder: Path) -> None:
    with Session(package(decoder, "layer", 1), devices=["cuda0"], cuda_graphs=False) as session:
        assert [is_replayed(session, decoder_feeds()) for _ in range(RUNS)] == [False] * RUNS


@pytest.mark.parametrize("ranks", [1, 2])
def test_replays_and_eager_runs_take_turns(decoder: Path, ranks: int) -> None:
    """Requests of new sizes run eagerly in between."""
    with Session(package(decoder, "layer", ranks), devices=[f"{ranks}xcuda"], in_flight=4) as session:
        many = [shifted(decoder_feeds(1, 1, 3 + number % 5), number) for number in range(30)]
        for feeds, outputs in zip(many, session.map(many)):
            assert_close(outputs, run_whole(decoder, feeds))


def test_closing_waits_for_no_recording(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, begun = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        begun.set()
        gate.wait(60)
        raise EngineError("too late")

    monkeypatch.setattr("splitc.runtime.ranks.replays.capture", hang)
    monkeypatch.setattr("splitc.runtime.requests.admission.PATIENCE", 0.5)
    session = Session(package(decoder, "layer", 1), devices=["cuda0"])
    make_known(session)
    future = ThreadPoolExecutor(1).submit(session.run, decoder_feeds())
    assert begun.wait(10)
    closing = threading.Thread(target=session.close, daemon=True)
    closing.start()
    closing.join(10)
    in_time = not closing.is_alive()
    gate.set()
    assert in_time, "close must not wait for a recording that does not end"
    assert "session" in str(future.exception(timeout=10))


ROOM = 12
SMALL = Size(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=96, vocabulary=50)


@pytest.mark.parametrize(("mode", "in_place"), [("layer", True), ("tensor", False)])
def test_states_are_where_the_graph_left_them(
    tmp_path: Path, mode: str, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences alternate, each with room in its cache, so that sizes do not change between tokens."""
    model = tmp_path / "model" / "model.onnx"
    save(build_fused(SMALL) if in_place else build(replace(SMALL, capacity=ROOM)), model)
    place = package(model, mode, 2)

    def tokens(session: Session) -> list[Any]:
        found = []
        room = ROOM if in_place else None
        with session.start(capacity=room) as one, session.start(capacity=room) as other:
            for step in range(8):
                for sequence, token in ((one, step + 3), (other, 2 * step)):
                    feeds = {
                        "input_ids": np.array([[token]]),
                        "attention_mask": (np.arange(ROOM) <= step).astype(np.int64)[None],
                        "position_ids": np.array([[step]]),
                    }
                    taken = {tensor.name: feeds[tensor.name] for tensor in session.inputs if tensor.name in feeds}
                    found.append(sequence.run(taken)["logits"])
        return found

    with Session(place) as on_cpu, Session(place, devices=["cuda0", "cuda1"]) as session:
        for own, expected in zip(tokens(session), tokens(on_cpu)):
            assert_close({"logits": own}, {"logits": expected})
        replays = watch(monkeypatch)
        for own, expected in zip(tokens(session), tokens(on_cpu)):
            assert_close({"logits": own}, {"logits": expected})
        assert len(replays) == 2 * 8, "new sequences have the states of those that have ended, which graphs know"


def test_recurrent_states_go_on_from_replays_to_eager_runs_and_begin_as_zeros(tmp_path: Path) -> None:
    model = tmp_path / "lstm" / "model.onnx"
    model.parent.mkdir()
    write_lstm(model)
    steps = [np.random.default_rng(number).random((1, 2, 6), np.float32) for number in range(9)]
    place = package(model, "layer", 1)
    with Session(place) as on_cpu, Session(place, devices=["cuda0"]) as session:
        (worker,) = workers_of(session)
        replays = worker.replays
        for _ in range(3):  # the second sequence has the first one's states, and others are in the same places
            with session.start() as sequence, on_cpu.start() as expected:
                for number, step in enumerate(steps):
                    worker.replays = None if number in (5, 6) else replays
                    np.testing.assert_allclose(
                        sequence.run({"x": step})["y"], expected.run({"x": step})["y"], atol=1e-6
                    )


def test_sequences_with_other_room_have_states_of_their_own(tmp_path: Path) -> None:
    model = tmp_path / "model" / "model.onnx"
    save(build_fused(SMALL), model)
    place = package(model, "tensor", 2)
    with Session(place) as on_cpu, Session(place, devices=["cuda0", "cuda1"]) as session:
        for room in (8, 12, 8, 16, 12):
            with session.start(capacity=room) as sequence, on_cpu.start(capacity=room) as expected:
                for step in range(6):
                    mask = (np.arange(room) <= step).astype(np.int64)[None]
                    feeds = {"input_ids": np.array([[step + room]]), "attention_mask": mask}
                    assert_close(sequence.run(feeds), expected.run(feeds))


def test_sequences_that_grow_go_on_eagerly_and_are_replayed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier tokens are in the larger states, also if an ended sequence left states of that size."""
    model = tmp_path / "model" / "model.onnx"
    save(build_fused(SMALL), model)
    place = package(model, "tensor", 2)

    def run(sequence: Any, step: int, room: int) -> Any:
        mask = (np.arange(room) <= step).astype(np.int64)[None]
        return sequence.run({"input_ids": np.array([[step * 7 % 50]]), "attention_mask": mask})

    with Session(place) as on_cpu, Session(place, devices=["cuda0", "cuda1"]) as session:
        with on_cpu.start(capacity=24) as sequence:
            expected = [run(sequence, step, 24) for step in range(16)]
        replays = watch(monkeypatch)
        for _ in range(2):
            with session.start(capacity=6) as sequence:
                for step in range(16):
                    if step in (5, 12):
                        sequence.grow(12 * (step // 4))
                    room = 6 if step < 5 else 12 if step < 12 else 36
                    assert_close(run(sequence, step, room), expected[step])
        assert len(replays) > 8


def test_states_that_grow_are_not_replayed(decoder: Path) -> None:
    place = package(decoder, "tensor", 2)
    feeds = decoder_feeds(1, 1, 0)
    with Session(place, devices=["cuda0", "cuda1"]) as session, session.start() as sequence:
        for past in range(4):
            own = {"input_ids": feeds["input_ids"], "attention_mask": np.ones((1, past + 1), np.int64)}
            sequence.run({**own, "position_ids": np.full((1, 1), past)})
        assert session.notes == []


def test_recordings_in_use_stay(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more kinds of requests than recordings, some are replayed, and none is recorded repeatedly."""
    monkeypatch.setattr("splitc.runtime.ranks.kept_recordings.MOST", 2)
    monkeypatch.setattr("splitc.runtime.ranks.kept_recordings.IDLE", 8)
    made = []

    def note(*given: Any) -> Any:
        made.append(given)
        return capture(*given)

    monkeypatch.setattr("splitc.runtime.ranks.replays.capture", note)
    with Session(package(decoder, "layer", 1), devices=["cuda0"]) as session:
        for _ in range(5):
            for past in range(3):
                feeds = decoder_feeds(1, 1, past)
                assert_close(session.run(feeds), run_whole(decoder, feeds))
        assert len(made) == 2
        for past in (7, 8):
            for _ in range(12):
                session.run(decoder_feeds(1, 1, past))
        assert len(made) == 4, "those that are not in use any more make room"


def test_engine_that_can_not_be_captured_runs_eagerly_and_is_named(
    decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = FakeBackend.load

    def load_plain(self: FakeBackend, path: Path, *options: Any) -> Any:
        engine = load(self, path, *options)
        engine.capture_blocker = f"{path.name} has nodes on the CPU"  # type: ignore[attr-defined]
        return engine

    monkeypatch.setattr(FakeBackend, "load", load_plain)
    with Session(package(decoder, "layer", 1), devices=["cuda0"]) as session:
        assert [is_replayed(session, decoder_feeds()) for _ in range(RUNS)] == [False] * RUNS
        assert session.notes == ["requests are not replayed as CUDA graphs: stage0.onnx has nodes on the CPU"]


@pytest.mark.parametrize("shares", [True, False])
def test_convolutions_are_captured_in_a_session_of_their_own_only(
    tmp_path: Path, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a session for all requests, another shape would unload kernels that a recording launches."""
    block = Block()
    made = block.op("Conv", block.data("x", (1, 16, 66), [1, 16, 66]), block.w("kernel", 16, 16, 3))
    block.give(made, shape=[1, 16, 64])
    save(block.model(), tmp_path / "model.onnx")
    folder = package(tmp_path / "model.onnx", "layer", 1)
    if not shares:
        monkeypatch.setattr("splitc.runtime.gpu.weight_places.PASSED_ON", frozenset())
    (rank,) = read_manifest(folder).ranks
    why = "" if shares else f"rank0/stage0.onnx {UNLOADED}"
    assert why_not_replayed(rank, rank.engines[0]) == why
    with Session(folder, devices=["cuda0"]) as session:
        assert any(is_replayed(session, block.feeds) for _ in range(RUNS)) == shares
        assert session.notes == ([] if shares else [f"requests are not replayed as CUDA graphs: {why}"])


def test_control_flow_is_never_captured(write_model: Callable[[str], Path]) -> None:
    """TensorRT would capture it, with the branch that one request took."""
    model = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x, bool flag) => (float[n, 4] y)
        { a = Relu(x)
          y = If (flag) <then_branch = then () => (float[n, 4] b) { b = Neg(a) },
                         else_branch = other () => (float[n, 4] c) { c = Abs(a) }> }"""
    )
    with Session(package(model, "layer", 1), devices=["cuda0"]) as session:
        for number in range(RUNS):
            feeds = {"x": np.ones((2, 4), np.float32), "flag": np.array(number % 2 == 0)}
            assert_close(session.run(feeds), run_whole(model, feeds))
        assert not is_replayed(session, feeds)
        why = "requests are not replayed as CUDA graphs: rank0/stage0.onnx has control flow (If, Loop or Scan)"
        assert session.notes == [why]
    assert not is_non_blocking(package(model, "layer", 1), True)


def is_non_blocking(folder: Path, graphs: bool) -> bool:
    """Whether the stream of a package's rank does not wait for CUDA's default stream, and that not for it."""
    gpu: Any = make_backend_of(read_manifest(folder), 0, Device("cuda", 0), 1, graphs)
    return bool(gpu.stream.non_blocking)


def test_only_what_is_captured_does_not_wait_for_the_default_stream(decoder: Path) -> None:
    """Some kernels of ONNX Runtime run there: on a busy GPU, they read what was not there yet."""
    folder = package(decoder, "layer", 1)
    assert is_non_blocking(folder, True)
    assert not is_non_blocking(folder, False)


def test_branches_beside_nodes_on_the_cpu_are_never_captured(decoder: Path) -> None:
    """Sizes decide the branches, so ONNX Runtime is not asked, and does not refuse such nodes."""
    (rank,) = read_manifest(package(decoder, "layer", 1)).ranks
    (file,) = rank.engines
    for branches, why in ((False, ""), (True, f"in {file.path}, a node is on the CPU")):
        changed = structs.replace(file, branches_by_sizes=branches, not_captured="a node is on the CPU")
        assert why_unsafe_to_replay(rank, changed) == why


def test_sizes_that_depend_on_data_are_never_captured(tmp_path: Path) -> None:
    """A graph has one request's sizes: with other data it would read memory beyond its own."""
    block = Block()
    x = block.op("MatMul", block.data("x", (6, 8), ["n", 8]), block.w("A", 8, 8))
    above = block.op("Greater", x, block.constant(0.0, np.float32))
    places = block.op("Transpose", block.op("NonZero", above), perm=[1, 0])
    gathered = block.op("Mul", block.op("GatherND", x, places), block.constant(2.0, np.float32))
    block.give(block.op("ScatterND", x, places, gathered), shape=["n", 8])
    model = tmp_path / "model.onnx"
    save(block.model(), model)
    with Session(package(model, "layer", 1), devices=["cuda0"]) as session:
        for number in range(RUNS):
            feeds = {"x": np.random.default_rng(number).standard_normal((6, 8), np.float32)}
            assert_close(session.run(feeds), run_whole(model, feeds))
        assert not is_replayed(session, feeds)
        assert session.notes == ["requests are not replayed as CUDA graphs: sizes in rank0/stage0.onnx depend on data"]


@pytest.mark.parametrize(
    ("mode", "ranks", "engine", "before"),
    [
        ("layer", 1, "stage0.onnx", 0),
        ("layer", 1, "stage0.onnx", 1),
        ("layer", 1, "stage0.onnx", 2),
        ("layer", 2, "stage1.onnx", 2),
        ("tensor", 2, "rank1/stage0.1.onnx", 1),
    ],
)
def test_rank_that_fails_while_it_is_recorded(
    decoder: Path, mode: str, ranks: int, engine: str, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request runs eagerly, all the same; nobody waits for the rank that failed. Later ones are tried again.

    But not where it was the capture that failed.
    """
    # Before the run that is captured, it runs twice as it does eagerly.
    monkeypatch.setenv(FAILING, f"{engine} {NEW + 1 + before}")
    captured = before == 2
    whole = run_whole(decoder, decoder_feeds())
    with Session(package(decoder, mode, ranks), devices=[f"{ranks}xcuda"]) as session:
        for _ in range(RUNS):
            assert_close(session.run(decoder_feeds()), whole)
        assert is_replayed(session, decoder_feeds()) == (not captured)
        assert any("an engine failed on purpose" in note for note in session.notes) == captured


def test_first_replay_that_gives_something_else_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks run the request eagerly, from the unchanged states, and do not record requests like it."""
    model = tmp_path / "model" / "model.onnx"
    save(build(replace(SMALL, capacity=ROOM)), model)
    place = package(model, "tensor", 2)
    monkeypatch.setenv(WRONG, "rank1")
    with Session(place) as on_cpu, Session(place, devices=["2xcuda"]) as session:
        with on_cpu.start() as expected, session.start() as sequence:
            for step in range(RUNS):
                feeds = {
                    "input_ids": np.array([[step + 3]]),
                    "attention_mask": (np.arange(ROOM) <= step).astype(np.int64)[None],
                    "position_ids": np.array([[step]]),
                }
                assert_close(sequence.run(feeds), expected.run(feeds))
        assert any("of the first replay differs" in note for note in session.notes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_copies_from_memory_of_the_host_is_not_replayed(
    ranks: int, decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replay would copy from memory that is freed by then."""
    monkeypatch.setenv(FROM_HOST, f"stage{ranks - 1}.onnx")
    with Session(package(decoder, "layer", ranks), devices=[f"{ranks}xcuda"]) as session:
        make_known(session)
        assert not is_replayed(session, decoder_feeds())
        assert any("an engine copies between the GPU and memory of the host" in note for note in session.notes)


def test_graph_that_fails_ends_in_an_error(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: fake_cupy.Graph, stream: fake_cupy.Stream) -> None:
        raise EngineError("a launch failed on purpose")

    with Session(package(decoder, "layer", 1), devices=["cuda0"]) as session:
        make_known(session)
        assert is_replayed(session, decoder_feeds())
        monkeypatch.setattr(fake_cupy.Graph, "launch", fail)
        with pytest.raises(EngineError, match="on purpose"):
            session.run(decoder_feeds())


def watch(monkeypatch: pytest.MonkeyPatch) -> list[InFlightRequest]:
    """A list to which each request is added that all ranks have replayed."""
    replayed: list[InFlightRequest] = []
    done = Admission._done

    def note(self: Admission, request: InFlightRequest) -> None:
        if all([type(span.step) for span in each.spans] == [Replay] for each in request.executions.values()):
            replayed.append(request)
        done(self, request)

    monkeypatch.setattr(Admission, "_done", note)
    return replayed


def test_generated_tokens_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model" / "model.onnx"
    save(build_fused(SMALL), model)
    place = package(model, "tensor", 2)
    with Session(place) as on_cpu, Session(place, devices=["cuda0", "cuda1"]) as session:
        replays = watch(monkeypatch)
        tokens = list(session.generate([3], max_new_tokens=12))
        assert tokens == list(on_cpu.generate([3], max_new_tokens=12))
    assert len(replays) == 12 - 1 - (NEW + 1), "all but the prompt, and those whose shape was new"


def test_ranks_that_differ_in_their_states_go_the_same_way(tmp_path: Path) -> None:
    """One rank has a state that grows, the other one that does not and could be replayed alone."""
    block = Block()
    x = block.data("x", (1, 8))
    past = block.op("Concat", block.data("past", (0, 8), ["p", 8]), x, axis=0)
    block.give(past, "present", ["q", 8])
    wide = block.op("MatMul", block.op("ReduceSum", past, block.ints(0)), block.w("A", 8, 300))
    narrow = block.op("MatMul", wide, block.w("B", 300, 8))
    wide = block.op("MatMul", narrow, block.w("C", 8, 300))
    kept = block.op("Add", block.data("kept", (1, 300)), wide)
    block.give(kept, "keeps", [1, 300])
    block.give(block.op("MatMul", kept, block.w("D", 300, 8)), shape=[1, 8])
    model, place = tmp_path / "model.onnx", tmp_path / "package"
    save(block.model(), model)
    states = {"past": "present", "kept": "keeps"}
    request = Request(split_mode="layer", spread=True, states=states, shapes={"past": (4, 8)})
    compile_model(plan_model(model, ["2xcpu"], request), place, verify=False)
    steps = [np.random.default_rng(number).random((1, 8), np.float32) for number in range(2 * RUNS)]
    with Session(place) as on_cpu, Session(place, devices=["2xcuda"]) as session:
        assert [worker.computation.resident for worker in workers_of(on_cpu)] == [
            {"past": "present"},
            {"kept": "keeps"},
        ]
        with on_cpu.start() as expected, session.start() as sequence:
            for step in steps:
                assert_close(sequence.run({"x": step}), expected.run({"x": step}))


@needs_later_operators
@pytest.mark.parametrize("devices", [["cuda0"], ["cuda0", "cuda1"]])
@pytest.mark.parametrize("style", [Style(), Style(sinks=True, dtype=onnx.TensorProto.FLOAT16)])
def test_tokens_whose_attention_is_written_out_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, style: Style, devices: list[str]
) -> None:
    """Attention that has no kernel for GPUs becomes others, with branches that sizes decide."""
    model, tolerance = tmp_path / "model.onnx", 1e-5 if style.dtype == onnx.TensorProto.FLOAT else 1e-2
    onnx.save(write(style), model)
    plan = plan_model(model, devices, Request(split_mode="layer", spread=True, memory=("1GiB",)))
    monkeypatch.setattr("splitc.compiler.lowering.segments.has_collectives", lambda engine, devices: False)
    compile_model(plan, tmp_path / "package", verify=False)
    replays, request = watch(monkeypatch), feeds(style, 2, 3, 0)
    with Session(tmp_path / "package") as session, session.start(capacity=16) as sequence:
        for _ in range(RUNS + 1):
            expected = run_whole(model, request)
            assert_close(sequence.run(without_states(request)), {"logits": expected["logits"]}, tolerance)
            request = following(style, expected, 2, 1)
    assert replays


@pytest.mark.parametrize("tokens", [2, pytest.param(40, marks=needs_gated_experts)])
def test_mixtures_of_experts_are_replayed(tmp_path: Path, tokens: int) -> None:
    """Each request chooses other experts. As one operator, a mixture takes any number of rows, else a few."""
    how = Grouped() if tokens == 2 else Grouped(activation="first", dtype=ir.DataType.FLOAT16)
    save(grouped_rows.write(how).model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["cuda1"], Request(memory=["1GiB"]))
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package", devices=["cuda1"]) as session:
        for number in range(RUNS):
            given = {"ids": (number + 3 * np.arange(tokens)[None]) % 40}
            tolerance = 2e-5 if tokens == 2 else 4e-3
            assert_close(session.run(given), run_whole(tmp_path / "model.onnx", given), tolerance)
        assert is_replayed(session, given)
