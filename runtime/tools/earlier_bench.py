"""An earlier bench from `bench --json`, compared with a new one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import check_regular
from splitc.runtime.package.manifest import Source
from splitc.runtime.tools.bench import BenchResult, Latency, RankTimes
from splitc.runtime.units import format_seconds


class EarlierBench(Struct, frozen=True):
    """The fields of a bench that are compared, see BenchResult, and its file's name.

    Earlier versions did not keep the model.
    """

    latency: Latency
    rate: float
    in_flight: int
    threads: int
    ranks: list[RankTimes]
    seconds: list[float]
    model: Source | None = None
    name: str = ""

    def rows(self, now: BenchResult) -> list[tuple[str, str, str, str]]:
        """The comparison: name, old value, new value, and new divided by old."""
        rows = [
            _compared("latency", self.latency.median, now.latency.median),
            _compared("90 %", self.latency.p90, now.latency.p90),
            ("rate", f"{self.rate:.1f}/s", f"{now.rate:.1f}/s", f"{now.rate / self.rate:.2f}"),
        ]
        for number, (before, after) in enumerate(zip(self.ranks, now.ranks, strict=False)):
            label = f"rank {number}" if before.device == after.device else f"rank {number}, then on {before.device}"
            rows.append(_compared(f"{label}: busy", before.busy, after.busy))
            rows.append(_compared(f"{label}: waiting", before.waiting, after.waiting))
        return rows

    def unlike(self, now: BenchResult) -> Sequence[str]:
        """The differences between the two beyond the package, which make their times less comparable."""
        differs = []
        if self.model is not None and self.model.sha256 != now.model.sha256:
            same = " (another file)" if self.model.name == now.model.name else ""
            differs.append(f"model: {self.model.name} then, {now.model.name}{same} now")
        numbers = {
            "requests in flight": (self.in_flight, now.in_flight),
            "threads of each rank": (self.threads, now.threads),
            "ranks": (len(self.ranks), len(now.ranks)),
        }
        return differs + [f"{what}: {old} then, {new} now" for what, (old, new) in numbers.items() if old != new]


def read_bench(path: Path) -> EarlierBench:
    """Read what `bench --json` printed. Raises MisuseError for another file."""
    check_regular(path)
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        earlier = msgspec.json.decode(content["time"], type=EarlierBench)
        if min(earlier.rate, earlier.latency.median) <= 0:
            raise msgspec.ValidationError("its requests take no time")
        return msgspec.structs.replace(earlier, name=path.name)
    except (msgspec.MsgspecError, KeyError, RecursionError) as error:
        raise MisuseError(
            f"{path} is not what 'splitc bench --json' prints: {error}. 'splitc bench ... --json > then.json' makes one"
        ) from error


def _compared(what: str, then: float, now: float) -> tuple[str, str, str, str]:
    return (what, format_seconds(then), format_seconds(now), f"{now / then:.2f}" if then else "")
