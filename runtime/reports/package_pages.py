"""The pages of a package: its contents, its times, and its differences from the unsplit model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from splitc.runtime.hardware.devices import free_bytes, parse_devices
from splitc.runtime.hardware.memory_use import RankMemory
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.package.mode_words import mode_in_words, words_of
from splitc.runtime.package.unfolded import count_groups
from splitc.runtime.reports.bench_verdict import bench_verdict
from splitc.runtime.reports.contents import Chapter, Page, Section, Table
from splitc.runtime.reports.errors_chart import errors_section
from splitc.runtime.reports.memory_chart import memory_section
from splitc.runtime.reports.strips import ShownRank, strip_section
from splitc.runtime.reports.timeline_chart import timeline_sections
from splitc.runtime.reports.times_charts import compared_section, latency_section, times_section
from splitc.runtime.reports.whole_table import whole_section
from splitc.runtime.tools.bench import BenchResult
from splitc.runtime.tools.compare import Difference
from splitc.runtime.tools.earlier_bench import EarlierBench
from splitc.runtime.tools.module_sums import IN_TURN, sum_modules
from splitc.runtime.tools.trace import time_caveats
from splitc.runtime.units import format_shape

BUDGET = "what is free on this machine now"
# The last requests of a stream that are drawn, for each request in flight.
STREAMED = 4


def inspect_page(name: str, manifests: Mapping[str, Manifest], files: Sequence[str] = (), swap: bool = False) -> Page:
    """A package's contents, by module. With `swap`, modules work in turn. The module of a single model has no name."""
    chapters = [_holds(title, manifest) for title, manifest in manifests.items()]
    if len(manifests) > 1:
        sums = sum_modules(manifests, swap)
        budgets = free_bytes(parse_devices(list(sums)))
        ranks = [
            ShownRank(
                device,
                (),
                held.weights - held.mapped,
                held.activations,
                held.cache,
                held.total,
                budget,
                adapters=held.adapters,
            )
            for (device, held), budget in zip(sums.items(), budgets, strict=True)
        ]
        notes = [IN_TURN] if swap else []
        notes += [f"Beside the modules: {', '.join(files)}"] if files else []
        chapters.insert(0, Chapter("All modules", (), (), notes, _some(memory_section(list(sums), ranks, BUDGET))))
    return Page(f"Package {name}", _describe(manifests), chapters)


def bench_page(
    name: str, manifest: Manifest, result: BenchResult, measured: Sequence[RankMemory], before: EarlierBench | None
) -> Page:
    """A package's times, timelines and memory, with those of an earlier bench if given."""
    at_work = words_of(manifest.split_mode).at_work
    streamed = result.timeline[-STREAMED * result.in_flight :] if result.in_flight > 1 else []
    facts = [("rate", f"{result.rate:.1f} requests/s"), ("in flight", str(result.in_flight))]
    if result.in_flight > 1:
        facts.append(("rate beside one at a time", f"{result.against_one:.2f} times"))
    verdict = bench_verdict(manifest, result, before)
    sections = [
        latency_section(result, before),
        *([] if before is None else [compared_section(result, before)]),
        times_section(result, at_work, time_caveats(manifest.ranks, result.timeline)),
        *timeline_sections(manifest.ranks, [result.alone], streamed),
        *_body(manifest, measured),
    ]
    return Page(f"Times of {name}", _describe({"": manifest}), [Chapter("", facts, verdict, (), sections)])


def check_page(
    name: str, checked: Mapping[str, tuple[Manifest, Sequence[Difference], str, Sequence[RankMemory]]]
) -> Page:
    """The differences of outputs, by module: its manifest, the differences, the reference, and the ranks' memory."""
    chapters = []
    for title, (manifest, differences, compared, measured) in checked.items():
        agree = sum(difference.passed for difference in differences)
        facts = [("agree", f"{agree} of {len(differences)} outputs"), ("reference", compared)]
        chapters.append(Chapter(title, facts, (), (), [errors_section(differences), *_body(manifest, measured)]))
    differ = sum(not difference.passed for _, differences, _, _ in checked.values() for difference in differences)
    verdict = f"{differ} outputs differ" if differ else "all outputs agree"
    manifests = {title: check[0] for title, check in checked.items()}
    return Page(f"Check of {name}: {verdict}", _describe(manifests), chapters)


def _holds(title: str, manifest: Manifest) -> Chapter:
    """The contents of a package of one model, or of a module."""
    ranks = len(manifest.ranks)
    mode = mode_in_words(manifest.split_mode, ranks, count_groups(manifest, ranks))
    facts = [("split mode", mode), ("engines", manifest.engine), ("numbers", manifest.number_type)]
    if manifest.collectives:
        facts.append((words_of(manifest.split_mode).exchanges, f"{manifest.collectives} a run"))
    rows = [
        (kind, tensor.name, tensor.dtype, format_shape(tensor.shape))
        for kind, tensors in manifest.tensors.items()
        for tensor in tensors
    ]
    tensors = Section("Inputs and outputs", tables=[Table("All of them", ("", "name", "type", "shape"), rows)])
    return Chapter(title, facts, (), (), [*_body(manifest, (), whole=True), tensors])


def _body(manifest: Manifest, measured: Sequence[RankMemory], whole: bool = False) -> list[Section]:
    """Blocks and memory; with `whole`, also the weights that were not split."""
    budgets = free_bytes(parse_devices([rank.device for rank in manifest.ranks]))
    ranks = [
        ShownRank(
            rank.device,
            rank.blocks,
            rank.weights_bytes - rank.mapped_bytes,
            rank.activation_bytes,
            rank.cache_bytes,
            rank.total_bytes,
            budget,
            memory,
            rank.adapter_bytes,
        )
        for rank, budget, memory in zip_longest(manifest.ranks, budgets, measured)
    ]
    words = words_of(manifest.split_mode)
    weights = [(weight.name, weight.bytes, weight.reason) for weight in manifest.unsplit] if whole else []
    labels = [f"{number} {rank.device}" for number, rank in enumerate(ranks)]
    return [
        strip_section(ranks, manifest.cuts, words.is_radial, count_groups(manifest, len(ranks))),
        *_some(memory_section(labels, ranks, BUDGET)),
        *_some(whole_section(weights, words.whole)),
    ]


def _describe(manifests: Mapping[str, Manifest]) -> str:
    if len(manifests) > 1:
        return f"{len(manifests)} modules: {', '.join(manifests)}"
    (manifest,) = manifests.values()
    count = len(manifest.ranks)
    mode = mode_in_words(manifest.split_mode, count, count_groups(manifest, count))
    devices = "one device" if count == 1 else f"{count} devices, split by {mode}"
    return f"{manifest.source.name} on {devices}, {manifest.engine} engines"


def _some(section: Section | None) -> list[Section]:
    return [] if section is None else [section]
