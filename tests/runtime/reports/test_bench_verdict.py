"""A bench's advice, and its comparison with an earlier bench."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest import Source
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.reports.bench_verdict import bench_verdict
from splitc.runtime.reports.times_charts import latency_section
from splitc.runtime.tools.bench import Baseline, BenchResult, Latency, RankTimes
from splitc.runtime.tools.earlier_bench import EarlierBench, read_bench
from tests.helpers.command import splitc
from tests.helpers.packages import compile_mode
from tests.runtime.reports.test_pages import words

SECONDS = [0.1] * 90 + [0.12] * 10


def result(
    *busy: float, waiting: float = 0.0, at_work: float = 0.95, rate: float = 10.0, flight: int = 3
) -> BenchResult:
    ranks = [RankTimes(f"cpu{n}", took, waiting, 0.0, at_work) for n, took in enumerate(busy)]
    return BenchResult(
        Latency(0.1, 0.11, 100), rate, flight, 1.5, 1, ranks, [], SECONDS, [], {}, Source("model.onnx", "1")
    )


@pytest.fixture(scope="module")
def tensor(decoder: Path) -> Path:
    return compile_mode(decoder, "tensor")


def test_slowest_stage_sets_the_pace(package: Path) -> None:
    manifest = read_manifest(package)
    (uneven,) = bench_verdict(manifest, result(0.05, 0.1, 0.05), None)
    assert "Rank 1 (cpu1) computes 100 ms" in uneven and "up to 50% more a second" in uneven
    (even,) = bench_verdict(manifest, result(0.1, 0.1, 0.1), None)
    assert "moving blocks gains nothing" in even


def test_more_requests_in_flight_are_advised_where_ranks_idle(package: Path) -> None:
    manifest = read_manifest(package)
    idle, _ = bench_verdict(manifest, result(0.1, 0.1, 0.1, at_work=0.5, rate=5.0, flight=1), None)
    assert "up to 10.0 a second, 100% more" in idle


def test_waiting_is_lost_where_ranks_work_together(tensor: Path) -> None:
    manifest = read_manifest(tensor)
    waits, uneven = bench_verdict(manifest, result(0.06, 0.09, waiting=0.025), None)
    assert "wait for each other 25% of a request" in waits
    assert "cpu1 computes 90 ms" in uneven and "save up to 15 ms" in uneven


def test_unsplit_model_and_slow_requests_are_named(package: Path) -> None:
    own = replace(
        result(0.1, 0.1, 0.1), baselines=[Baseline(1, Latency(0.05, 0.06, 9), 0.5)], latency=Latency(0.1, 0.2, 9)
    )
    said = " ".join(bench_verdict(read_manifest(package), own, None))
    assert "0.50 times the rate of the unsplit model on one thread" in said and "2.00 times as long, with 3" in said
    assert "One request in ten takes 200 ms" in said


def test_earlier_bench_is_compared(package: Path, tmp_path: Path) -> None:
    then = tmp_path / "then.json"
    then.write_text(splitc("bench", package, "--runs", 8, "--no-memory", "--json").stdout)
    page = tmp_path / "bench.html"
    now = splitc("bench", package, "--runs", 8, "--in-flight", 2, "--no-memory", "--before", then, "--report", page)
    for text in (" ".join(now.stdout.split()), words(page)):
        assert "then.json" in text and "rank 2: waiting" in text
        assert "requests in flight: 1 then, 2 now" in text.lower()
    assert "unsplit" not in now.stdout, "nothing was compared with it"
    earlier = read_bench(then)
    rows = {row[0]: row[3] for row in earlier.rows(result(0.1, 0.1, 0.1, rate=2 * earlier.rate))}
    assert rows["rate"] == "2.00" and len(rows) == 9
    then.write_text(json.dumps({"time": {**json.loads(then.read_text())["time"], "rate": 0}}))
    with pytest.raises(MisuseError, match="its requests take no time"):
        read_bench(then)


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (Source("model.onnx", "1"), []),
        (Source("model.onnx", "2"), ["model: model.onnx then, model.onnx (another file) now"]),
        (Source("old.onnx", "2"), ["model: old.onnx then, model.onnx now"]),
        (None, []),
    ],
)
def test_another_model_is_named(then: Source | None, said: list[str]) -> None:
    now = result(0.1)
    earlier = EarlierBench(now.latency, now.rate, now.in_flight, now.threads, now.ranks, SECONDS, then)
    assert earlier.unlike(now) == said


def test_another_file_is_no_bench(package: Path, tmp_path: Path) -> None:
    for content in ("{}", "[]", "no", "[" * 200_000, json.dumps({"time": {"rate": 1}})):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(MisuseError, match=r"is not what 'splitc bench --json' prints: .* --json > then\.json'"):
            read_bench(tmp_path / "other.json")
    refused = splitc("bench", package, "--before", tmp_path / "nothing.json", code=2)
    assert "nothing.json" in refused.stderr


def test_histogram_has_all_requests_but_those_far_off(package: Path) -> None:
    far = replace(result(0.1), seconds=[*SECONDS * 10, 9.0])
    earlier = EarlierBench(far.latency, far.rate, far.in_flight, far.threads, far.ranks, SECONDS)
    section = latency_section(far, earlier)
    assert section.chart is not None and any("1 that took longer, up to 9 s" in note for note in section.notes)
    assert latency_section(replace(far, seconds=[0.1]), None).chart is None
