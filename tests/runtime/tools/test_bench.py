"""Bench: consistent rates and times, and a trace that a viewer opens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from splitc.runtime import Session
from splitc.runtime.cli.app import app
from splitc.runtime.errors import MisuseError
from splitc.runtime.tools.bench import ROUND, bench
from splitc.runtime.tools.trace import draw_timeline, write_trace
from tests.conftest import decoder_feeds


@pytest.mark.parametrize("in_flight", [1, 3])
def test_times_add_up(package: Path, decoder: Path, in_flight: int) -> None:
    with Session(package, threads=1, in_flight=in_flight) as session:
        result = bench(session, decoder_feeds(), in_flight=in_flight, baseline=decoder, runs=2 * ROUND * in_flight)
    assert result.latency.runs >= 2 * ROUND * in_flight
    assert result.rate > 0
    assert {baseline.threads for baseline in result.baselines} == {1, 3}
    for rank in result.ranks:
        assert rank.busy > 0
        assert rank.overhead >= 0
        assert 0 < rank.utilization <= 1
        assert rank.busy + rank.waiting + rank.overhead <= 1.5 * result.latency.p90


def test_trace_has_a_row_for_each_rank_and_every_step(package: Path, tmp_path: Path) -> None:
    with Session(package, threads=1) as session:
        timeline = [session.run_timed(decoder_feeds())[1] for _ in range(3)]
        ranks = session.manifest.ranks
    write_trace(tmp_path / "trace.json", ranks, timeline)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0 (cpu0)", "rank 1 (cpu1)", "rank 2 (cpu2)"]
    steps = [event for event in events if event["ph"] == "X"]
    assert len(steps) == 3 * sum(len(rank.program) for rank in ranks)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in steps)
    assert {event["name"] for event in steps} >= {"stage0.onnx", "stage1.onnx", "from rank 0", "to rank 1"}
    lines = draw_timeline(len(ranks), timeline, width=40)
    assert [len(line) for line in lines] == [40, 40, 40]
    assert all(line.strip() for line in lines)
    with pytest.raises(MisuseError, match="there is no folder"):
        write_trace(tmp_path / "nowhere" / "trace.json", ranks, timeline)


def test_bench_on_the_command_line(package: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    arguments = ["bench", str(package), "--in-flight", "2", "--runs", "16", "--no-memory", "--trace", str(trace)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "2 in flight" in result.output
    assert "overhead" in result.output
    assert trace.exists()
