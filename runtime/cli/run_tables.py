"""Tables of a package's outputs, memory and times on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from splitc.runtime.cli.terminal import fitted, out, print_table
from splitc.runtime.hardware.memory_use import RankMemory
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.package.mode_words import words_of
from splitc.runtime.tools.bench import BenchResult
from splitc.runtime.tools.compare import Difference
from splitc.runtime.tools.earlier_bench import EarlierBench
from splitc.runtime.tools.trace import draw_timeline, time_caveats
from splitc.runtime.units import format_bytes

# The most outputs that `check` lists one by one, the worst first. A decoder has two for each layer.
LISTED = 12
# The most characters of a rank's timeline.
TIMELINE = 72

# The columns of characters of a table of differences beside the names.
NAMELESS = 68
_ERRORS = ("largest error", "relative", "expected", "got")
_COLUMNS = ("output", *_ERRORS[:2], "at", *_ERRORS[2:], "")


def print_differences(differences: Sequence[Difference]) -> None:
    """Print the outputs' errors, the largest first."""
    print_table(_COLUMNS, _difference_rows(differences, LISTED), right=_ERRORS)


def print_module_differences(modules: Mapping[str, Sequence[Difference]]) -> None:
    """Print the errors of the modules' outputs, the largest first in each module."""
    rows = [
        ["" if number else name, *row]
        for name, differences in modules.items()
        for number, row in enumerate(_difference_rows(differences, LISTED // 4))
    ]
    print_table(("module", *_COLUMNS), rows, right=_ERRORS)


def _difference_rows(differences: Sequence[Difference], most: int) -> Iterator[list[str | Text]]:
    """Rows for the largest differences, and for every output that failed."""
    worst = sorted(differences, key=lambda difference: (difference.passed, -difference.relative))
    listed = [difference for number, difference in enumerate(worst) if number < most or not difference.passed]
    for difference in listed:
        differs = Text.assemble(("differs", "bold red"), f" {difference.problem or ''}")
        verdict = Text("agrees", "green") if difference.passed else differs
        errors = (f"{difference.absolute:.2e}", f"{difference.relative:.2e}")
        values = (f"{difference.expected:.6g}", f"{difference.actual:.6g}")
        name, where = fitted(difference.name, out.width - NAMELESS), ",".join(map(str, difference.where))
        yield [name, *errors, where, *values, verdict]
    if len(differences) > len(listed):
        yield [f"... and {len(differences) - len(listed)} more that agree"]


def print_memory(ranks: Sequence[RankMemory]) -> None:
    """Print each rank's measured and predicted memory, in the terms of `print_memory_terms`."""
    sizes = ("loaded", "predicted", "running", "predicted", "peak", "predicted", "unaccounted")
    rows = []
    for number, rank in enumerate(ranks):
        pairs = (rank.loaded, rank.predicted_loaded), (rank.peak, rank.predicted_total)
        running = (rank.peak - rank.loaded, max(0, rank.predicted_total - rank.predicted_loaded))
        numbers = map(format_bytes, (*pairs[0], *running, *pairs[1]))
        rows.append([f"{number} {rank.device}", *numbers, format_bytes(rank.unaccounted)])
    print_table(("rank", *sizes), rows, right=sizes)


def print_memory_terms() -> None:
    """Say what the columns of `print_memory` are."""
    out.print(
        "loaded: weights and the engine's own memory; running: activations and caches; unaccounted: the measured peak "
        "less the predicted one, negative where the prediction was too high, as by some MiB for tiny models"
    )


def print_bench(result: BenchResult, manifest: Manifest, before: EarlierBench | None) -> None:
    """Print a package's times and a timeline of its ranks, with an earlier bench for comparison if given."""
    for title, (numbers, lines) in ((("", "threads"), result.request_rows()), (("rank",), result.rank_rows())):
        print_table((*title, *numbers), lines, right=numbers)
    count = result.latency.runs
    if result.in_flight > 1:
        out.print(
            f"{count} runs, {result.in_flight} in flight: {result.against_one:.2f} times the rate of one at a time"
            + ("; package / unsplit compares the time per request." if result.baselines else ".")
        )
    else:
        out.print(f"Medians of {count} runs, one request at a time: {words_of(manifest.split_mode).at_work}.")
    for text in time_caveats(manifest.ranks, result.timeline):
        out.print(text)
    drawn = draw_timeline(len(result.ranks), result.timeline[-4 * result.in_flight :], min(TIMELINE, out.width - 8))
    for number, line in enumerate(drawn):
        out.print(Text.assemble(f"rank {number} ", (line, "cyan")))
    if before is not None:
        _print_compared(result, before)


def _print_compared(result: BenchResult, before: EarlierBench) -> None:
    columns = ("then", "now", "now / then")
    print_table((before.name, *columns), before.rows(result), right=columns)
    for text in before.unlike(result):
        out.print(text)
