"""Report pages have the terminal's contents, and names in them can't inject code."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import Writer, save
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.reports import page_writer
from splitc.runtime.reports.errors_chart import LEAST, errors_section
from splitc.runtime.reports.memory_chart import memory_section
from splitc.runtime.reports.strips import ShownRank
from splitc.runtime.reports.theme import altair
from splitc.runtime.reports.timeline_chart import FINISHES, LAUNCHES, REPLAYS
from splitc.runtime.tools.compare import compare
from splitc.runtime.tools.trace import INSIDE, LAUNCHED, REPLAYED
from splitc.runtime.units import format_seconds
from tests.helpers import fake_gpu_sessions
from tests.helpers.command import splitc
from tests.helpers.folders import diffusers_folder
from tests.helpers.packages import compile_mode

# Budgets here are those of tiny models.
pytestmark = pytest.mark.usefixtures("bare_engines")

MOST_BYTES = 1 << 20


def content(page: Path) -> str:
    """A page as text, without the scripts that draw."""
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    return text[: text.index("<style>")]


def charts(page: Path) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', content(page), re.DOTALL)
    assert found
    return list(json.loads(found[1])["charts"])


def searched(page: Path) -> list[list[str]]:
    """The rows that can be searched for."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', content(page), re.DOTALL)
    assert found
    (nodes,) = json.loads(found[1])["searches"]
    return list(nodes)


def rows(chart: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The data of a chart and of its layers."""
    for data in (chart, *chart.get("layer", ())):
        yield from data.get("data", {}).get("values", ())
    for values in chart.get("datasets", {}).values():
        yield from values


def words(page: Path) -> str:
    """The words on a page."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", content(page).partition('<script type="application')[0])).split())


