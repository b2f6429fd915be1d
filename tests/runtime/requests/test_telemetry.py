"""Telemetry of a session's requests: counters, the log, and traces."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from splitc.runtime import Session
from splitc.runtime.errors import SplitcError
from splitc.runtime.requests.metrics import Metrics
from tests.conftest import Arrays, decoder_feeds
from tests.helpers.command import ROOT
from tests.helpers.fake_gpu_sessions import package as gpu_package
from tests.helpers.packages import compile_mode


def bad() -> Arrays:
    """Feeds that an engine fails on."""
    feeds = decoder_feeds()
    return {**feeds, "attention_mask": feeds["attention_mask"][:, :-1]}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The spans of this process. The provider can't be changed once it is set."""
    exported, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exported


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_requests_are_counted(decoder: Path, ranks: str) -> None:
    with Session(compile_mode(decoder, "layer"), ranks=ranks) as session:
        assert session.metrics == Metrics(busy=(0.0,) * 2)
        for _ in range(2):
            session.run(decoder_feeds())
        with pytest.raises(SplitcError):
            session.run(bad())
        with session.start() as sequence:
            sequence.run({name: feed for name, feed in decoder_feeds(past=0).items() if not name.startswith("past")})
        metrics = session.metrics
        assert (metrics.done, metrics.failed, metrics.in_flight) == (3, 1, 0)
        assert (metrics.captured, metrics.replayed) == (0, 0)
        assert len(metrics.busy) == 2 and min(metrics.busy) > 0


def test_all_ranks_of_replicas_are_counted(decoder: Path) -> None:
    with Session(compile_mode(decoder, "batch")) as session:
        session.run(decoder_feeds(batch=4))
        assert session.metrics.done == 1
        assert len(session.metrics.busy) == 2 and min(session.metrics.busy) > 0


def test_requests_in_flight_are_counted_while_they_are(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(package) as session:
        ended, go = threading.Event(), threading.Event()

        def hold(_: object) -> None:
            """The rank goes on once this has returned."""
            ended.set()
            go.wait(10)

        session.submit(decoder_feeds()).add_done_callback(hold)
        assert ended.wait(10)
        others = [session.submit(decoder_feeds()) for _ in range(2)]
        assert session.metrics.in_flight == 2
        go.set()
        for other in others:
            other.result()
        assert (session.metrics.done, session.metrics.in_flight) == (3, 0)


def test_counters_of_sessions_add_up() -> None:
    one = Metrics(1, 2, 3, 4, 5, (0.5, 1.0))
    assert one + one == Metrics(2, 4, 6, 8, 10, (1.0, 2.0))
    assert Metrics() + one == one + Metrics() == one


def test_log_says_what_happens(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "splitc"), Session(package) as session, pytest.raises(SplitcError):
        session.run(bad())
    loaded, failed = caplog.records
    assert (loaded.levelname, failed.levelname) == ("INFO", "WARNING")
    assert loaded.getMessage().startswith(f"{package.name}: loaded on cpu0, cpu1, cpu2, in ")
    assert failed.getMessage().startswith(f"{package.name}: a request failed: ")


def test_log_has_the_shapes_that_are_captured(decoder: Path, gpus: None, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "splitc"),
        Session(gpu_package(decoder, "layer", 1), devices=["cuda0"]) as session,
    ):
        for _ in range(4):
            session.run(decoder_feeds())
        metrics = session.metrics
    said = [record.getMessage() for record in caplog.records if "captured" in record.getMessage()]
    assert len(said) == metrics.captured == 1
    assert "input_ids 2 x 3" in said[0]
    assert metrics.replayed >= 1


def test_log_is_silent_where_nobody_listens(package: Path) -> None:
    """Python prints warnings of loggers without a handler."""
    program = f"""
from splitc.runtime import Session, SplitcError
from tests.helpers.feeds import decoder_feeds
feeds = decoder_feeds()
with Session({str(package)!r}) as session:
    try:
        session.run({{**feeds, "attention_mask": feeds["attention_mask"][:, :-1]}})
    except SplitcError:
        print("failed")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("failed\n", "")


def test_session_that_breaks_says_so(decoder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        Session(compile_mode(decoder, "layer")) as session,
        caplog.at_level(logging.ERROR, "splitc"),
    ):
        session._admission.fail(RuntimeError("on purpose"))
        assert [record.getMessage() for record in caplog.records] == [
            f"{session.package.name}: the session is broken: on purpose"
        ]


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_requests_are_spans_inside_the_callers(decoder: Path, exporter: InMemorySpanExporter, ranks: str) -> None:
    with Session(compile_mode(decoder, "layer"), ranks=ranks) as session:
        exporter.clear()
        with trace.get_tracer("tests").start_as_current_span("caller") as caller:
            session.run(decoder_feeds())
        with pytest.raises(SplitcError):
            session.run(bad())
    spans = exporter.get_finished_spans()
    good, failed = (span for span in spans if span.name == "splitc request")
    assert good.parent is not None and good.parent.span_id == caller.get_span_context().span_id
    assert good.attributes == {"splitc.package": session.package.name, "splitc.replayed": False}
    parts = [span for span in spans if span.parent is not None and span.parent.span_id == good.context.span_id]
    assert [(span.name, (span.attributes or {})["splitc.device"]) for span in parts] == [
        (f"splitc rank {rank}", f"cpu{rank}") for rank in range(2)
    ]
    (began, ended), *inside = [(span.start_time or 0, span.end_time or 0) for span in (good, *parts)]
    assert all(began - 1e6 < start < end < ended + 1e6 for start, end in inside), "within a millisecond"
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert [event.name for event in failed.events] == ["exception"]


def test_tracer_that_fails_fails_no_request(
    package: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace, "get_tracer", lambda *_: 1 / 0)
    with Session(package) as session:
        session.run(decoder_feeds())
    assert "a request can't be traced" in caplog.text


def test_programs_that_do_not_trace_import_nothing_of_it(package: Path) -> None:
    program = f"""
import sys
from splitc.runtime import Session
with Session({str(package)!r}) as session:
    list(session.generate([1], max_new_tokens=2))
print("opentelemetry" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")
