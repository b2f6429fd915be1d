"""Feeds and outputs on the ranks' GPUs, which are fake."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitc.runtime import Session
from splitc.runtime.errors import EngineError, FeedError, MisuseError
from splitc.runtime.feeds.on_gpu import GpuFeed, read_gpu_feed
from splitc.runtime.ranks.kept_recordings import NEW
from splitc.runtime.ranks.loop import Replay
from splitc.runtime.ranks.request import InFlightRequest
from tests.conftest import assert_close, decoder_feeds, run_whole
from tests.helpers import fake_cupy
from tests.helpers.fake_gpu_arrays import GpuNdarray, asarray
from tests.helpers.fake_gpu_sessions import package

pytestmark = pytest.mark.usefixtures("gpus")

# More runs than it takes until a request is replayed.
RUNS = NEW + 2


def late(array: Any, device: int = 0) -> GpuNdarray:
    """The array on a GPU, written slowly on the caller's current stream."""
    with fake_cupy.Device(device):
        made = GpuNdarray(array.shape, array.dtype)

    def write() -> None:
        time.sleep(0.002)
        np.copyto(made.numbers, array)

    fake_cupy.current_stream().put(write)
    return made


@contextmanager
def own_stream() -> Iterator[None]:
    """The caller works on a stream of its own."""
    with fake_cupy.Stream():
        yield


def numbers(outputs: Mapping[str, Any]) -> dict[str, Any]:
    assert all(isinstance(array, GpuNdarray) for array in outputs.values())
    return {name: array.numbers.copy() for name, array in outputs.items()}


