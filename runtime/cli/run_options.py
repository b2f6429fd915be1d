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
from splitc.runtime.feeds.asked_shapes import parse_shapes, resized
from splitc.runtime.feeds.fills import make_inputs, parse_fills
from splitc.runtime.hardware.devices import Device
from splitc.runtime.hardware.memory_use import RankMemory
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.package.unfolded import unfolded
from splitc.runtime.package.verification import NEVER
from splitc.runtime.requests.empty_states import unfed_states
from splitc.runtime.requests.rank_kinds import PROCESSES
from splitc.runtime.session.session import Session

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
def open_feeds(
    session: Session, inputs: Path | None, seed: int, fills: list[str], shapes: list[str]
) -> Iterator[dict[str, Array]]:
    """Arrays for the session, from a file or made up. If an engine fails on made-up arrays, the error says so.

    States that the file lacks begin empty, as in a session.
    """
    if inputs:
        arrays = load_arrays(inputs)
        yield {**arrays, **unfed_states(session.manifest, arrays)}
        return
    try:
        yield make_inputs(resized(session.inputs, parse_shapes(shapes)), seed, parse_fills(fills))
    except EngineError as error:
        raise type(error)(
            f"{str(error).rstrip()}\nThe inputs were made up, and their sizes or numbers may not fit together: give "
            "sizes for every input (--shapes), numbers (--fill), or arrays (--inputs)."
        ) from error


def measure_ranks(load: Load, session: Session, feeds: dict[str, Array]) -> list[RankMemory]:
    """The memory of each rank, after runs. `load` loads the session's package as it was loaded.

    The session is closed if its ranks are threads on CPU devices. They run once more then, as processes.
    """
    for note in session.notes:
        print_warning(note)
    measured = session.device_memory() or _measure_apart(load, session, feeds)
    names = [str(device) for device in session.devices]
    return [msgspec.structs.replace(memory, device=name) for memory, name in zip(measured, names, strict=True)]


def _measure_apart(load: Load, session: Session, feeds: dict[str, Array]) -> list[RankMemory]:
    session.close()  # the ranks' memory is needed for the processes
    with load(ranks=PROCESSES, verify=NEVER) as apart:  # the session has verified the package
        if apart.adapters.used:
            apart.run(feeds, adapters={})  # loads the engines without slots, which are planned for as well
        apart.run(feeds)
        return apart.device_memory()


def as_run(manifest: Manifest, devices: Sequence[Device]) -> Manifest:
    """A manifest with the devices that its ranks run on, which may differ from the planned ones."""
    return unfolded(manifest, list(map(str, devices)))
