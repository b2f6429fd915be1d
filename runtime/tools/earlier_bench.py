"""An earlier bench from `bench --json`, compared with a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import check_regular
from splitc.runtime.package.manifest import Source
from splitc.runtime.tools.bench import BenchResult, Latency, RankTimes
from splitc.runtime.units import format_seconds


@dataclass(frozen=True)
class EarlierTimes:
    """The compared fields of a bench; see BenchResult. Earlier versions did not keep the model."""

    latency: Latency
    rate: float
    in_flight: int
    threads: int
    ranks: list[RankTimes]
    seconds: list[float]
    model: Source | None = None


@dataclass(frozen=True)
class EarlierBench:
    """A bench from the file `name`."""

    name: str
    time: EarlierTimes

    def rows(self, now: BenchResult) -> list[tuple[str, str, str, str]]:
        """The comparison: name, old value, new value, and new divided by old."""
        then = self.time
        rows = [
            _compared("latency", then.latency.median, now.latency.median),
            _compared("90 %", then.latency.p90, now.latency.p90),
            ("rate", f"{then.rate:.1f}/s", f"{now.rate:.1f}/s", f"{now.rate / then.rate:.2f}"),
        ]
        for number, (before, after) in enumerate(zip(then.ranks, now.ranks, strict=False)):
            label = f"rank {number}" if before.device == after.device else f"rank {number}, then on {before.device}"
            rows.append(_compared(f"{label}: busy", before.busy, after.busy))
            rows.append(_compared(f"{label}: waiting", before.waiting, after.waiting))
        return rows

    def unlike(self, now: BenchResult) -> Sequence[str]:
        """The differences between the two beyond the package, which make their times less comparable."""
        then = self.time
        differs = []
        if then.model is not None and then.model.sha256 != now.model.sha256:
            same = " (another file)" if then.model.name == now.model.name else ""
            differs.append(f"model: {then.model.name} then, {now.model.name}{same} now")
        if then.in_flight != now.in_flight:
            differs.append(f"requests in flight: {then.in_flight} then, {now.in_flight} now")
        if then.threads != now.threads:
            differs.append(f"threads of each rank: {then.threads} then, {now.threads} now")
        if len(then.ranks) != len(now.ranks):
            differs.append(f"ranks: {len(then.ranks)} then, {len(now.ranks)} now")
        return differs


def read_bench(path: Path) -> EarlierBench:
    """Read what `bench --json` printed. Raises MisuseError for another file."""
    check_regular(path)
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        earlier = EarlierBench(path.name, msgspec.json.decode(content["time"], type=EarlierTimes))
        if min(earlier.time.rate, earlier.time.latency.median) <= 0:
            raise msgspec.ValidationError("its requests take no time")
        return earlier
    except (msgspec.MsgspecError, KeyError, RecursionError) as error:
        raise MisuseError(
            f"{path} is not what 'splitc bench --json' prints: {error}. 'splitc bench ... --json > then.json' makes one"
        ) from error


def _compared(what: str, then: float, now: float) -> tuple[str, str, str, str]:
    return (what, format_seconds(then), format_seconds(now), f"{now / then:.2f}" if then else "")
