"""What commands that run a package share: loading it, making feeds, measuring its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from splitc.runtime.adapters.asked import parse_adapters
from splitc.runtime.arrays.array import Array
from splitc.runtime.arrays.files import load_arrays
from splitc.runtime.cli.shared_options import ADAPTER, CUDA_GRAPH, DEVICE, HOST_CODE, MODULE, RANKS, THREADS, VERIFY
from splitc.runtime.cli.terminal import print_warning
from splitc.runtime.errors import EngineError
from splitc.runtime.feeds.fills import make_inputs, parse_fills
from splitc.runtime.feeds.rows import count_rows, cut_rows, share_rows
from splitc.runtime.hardware.devices import Device, host_memory
from splitc.runtime.hardware.memory_use import RankMemory
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.package.unfolded import unfolded
from splitc.runtime.requests.empty_states import unfed_states
from splitc.runtime.session.session import Session, choose_shares
from splitc.runtime.tools.rank_memory import bytes_to_measure, measure_memory
from splitc.runtime.units import format_bytes

Load = partial[Session]


def loading(
    module: str | None = MODULE,
    device: list[str] = DEVICE,
    cuda_graph: bool = CUDA_GRAPH,
    threads: int | None = THREADS,
    verify: str = VERIFY,
    ranks: str | None = RANKS,
    host_code: bool = HOST_CODE,
    adapter: list[str] = ADAPTER,
) -> Load:
    """A function that loads a package with these options."""
    return partial(
        Session,
        module=module,
        devices=device,
        cuda_graphs=cuda_graph,
        threads=threads,
        verify=verify,
        ranks=ranks,
        host_code=host_code,
        adapters=parse_adapters(adapter),
    )


@contextmanager
def open_feeds(session: Session, inputs: Path | None, seed: int, fills: list[str]) -> Iterator[dict[str, Array]]:
    """Arrays for the session, from a file or made up. If an engine fails on made-up arrays, the error says so.

    States that the file lacks begin empty, as in a session.
    """
    if inputs:
        arrays = load_arrays(inputs)
        yield {**arrays, **unfed_states(session.manifest, arrays)}
        return
    try:
        yield make_inputs(session.inputs, seed, parse_fills(fills))
    except EngineError as error:
        raise type(error)(
            f"{error}\nThe inputs were made up in the sizes that the package was planned for; these may not fit "
            "together. Give --inputs, --fill, or compile with --shapes for every input."
        ) from error


def measure_ranks(session: Session, feeds: dict[str, Array]) -> list[RankMemory]:
    """The memory of each rank: on GPUs as it is now, after runs; on CPU devices measured in a process for each rank.

    None, with a warning, if these processes would need more than is free beside the session.
    """
    for note in session.notes:
        print_warning(note)
    measured = session.device_memory()
    if not measured and (needed := bytes_to_measure(session.manifest)) > (free := host_memory()[1]):
        print_warning(
            f"memory is not measured: that needs {format_bytes(needed)} beside the session, and {format_bytes(free)} "
            "is free"
        )
        return []
    measured = measured or _measure_groups(session, feeds)
    names = [str(device) for device in session.devices]
    return [msgspec.structs.replace(memory, device=name) for memory, name in zip(measured, names, strict=True)]


def _measure_groups(session: Session, feeds: dict[str, Array]) -> list[RankMemory]:
    """The memory of ranks on CPU devices. Ranks of several groups get their group's rows of the feeds."""
    manifest, count = session.manifest, len(session.devices) // len(session.manifest.ranks)
    adapters = session.adapters.sum(None)
    axes = manifest.batch or {}
    rows = count_rows(feeds, axes, manifest.row_sources) if count > 1 else None
    if rows is None or rows < 2:
        return measure_memory(session.package, session.threads, feeds, adapters) * count
    counts = share_rows(rows, choose_shares(manifest, count))
    measured = {
        own: measure_memory(session.package, session.threads, cut_rows(feeds, axes, rows, 0, max(1, own)), adapters)
        for own in dict.fromkeys(counts)
    }
    return [memory for own in counts for memory in measured[own]]


def as_run(manifest: Manifest, devices: Sequence[Device]) -> Manifest:
    """A manifest with the devices that its ranks run on, which may differ from the planned ones."""
    return unfolded(manifest, list(map(str, devices)))