def test_page_of_a_plan_has_what_json_has(decoder: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    asked = ("-d", "3xcpu", "--memory", "600KB", "--shapes", "input_ids:1x8", "--spread")
    plan = json.loads(splitc("plan", decoder, *asked, "--report", page, "--json").stdout)
    said = words(page)
    assert plan["choice"] in said
    for number, rank in enumerate(plan["ranks"]):
        assert f"{number} {rank['device']}" in said
    memory, times, compared = charts(page)
    took = {row["rank"]: row["said"] for row in rows(times)}
    assert took == {f"{n} {rank['device']}": format_seconds(rank["seconds"]) for n, rank in enumerate(plan["ranks"])}
    limit = {row["said"] for row in rows(memory) if "budget" in row}
    assert limit == {"586 KiB"}
    shown = [row for row in rows(compared) if "candidate" in row]
    assert {row["candidate"] for row in shown} == {each["name"] for each in plan["candidates"] if not each["refused"]}
    assert [row["candidate"] for row in shown if row["chosen"]] == [plan["choice"].partition(":")[0]]
    numbers = [number for row in shown for number in row["number"].split(", ") if number]
    assert sorted(map(int, numbers)) == list(range(1, sum(row["best"] for row in shown) + 1)) != []
    labels = [(row["number"].split(", ")[0], row["candidate"]) for row in shown if row["number"]]
    assert all(f"{number} {candidate}" in said for number, candidate in labels)
    for each in plan["candidates"]:
        assert each["name"] in said
        assert (each["refused"] or "") in said


def test_a_budget_that_is_too_small_is_marked() -> None:
    ranks = [ShownRank("cpu0", (), 6, 2, 1, 10, 8), ShownRank("cpu1", (), 6, 2, 1, 10, 100)]
    section = memory_section(["0 cpu0", "1 cpu1"], ranks, "the budget")
    assert section is not None and section.chart is not None
    assert [row["over"] for row in rows(dict(section.chart)) if "over" in row][:2] == [True, False]
    assert any("red line" in note for note in section.notes)


def test_adapters_of_requests_are_a_part_of_their_own() -> None:
    for adapters in (0, 3):
        ranks = [ShownRank("cpu0", (), 6, 2, 1, 14, 20, adapters=adapters), ShownRank("cpu1", (), 6, 2, 1, 10, 20)]
        section = memory_section(["0 cpu0", "1 cpu1"], ranks, "the budget")
        assert section is not None and section.chart is not None
        sizes = [row["said"] for row in rows(dict(section.chart)) if row.get("kind") == "requests' adapters"]
        assert sizes == (["3 B"] if adapters else [])
        own = [row["said"] for row in rows(dict(section.chart)) if row.get("kind", "").startswith("the engine")]
        assert own[0] == f"{5 - adapters} B"
        assert ("requests' adapters" in section.legend) == ("adapters" in section.tables[0].columns) == bool(adapters)


def test_page_of_a_package_has_its_blocks_and_cuts(package: Path, tmp_path: Path) -> None:
    page = tmp_path / "inspect.html"
    held = json.loads(splitc("inspect", package, "--report", page, "--json").stdout)
    text, said = content(page), words(page)
    titles = re.findall(r'<i title="([^"]*)"', text)
    assert titles == [block for rank in held["ranks"] for block in rank["blocks"]]
    assert text.count('class="cut"') == len(held["cuts"]) == 2
    for cut in held["cuts"]:
        assert cut["values"][0] in said


def test_page_of_a_bench_has_both_timelines(package: Path, tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    timed = json.loads(splitc("bench", package, "--in-flight", 2, "--runs", 16, "--report", page, "--json").stdout)
    assert timed["time"]["alone"] == {}, "the page has it"
    latency, _, request, overview, stream, _, memory = charts(page)
    assert sum(row.get("count", 0) for row in rows(latency)) == len(timed["time"]["seconds"]) == 16
    for chart, requests in ((request, {"0"}), (stream, {f"{each}" for each in range(8)})):
        bars = list(rows(chart))
        assert {bar["rank"] for bar in bars} == {"0 cpu0", "1 cpu1", "2 cpu2"}
        assert {bar["request"] for bar in bars} == requests
        assert all(0 <= bar["from"] <= bar["to"] for bar in bars)
    assert list(rows(overview)) == list(rows(request))
    measured = {row["said"] for row in rows(memory) if row.get("kind") == "loaded, measured"}
    assert len(measured) >= 1
    assert len(timed["memory"]) == 3


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("options", "kinds", "said"),
    [
        (["--no-cuda-graph"], {LAUNCHES, FINISHES, "sums with other ranks"}, LAUNCHED),
        ([], {REPLAYS}, REPLAYED),
    ],
)
def test_page_of_gpus_says_what_was_measured(
    decoder: Path, tmp_path: Path, options: list[str], kinds: set[str], said: str
) -> None:
    """The time of a launched step is not the GPU's time, and a replay does not separate steps."""
    page, trace = tmp_path / "bench.html", tmp_path / "trace.json"
    package = fake_gpu_sessions.package(decoder, "tensor", 2)
    ran = ("-d", "2xcuda", "--runs", 8, "--report", page, "--trace", trace)
    shown = splitc("bench", package, *ran, *options).stdout
    bars = list(rows(charts(page)[2]))
    assert {bar["kind"] for bar in bars} == kinds
    assert {bar["rank"] for bar in bars} == {"0 cuda0", "1 cuda1"}, "those that ran, not those that were planned"
    assert all(0 <= bar["from"] <= bar["to"] for bar in bars)
    assert [text for text in (LAUNCHED, REPLAYED, INSIDE) if text in words(page)] == [said]
    assert said in " ".join(shown.split())
    assert "cpu0" not in shown and "rank 0 (cuda0)" in trace.read_text()


def test_page_says_that_sums_are_inside_engines(decoder: Path, tmp_path: Path) -> None:
    page, package = tmp_path / "bench.html", compile_mode(decoder, "tensor")
    splitc("bench", package, "--runs", 2, "--no-memory", "--report", page)
    inside = any(engine.group for rank in read_manifest(package).ranks for engine in rank.engines)
    assert (INSIDE in words(page)) == inside


def test_page_of_a_check_has_every_output(package: Path, decoder: Path, tmp_path: Path) -> None:
    page = tmp_path / "check.html"
    arguments = ("--model", decoder, "--no-memory", "--report", page, "--json")
    found = json.loads(splitc("check", package, *arguments).stdout)
    assert "all outputs agree" in words(page)
    assert {row["output"] for row in rows(charts(page)[0])} == {each["name"] for each in found["outputs"]}


def test_errors_are_drawn_the_worst_first() -> None:
    """Outputs that can't be compared are listed; exact agreement is drawn at 0, though the axis is logarithmic."""
    a, wrong = np.ones(4, np.float32), np.array([1, 1, 2, 1], np.float32)
    whole = a.astype(int)
    found = compare({"same": a, "off": a, "int": whole, "none": a}, {"same": a, "off": wrong, "int": whole})
    section = errors_section(found)
    assert section.chart is not None
    drawn = [(row["output"], row["kind"], row["value"]) for row in rows(dict(section.chart))]
    assert drawn[0] == ("off", "differs", 1.0)
    assert drawn[1:] == [("same", "agrees", LEAST), ("int", "agrees", LEAST)]
    assert "none: it is missing" in section.notes
    assert [row[0] for row in section.tables[0].rows] == ["none", "off", "same", "int"]


def test_modules_have_a_chapter_each_and_the_sums(tmp_path: Path) -> None:
    folder, page = diffusers_folder(tmp_path / "sd"), tmp_path / "page.html"
    asked = (folder, "-d", "2xcpu", "--memory", "2MiB")
    plan = json.loads(splitc("plan", *asked, "--report", page, "--json").stdout)
    chapters = ["All modules", *plan["modules"]]
    assert re.findall(r"<h2>(.*?)</h2>", content(page)) == chapters
    assert all(each["why"] in words(page) for each in plan["modules"].values())
    splitc("compile", *asked, "-o", tmp_path / "package")
    for command in (("inspect",), ("check", "--model", folder, "--no-memory")):
        name, *rest = command
        splitc(name, tmp_path / "package", *rest, "--report", page)
        found = re.findall(r"<h2>(.*?)</h2>", content(page))
        assert found == (chapters if name == "inspect" else chapters[1:])


def test_names_have_no_power_over_a_page(tmp_path: Path) -> None:
    evil = "</script><script>x</script><img src=x onerror=alert(1)>[red]\N{RIGHT-TO-LEFT OVERRIDE}{{ 7 * 7 }}"
    w = Writer()
    square = ir.tensor(np.ones((8, 8), np.float32))
    y = w.op("MatMul", w.input("x", ir.DataType.FLOAT, ["n", 8]), w.weight(evil, square))
    w.output(w.op("MatMul", y, w.weight("v", square)), f"{evil}!", ir.DataType.FLOAT, ["n", 8])
    model, page = tmp_path / "model.onnx", tmp_path / "page.html"
    save(w.model(), model)
    splitc("compile", model, "-d", "2xcpu", "--split-mode", "layer", "-o", tmp_path / "p")
    for command in (("inspect",), ("check", "--model", model, "--no-memory")):
        name, *rest = command
        splitc(name, tmp_path / "p", *rest, "--report", page)
        text = content(page)
        assert "<img" not in text
        assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in text
        assert text.count("</script>") == 1, "that of the charts' data"
        shown = evil.replace("\N{RIGHT-TO-LEFT OVERRIDE}", "\N{REPLACEMENT CHARACTER}")
        assert " ".join(f"{shown}!".split()) in " ".join(unescape(text).split())


@pytest.mark.parametrize("command", ["plan", "inspect", "bench", "check"])
def test_a_page_is_refused_before_any_work(
    command: str, decoder: Path, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"plan": [decoder, "-d", "cpu0"], "check": [package, "--model", decoder]}.get(command, [package])
    read = decoder if command == "plan" else package / "manifest.json"
    assert "which is read" in splitc(command, *arguments, "--report", read, code=2).stderr
    assert "there is no folder" in splitc(command, *arguments, "--report", tmp_path / "no" / "p.html", code=2).stderr
    monkeypatch.setattr(page_writer, "LIBRARIES", {"there_is_none": "altair"})
    said = splitc(command, *arguments, "--report", tmp_path / "page.html", code=2).stderr
    assert "--report needs altair, not installed here: pip install 'splitc[report]'" in " ".join(said.split())
    assert not list(tmp_path.iterdir())


def test_scripts_are_made_once_on_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each time if the cache can't be written."""
    made: list[str] = []

    def javascript_bundle(vl_version: str) -> str:
        made.append(vl_version)
        return f"// Vega-Lite {vl_version}"

    monkeypatch.setattr("vl_convert.javascript_bundle", javascript_bundle)
    script = page_writer._script.__wrapped__
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert script() == script() == f"// Vega-Lite {made[0]}" and len(made) == 1
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert script() == script() == f"// Vega-Lite {made[0]}" and len(made) == 3


def test_page_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user of a container may have none: charts were not made then, and neither was the page."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    for name in [name for name in sys.modules if name.split(".")[0] == "altair"]:
        monkeypatch.delitem(sys.modules, name)
    assert altair().Chart
    assert "HOME" not in os.environ
