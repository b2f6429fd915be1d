"""Modules that work in turn."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitc.runtime import Pipeline
from splitc.runtime.errors import EngineError, MisuseError, SplitcError
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.gpu.weight_places import SwapBuffer, swappable_bytes
from splitc.runtime.gpu.weights import SwappedWeights
from splitc.runtime.hardware.devices import Device, parse_devices
from splitc.runtime.package.manifest import Weight
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.ranks.kept_recordings import NEW
from splitc.runtime.ranks.thread import Worker
from splitc.runtime.requests.turns import Turn, Turns
from splitc.runtime.session.shared_ranks import make_swap, need_turns
from tests.conftest import assert_close, decoder_feeds, run_whole, until
from tests.helpers import fake_gpu_sessions
from tests.helpers.needs import needs_dlpack
from tests.helpers.packages import compile_mode, write_modules


def usable() -> None:
    pass


def test_one_works_at_a_time_in_the_order_of_asking() -> None:
    turns, brought = Turns(), []
    first, second = (Turn(turns, lambda name=name: brought.append(name)) for name in "ab")  # type: ignore[misc]
    turns.begin(first, usable)
    turns.begin(first, usable)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(turns.begin, second, usable)
        until(lambda: len(turns._waiting) == 1)
        again = pool.submit(turns.begin, first, usable)  # behind the one who asked before
        until(lambda: len(turns._waiting) == 2)
        turns.end(first)
        assert not waiting.done() and not again.done()
        turns.end(first)
        waiting.result(5)
        assert brought == ["a", "b"] and not again.done()
        turns.end(second)
        again.result(5)
    assert brought == ["a", "b", "a"]


def test_who_waits_is_told_of_the_end() -> None:
    turns = Turns()
    first, second = (Turn(turns, usable) for _ in range(2))
    turns.begin(first, usable)

    def closed() -> None:
        raise SplitcError("the session is closed")

    with pytest.raises(SplitcError, match="closed"):
        turns.begin(second, closed)
    turns.callbacks.active = True
    with pytest.raises(MisuseError, match="a callback can't start another's"):
        turns.begin(second, usable)
    turns.begin(first, usable)
    turns.callbacks.active = False
    assert not turns._waiting and first.requests == 2


def test_nobody_waits_for_the_lock_while_a_model_comes_in() -> None:
    """It may be loaded by ranks that are in a callback, which may submit a request and wait for the lock."""
    turns = Turns()
    comes, may_come = threading.Event(), threading.Event()

    def bring_in() -> None:
        comes.set()
        assert may_come.wait(10)

    first, second = Turn(turns, bring_in), Turn(turns, usable)
    with ThreadPoolExecutor(2) as pool:
        coming = pool.submit(turns.begin, first, usable)
        assert comes.wait(10)
        same = pool.submit(turns.begin, first, usable)
        until(lambda: len(turns._waiting) == 1)
        turns.callbacks.active = True
        with pytest.raises(MisuseError, match="a callback can't start"):
            turns.begin(second, usable)
        turns.callbacks.active = False
        assert not coming.done() and not same.done()
        may_come.set()
        coming.result(5)
        same.result(5)
    assert first.requests == 2


def test_turn_that_fails_goes_to_the_next() -> None:
    turns = Turns()

    def fail() -> None:
        raise SplitcError("no memory")

    with pytest.raises(SplitcError, match="no memory"):
        turns.begin(Turn(turns, fail), usable)
    turns.begin(Turn(turns, usable), usable)


@pytest.mark.usefixtures("gpus")
@needs_dlpack
def test_weights_have_the_same_buffer_in_turn(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"one": np.arange(300, dtype=np.float32), "other": np.full((20, 30), 7, np.float16)}
    for name, array in arrays.items():
        (tmp_path / name).write_bytes(b"odd" + array.tobytes())
    buffer = SwapBuffer(-1, 2048)
    gpus = [GpuDevice(Device("cuda", 0)) for _ in arrays]
    swapped = []
    for gpu, (name, array) in zip(gpus, arrays.items(), strict=True):
        gpu.attach()
        weights = [Weight(name, str(array.dtype), list(array.shape), name, 3)]
        swapped.append(SwappedWeights(gpu, buffer, tmp_path, weights))
    values = [each.values[name] for each, name in zip(swapped, arrays, strict=True)]
    assert values[0].data_ptr() == values[1].data_ptr()
    for _ in range(2):
        for each, value, (name, array) in zip(swapped, values, arrays.items(), strict=True):
            each.bring_in()
            assert [other.is_in for other in swapped] == [other is each for other in swapped]
            np.testing.assert_array_equal(value.numpy(), array, err_msg=name)


def two(decoder: Path, folder: Path, first: Path, second: Path) -> Path:
    return write_modules(folder / "pipeline", {"first": first, "second": second})


@needs_dlpack
@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_modules_swap_on_gpus(
    ranks: str, decoder: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed requests find their weights too. cuda0 has the whole model, or its second half."""
    if ranks == "threads":
        request.getfixturevalue("gpus")
    else:
        monkeypatch.setattr("splitc.runtime.processes.device_processes.MAIN", "tests.helpers.fake_rank")
    folder = two(decoder, tmp_path, compile_mode(decoder, "one device"), fake_gpu_sessions.package(decoder, "layer", 2))
    feeds, own = decoder_feeds(), {"first": {"devices": ["cuda0"]}, "second": {"devices": ["cuda1", "cuda0"]}}
    with Pipeline(folder, swap=True, own=own) as opened:
        _check_turns(opened, run_whole(decoder, feeds), feeds)