def changed(feeds: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Feeds of the same sizes with other numbers."""
    return {**feeds, "input_ids": (feeds["input_ids"] + number) % 50}


def feeds_of(request: InFlightRequest) -> set[str]:
    """The request's feeds that are still on GPUs."""
    return {name for name, feed in request.feeds.items() if isinstance(feed, GpuFeed)}


@pytest.mark.parametrize("device", ["cuda0", "cuda2"])
def test_outputs_are_those_of_feeds_on_the_host(decoder: Path, device: str) -> None:
    """Feeds come from the first GPU, and are not ready when the request starts. Later requests are replayed."""
    with Session(package(decoder, "layer", 1), devices=[device]) as session, own_stream():
        for number in range(RUNS):
            feeds = changed(decoder_feeds(), number)
            expected = run_whole(decoder, feeds)
            on_gpu = {name: late(array) for name, array in feeds.items()}
            assert_close(session.run(on_gpu), expected)
            assert_close(session.run(feeds), expected)
            mixed = {**feeds, "attention_mask": late(feeds["attention_mask"])}
            outputs, served = session.run_timed(mixed, on_device=True)
            assert_close(numbers(outputs), expected)
        assert all([type(span.step) for span in each.spans] == [Replay] for each in served.values())
        assert session.notes == []


def test_feeds_stay_where_the_rank_is_a_thread(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stayed = []
    submit = Session.submit_request

    def watch(self: Session, *given: Any, **options: Any) -> Any:
        future = submit(self, *given, **options)
        stayed.append(feeds_of(future.result()))
        return future

    monkeypatch.setattr(Session, "submit_request", watch)
    feeds = decoder_feeds()
    on_gpu = {name: late(array) for name, array in feeds.items()}
    for count in (1, 2):
        with Session(package(decoder, "layer", count), devices=[f"{count}xcuda"]) as session:
            session.run(on_gpu)
    assert stayed == [set(feeds), set()]


def test_outputs_are_the_callers_to_keep(decoder: Path) -> None:
    """Later requests and replays do not overwrite them, also after the caller has dropped some outputs."""
    with Session(package(decoder, "layer", 1), devices=["cuda0"]) as session:
        kept = []
        for number in range(2 * RUNS):
            feeds = changed(decoder_feeds(), number)
            outputs: dict[str, Any] = session.run(feeds, on_device=True)
            kept += [(outputs["logits"], run_whole(decoder, feeds)["logits"])]
        for found, expected in kept:
            assert_close({"logits": found.get()}, {"logits": expected})


def test_submitted_feeds_may_be_changed(decoder: Path) -> None:
    with Session(package(decoder, "layer", 1), devices=["cuda0"]) as session, own_stream():
        asked = [changed(decoder_feeds(), number) for number in range(4)]
        ids = GpuNdarray(asked[0]["input_ids"].shape, "int64")
        futures = []
        for feeds in asked:
            fake_cupy.current_stream().put(lambda array=feeds["input_ids"]: np.copyto(ids.numbers, array))  # type: ignore
            futures.append(session.submit({**feeds, "input_ids": ids}, on_device=True))
            fake_cupy.current_stream().put(lambda: ids.numbers.fill(0))
        for feeds, future in zip(asked, futures):
            assert_close(numbers(future.result(20)), run_whole(decoder, feeds))


def test_elements_out_of_order_are_put_in_order(decoder: Path) -> None:
    feeds = decoder_feeds()
    turned = GpuNdarray(feeds["input_ids"].shape, "int64", order="F")
    np.copyto(turned.numbers, feeds["input_ids"])
    with Session(package(decoder, "layer", 1), devices=["cuda0"]) as session:
        assert_close(session.run({**feeds, "input_ids": turned}), run_whole(decoder, feeds))


def test_numbers_without_axes_get_none() -> None:
    """CuPy's `ascontiguousarray` gives scalars an axis, as NumPy's does."""
    feed = read_gpu_feed(late(np.array(3, np.int64)))
    assert feed.shape == () and feed.on_host() == 3


def test_outputs_without_room_fail_alone(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feeds = decoder_feeds()
    with Session(package(decoder, "layer", 1), devices=["cuda0"]) as session:
        with monkeypatch.context() as patch:
            patch.setattr("tests.helpers.fake_gpu_arrays.Memory", full)
            with pytest.raises(EngineError, match=r"cuda0 has no memory left for .* of outputs that are to stay there"):
                session.run(feeds, on_device=True)
        assert_close(numbers(session.run(feeds, on_device=True)), run_whole(decoder, feeds))


def full(size: int) -> None:
    raise MemoryError(f"out of memory: {size} bytes")


def test_where_ranks_have_no_gpu_feeds_go_over_the_host(decoder: Path) -> None:
    feeds = decoder_feeds()
    expected = run_whole(decoder, feeds)
    on_gpu = {name: late(array) for name, array in feeds.items()}
    for devices in (["2xcpu"], ["2xcuda"], ["cpu0", "cuda0"]):
        with Session(package(decoder, "layer", 2), devices=devices) as session:
            assert_close(session.run(on_gpu), expected)
            assert_close(session.run(on_gpu, micro_batch=1), expected)
            with pytest.raises(MisuseError, match="outputs can stay on a GPU if it has the whole model, in a thread"):
                session.run(on_gpu, on_device=True)


def test_sequences_take_feeds_on_gpus_and_what_does_not_fit_is_refused(decoder: Path) -> None:
    feeds = decoder_feeds()
    own = {name: late(array) for name, array in decoder_feeds(1, 4, 0).items() if not name.startswith("past")}
    expected = run_whole(decoder, decoder_feeds(1, 4, 0))["logits"]
    with Session(package(decoder, "layer", 2), devices=["2xcuda"]) as session:
        with session.start() as sequence:
            assert_close(sequence.run(own), {"logits": expected})
        with pytest.raises(FeedError, match="input 'input_ids' is int32, and the model takes int64"):
            session.run({**feeds, "input_ids": asarray(feeds["input_ids"].astype(np.int32))})
        with pytest.raises(FeedError, match="'input_ids' has shape 6"):
            session.run({**feeds, "input_ids": asarray(feeds["input_ids"].reshape(6))})
        with pytest.raises(MisuseError, match="micro-batches are joined on the host"):
            session.run(feeds, micro_batch=1, on_device=True)
        assert_close(session.run(feeds), run_whole(decoder, feeds))


def test_callbacks_may_use_gpus(decoder: Path) -> None:
    """They run on the rank's thread, which works on its own GPU and stream afterwards."""
    threads = set()

    def use_another(_: object) -> None:
        threads.add(threading.current_thread())
        fake_cupy.Device(1).use()
        fake_cupy.Stream().use()

    with Session(package(decoder, "layer", 1), devices=["cuda0"]) as session, own_stream():
        for number in range(4 * RUNS):
            feeds = changed(decoder_feeds(batch=1 + number // (2 * RUNS)), number)
            answer = session.submit({name: late(array) for name, array in feeds.items()})
            answer.add_done_callback(use_another)
            assert_close(answer.result(), run_whole(decoder, feeds))
        _, served = session.run_timed({name: late(array) for name, array in feeds.items()})
        assert [type(span.step) for spans in served.values() for span in spans.spans] == [Replay]
        assert session.notes == []
    assert threads - {threading.current_thread()}
