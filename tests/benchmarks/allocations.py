"""Compares the allocations of a rank's engine with those that the plan replays.

    python -m tests.benchmarks.allocations MODEL.onnx --mode tensor --devices cpu0,cpu1 --shapes input_ids:1x512

ONNX Runtime's profile (1.31 and later) says how much memory each node adds. The plan replays the same nodes. This
prints where the two lists differ: the nodes, and their bytes. A rule that the replay lacks shows as a node that is in
one list only.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnxruntime as ort

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.analysis import memory
from splitc.compiler.execution.arena import Arena
from splitc.compiler.execution.exchange import EngineGraph
from splitc.compiler.execution.run import Scratch, arena_bytes, find_steps, replay
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.rank_plan import RankPlan
from splitc.runtime import Session
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.feeds.asked_shapes import parse_shapes
from splitc.runtime.feeds.fills import make_inputs
from splitc.runtime.units import format_bytes, parse_bytes

# Allocations that are shown before and after a difference.
AROUND = 1
KERNEL = "_kernel_time"
# A replay: an engine's graph, its scratch, and whether its arena is on the host.
Replayed = tuple[EngineGraph, Scratch, bool]


@dataclass(frozen=True)
class Allocation:
    """The bytes of arena chunks that a node allocates, and its name."""

    size: int
    name: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--mode", default="layer")
    parser.add_argument("--devices", default="cpu0", help="CPU devices")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--shapes", action="append", default=[], help="as for splitc plan")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--least", type=parse_bytes, default=64 << 10, help="leave out smaller allocations")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        replayed = _replayed(options, Path(folder) / "package")
        measured = _measured(Path(folder), options.rank, options.threads)
    lists = [[one for one in allocations if one.size >= options.least] for allocations in (measured, replayed)]
    _show(*lists)


def _replayed(options: argparse.Namespace, package: Path) -> list[Allocation]:
    """The allocations that the plan replays for the rank. Writes the package."""
    graphs = list[Replayed]()

    def recorded(graph: EngineGraph, scratch: Scratch, on_host: bool) -> int:
        graphs.append((graph, scratch, on_host))
        return arena_bytes(graph, scratch, on_host)

    devices = options.devices.split(",")
    request = Request(split_mode=options.mode, shapes=parse_shapes(options.shapes))
    with patch.object(memory, "arena_bytes", recorded):
        plan = plan_model(options.model, devices, request)
    compile_model(plan, package, verify=False)
    steps = find_steps(*_own(graphs, plan, plan.ranks[options.rank]))
    names = (", ".join(value.name or "" for value, _ in step.made) for step in steps)
    arena = Arena(True)
    sizes = (sum(map(arena.size, places)) for places in replay(steps, arena))
    return [Allocation(size, name) for size, name in zip(sizes, names, strict=True)]


def _own(graphs: Sequence[Replayed], plan: Plan, rank: RankPlan) -> Replayed:
    """The replay for a rank: the search over cuts also replays other stages, and some twice."""
    if rounds := [one for one in graphs if one[0].rounds]:
        return next(one for one in reversed(rounds) if one[0].rounds[0].number == rank.part)
    nodes = set(rank.stage.nodes) - plan.analysis.graph.folded
    same = [one for one in graphs if set(one[0].nodes) == nodes]
    count = sum(other.group == rank.group for other in plan.ranks)
    return same[rank.part - count] if len(same) >= count else same[-1]  # ranks with equal shards are replayed once


def _measured(folder: Path, rank: int, threads: int) -> list[Allocation]:
    """The allocations in a request of the planned shapes, from the profile of the rank's engine."""
    profiled = dict[str, ort.InferenceSession]()
    begin = ort.InferenceSession.__init__

    def with_profile(session: Any, path: Any, options: Any = None, *others: Any, **more: Any) -> None:
        if options is not None and str(folder) in str(path):
            options.enable_profiling = True
            options.profile_file_prefix = str(folder / f"profile{len(profiled)}")
            profiled[str(path)] = session
        begin(session, path, options, *others, **more)

    with (
        patch.object(ort.InferenceSession, "__init__", with_profile),
        Session(folder / "package", threads=threads) as session,
    ):
        session.run(make_inputs(session.inputs, 0, {}))
        files = {path: one.end_profiling() for path, one in profiled.items()}
    return list(_profile(Path(files[sorted(files)[rank]])))


def _profile(file: Path) -> Iterator[Allocation]:
    for event in json.loads(file.read_text()):
        if event.get("cat") == "Node" and event["name"].endswith(KERNEL):
            size = int(event["args"].get("mem_in_use_delta", 0))
            yield Allocation(size, f"{event['name'].removesuffix(KERNEL)} ({event['args']['op_name']})")


def _show(measured: Sequence[Allocation], replayed: Sequence[Allocation]) -> None:
    """Print where the two lists differ."""
    matcher = SequenceMatcher(None, [one.size for one in measured], [one.size for one in replayed], autojunk=False)
    rows = table("", "bytes", "node", right=("bytes",))
    for kind, start, end, first, last in matcher.get_opcodes():
        if kind == "equal":
            continue
        for label, allocations in (
            ("measured", measured[max(0, start - AROUND) : end + AROUND]),
            ("replayed", replayed[max(0, first - AROUND) : last + AROUND]),
        ):
            for one in allocations:
                rows.add_row(label, format_bytes(one.size), one.name)
        rows.add_section()
    out.print(rows)
    out.print(f"{len(measured)} measured, {len(replayed)} replayed, {matcher.ratio():.0%} alike")


if __name__ == "__main__":
    main()