def _check_turns(opened: Pipeline, expected: dict[str, Any], feeds: dict[str, Any]) -> None:
    for _ in range(NEW + 3):
        for session in opened.values():
            assert_close(session.run(feeds), expected, 1e-4)

    # From several threads, with several requests of each in flight.
    def stream(session: Any) -> None:
        for outputs in session.map([feeds] * 4, in_flight=2):
            assert_close(outputs, expected, 1e-4)

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(stream, session) for session in opened.values()]:
            each.result(60)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_weights_on_cpu_devices_stay_mapped(decoder: Path, tmp_path: Path, ranks: str) -> None:
    folder = two(decoder, tmp_path, compile_mode(decoder, "layer"), compile_mode(decoder, "tensor"))
    feeds = decoder_feeds()
    with Pipeline(folder, swap=True, ranks=ranks, threads=1) as opened:
        assert opened.swap
        _check_turns(opened, run_whole(decoder, feeds), feeds)
        answer: Future[Any] = Future()

        def then(_: object) -> None:
            """Another module's request, in a callback, when nothing else is in flight."""
            answer.set_result(opened["second"].submit(feeds))

        opened["first"].submit(feeds).add_done_callback(then)
        assert_close(answer.result(10).result(10), run_whole(decoder, feeds))


@pytest.mark.parametrize("mode", ["one device", "layer"])
def test_callback_submits_to_its_own_model_which_has_lost_its_turn(decoder: Path, tmp_path: Path, mode: str) -> None:
    """The rank's own thread loads the model, so it must not wait for itself."""
    folder = two(decoder, tmp_path, compile_mode(decoder, mode), compile_mode(decoder, "tensor"))
    feeds = decoder_feeds()
    with Pipeline(folder, swap=True, ranks="threads", threads=1) as opened, ThreadPoolExecutor(1) as pool:
        answer: Future[Any] = Future()

        def again(_: object) -> None:
            pool.submit(opened["second"].run, feeds).result(10)
            answer.set_result(opened["first"].submit(feeds))

        opened["first"].submit(feeds).add_done_callback(again)
        assert_close(answer.result(20).result(10), run_whole(decoder, feeds))


def test_request_whose_model_can_not_come_in_takes_no_place(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Worker) -> None:
        raise EngineError("the GPU has no room")

    whole = compile_mode(decoder, "one device")
    with Pipeline(two(decoder, tmp_path, whole, whole), swap=True, threads=1, in_flight=1) as opened:
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "bring_in", full)
            for _ in range(2):
                with pytest.raises(EngineError, match="no room"):
                    opened["first"].run(decoder_feeds())
        assert_close(opened["first"].run(decoder_feeds()), run_whole(decoder, decoder_feeds()))


def test_several_ranks_of_a_module_on_one_gpu_do_not_swap(package: Path) -> None:
    manifest = read_manifest(package)
    with pytest.raises(MisuseError, match="module 'one' has several ranks on one GPU"):
        make_swap({"one": (manifest, parse_devices(["cuda0", "cuda0", "cuda1"]))})
    swap = make_swap({"one": (manifest, parse_devices(["3xcuda"]))})
    assert [buffer.bytes for buffer in swap.values()] == [swappable_bytes(rank) for rank in manifest.ranks]
    assert all(buffer.bytes for buffer in swap.values())


@pytest.mark.parametrize(
    ("devices", "in_turn"),
    [
        (["2xcuda", "2xcuda"], True),
        (["2xcuda", "cuda1,cuda2"], True),
        (["2xcuda", "cuda0"], False),
        (["2xcuda", "cuda2,cuda3"], False),
        (["2xcpu", "2xcpu"], False),
    ],
)
def test_modules_that_are_split_over_the_same_gpus_work_in_turn(devices: list[str], in_turn: bool) -> None:
    named = {str(number): parse_devices(each.split(",")) for number, each in enumerate(devices)}
    assert need_turns(named) is in_turn


@pytest.mark.usefixtures("gpus")
def test_modules_in_turn_on_the_same_gpus(decoder: Path, tmp_path: Path) -> None:
    packages = [fake_gpu_sessions.package(decoder, mode, 2) for mode in ("layer", "tensor")]
    feeds = decoder_feeds()
    with Pipeline(two(decoder, tmp_path, *packages), ranks="threads") as opened:
        assert not opened.swap
        _check_turns(opened, run_whole(decoder, feeds), feeds)
