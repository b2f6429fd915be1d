"""Measure each rank's memory, in a separate process for each rank."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy.typing as npt
import psutil

from splitc.runtime.adapters.held import HeldSum, shards_of
from splitc.runtime.collectives.meeting import Meeting, MeetingEnd, shared_bytes
from splitc.runtime.collectives.threads import Hub, connect
from splitc.runtime.engines import Backend, Communicator, Engine, LoadOptions
from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeBackend
from splitc.runtime.hardware.memory_use import RankMemory
from splitc.runtime.ipc.child_python import last_lines, python_command
from splitc.runtime.ipc.shared_memory import create_memory, map_memory
from splitc.runtime.package.manifest import Manifest, Rank
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.parts import cut_part
from splitc.runtime.package.steps import Receive, Reduce, Send
from splitc.runtime.ranks.loaded import ADAPTED, Setup, choices_of, load_engine, measured_memory
from splitc.runtime.ranks.loop import Program, execute
from splitc.runtime.requests.preamble import rank_feeds
from splitc.runtime.threads.failures import Failure
from splitc.runtime.threads.futures import Executor
from splitc.runtime.threads.progress import counted


@dataclass(frozen=True)
class _Job:
    """What a process does: it runs a rank of a package on the arrays, and prints its memory as JSON.

    - `sent`: the file for the values that the rank sends to others.
    - `meeting`: the descriptor of the shared memory for collectives of its group's engines; -1 if there are none.
    - `adapted`: whether the arrays have a sum of adapters, with which it runs too.
    """

    package: Path
    number: int
    threads: int
    arrays: Mapping[str, npt.NDArray[Any]]
    sent: Path
    meeting: int
    adapted: bool


def measure_memory(
    package: Path, threads: int, feeds: Mapping[str, npt.NDArray[Any]], adapters: HeldSum | None = None
) -> list[RankMemory]:
    """Run the ranks, each in its own process. Raises SplitcError if one fails.

    Ranks run one after another, or at the same time if their engines have common collectives. If ranks receive values
    from later ranks, all ranks run once together first, to record these values. With `adapters`, they run again with
    these.
    """
    manifest = read_manifest(package)
    values = rank_feeds(package, manifest, feeds, keeps_masks=adapters is not None)
    if _run_first(manifest):
        values.update(_run_together(package, manifest, threads, values))
    memory: dict[int, RankMemory] = {}
    shards = None if adapters is None else [shards_of(adapters.arrays, rank) for rank in manifest.ranks]
    with tempfile.TemporaryDirectory(prefix="splitc-measure-") as folder:
        for number, rank in counted("measuring memory", list(enumerate(manifest.ranks))):
            if number not in memory:
                group = _group(rank) or [number]
                memory.update(_measure_group(package, manifest.ranks, group, threads, values, shards, Path(folder)))
    return [memory[number] for number in range(len(manifest.ranks))]


def bytes_to_measure(manifest: Manifest) -> int:
    """The predicted bytes of those ranks that `measure_memory` runs at the same time."""
    ranks = manifest.ranks
    groups = [range(len(ranks))] if _run_first(manifest) else [_group(rank) or [n] for n, rank in enumerate(ranks)]
    return max(sum(ranks[number].total_bytes for number in group) for group in groups)


def _run_first(manifest: Manifest) -> bool:
    """Whether all ranks run once together first, since some receive values from later ones."""
    steps = [(number, step) for number, rank in enumerate(manifest.ranks) for step in rank.program]
    return any(isinstance(step, Receive) and step.source > number for number, step in steps)


def _group(rank: Rank) -> list[int]:
    """The ranks whose engines have collectives with a rank's."""
    return next((file.group for file in rank.engines if file.group), [])


def _measure_group(
    package: Path,
    ranks: Sequence[Rank],
    group: Sequence[int],
    threads: int,
    values: dict[str, npt.NDArray[Any]],
    shards: Sequence[Mapping[str, npt.NDArray[Any]]] | None,
    folder: Path,
) -> dict[int, RankMemory]:
    """The memory of ranks that run at the same time. The values that they send are added to `values`.

    `shards` are each rank's shards of a sum of adapters, if there is one.
    """
    memory = create_memory(shared_bytes(len(group))) if len(group) > 1 else -1
    try:
        commands = []
        for number in group:
            wanted = {name for engine in ranks[number].engines for name in engine.inputs}
            wanted |= {step.value for step in ranks[number].program if isinstance(step, Receive)}
            arrays = _cut_feeds(ranks[number], {name: array for name, array in values.items() if name in wanted})
            arrays.update({} if shards is None else shards[number])
            sent, adapted = folder / f"sent{number}", shards is not None
            job = write_job(folder / f"job{number}", _Job(package, number, threads, arrays, sent, memory, adapted))
            commands.append(python_command(f"from {__name__} import main", "main()", job))
        what = [f"measure the memory of rank {number} ({ranks[number].device})" for number in group]
        printed = last_lines(commands, what, [memory] if memory >= 0 else [])
    finally:
        if memory >= 0:
            os.close(memory)
    for number in group:
        values.update(read_job(folder / f"sent{number}"))
    return {number: msgspec.json.decode(line, type=RankMemory) for number, line in zip(group, printed, strict=True)}


def write_job(path: Path, job: Any) -> Path:
    """Write an object for a process of our own, and return the path. Pickle keeps all number types of arrays."""
    path.write_bytes(pickle.dumps(job, pickle.HIGHEST_PROTOCOL))
    return path


def read_job(path: str | Path) -> Any:
    """The object in a file of `write_job`."""
    return pickle.loads(Path(path).read_bytes())


def _run_together(
    package: Path, manifest: Manifest, threads: int, feeds: Mapping[str, npt.NDArray[Any]]
) -> dict[str, npt.NDArray[Any]]:
    """The values that ranks send each other in one run."""
    backend, ranks = OnnxRuntimeBackend(threads), manifest.ranks
    ends = connect(Hub(len(ranks)), [backend] * len(ranks))
    programs = []
    for number, rank in enumerate(ranks):
        sent = [step.value for step in rank.program if isinstance(step, Send)]
        join = partial(ends[number].create_communicator, uses_operators=True)
        programs.append(Program(rank.program, _load(backend, Setup(number, package, manifest), join), sent))

    def run(number: int) -> dict[str, npt.NDArray[Any]]:
        program = programs[number]
        fed = _cut_feeds(ranks[number], {name: feeds[name] for name in ranks[number].inputs if name in feeds})
        values, _ = execute(program, ends[number], partial(_upload, backend, fed))
        return dict(backend.download({name: values[name] for name in program.outputs}))

    with Executor(len(ranks)) as pool:
        return {name: array for outputs in pool.map(run, range(len(ranks))) for name, array in outputs.items()}


def _load(backend: Backend, setup: Setup, join: Callable[[Sequence[int]], Communicator]) -> list[Engine]:
    """The rank's engines. `join` returns its end of the meeting, for engines with collectives inside."""
    rank = setup.rank
    ends = {group: join(group) for group in {tuple(file.group) for file in rank.engines if file.group}}
    for end in ends.values():
        end.begin(0)
    choices = choices_of(setup.manifest, rank)
    with backend.loading():
        return [
            load_engine(backend, setup, file, choices, LoadOptions(file, communicator=ends.get(tuple(file.group))))
            for file in rank.engines
        ]


def _cut_feeds(rank: Rank, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """The arrays, or a rank's shards of them."""
    parts = {part.name: part for part in rank.parts}
    return {name: cut_part(array, parts[name]) if name in parts else array for name, array in arrays.items()}


def _upload(backend: Backend, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    return {name: backend.upload(array) for name, array in arrays.items()}


def resident_bytes() -> int:
    """The resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """The peak of this process's resident bytes."""
    # getrusage would include the memory of the parent process when it forked.
    if (peak := _status("VmHWM")) is not None:
        return peak
    import resource  # on macOS, which counts in bytes, and in sandboxes whose /proc does not say

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(name: str) -> int | None:
    """The bytes of this entry in Linux's status of this process; None on other systems."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    sizes = (line.split()[1] for line in status.read_text().splitlines() if line.startswith(f"{name}:"))
    return next((int(size) * 1024 for size in sizes), None)


class Alone:
    """The exchange of a rank that runs alone: it receives from `arrays`, and the values that it sends go to `sent`.

    A collective returns the rank's own parts. The numbers are wrong then, but the sizes are right.
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]], backend: Backend) -> None:
        self._arrays = arrays
        self._backend = backend
        self.sent: dict[str, npt.NDArray[Any]] = {}

    def send(self, target: int, name: str, value: Any) -> None:
        if not isinstance(value, Failure):
            self.sent[name] = self._backend.download({name: value})[name]

    def receive(self, source: int, name: str) -> Any:
        return self._backend.upload(self._arrays[name])

    def all_reduce(self, step: Reduce, parts: Any) -> Any:
        return parts


def _measure_rank(job: _Job, manifest: Manifest, end: MeetingEnd) -> RankMemory:
    """Measure a rank, in its own process. `end` is its end of the meeting of its group's engines.

    Weights in mapped files count as far as requests read them, but not for loading: the system may drop them again. A
    request's memory includes its feeds. A state that is overwritten counts once, as an output. Adapters count as the
    rank's own copy.
    """
    arrays, rank = job.arrays, manifest.ranks[job.number]
    backend = OnnxRuntimeBackend(job.threads)
    backend.limit(rank.limit_bytes)
    if manifest.maps_weights:
        backend.map_weights()
    before = resident_bytes()
    engines = _load(backend, Setup(job.number, job.package, manifest), lambda _: end)
    loaded, loading, mapped = resident_bytes(), peak_bytes(), _status("RssFile") or 0
    alone = Alone(arrays, backend)
    slots = choices_of(manifest, rank)[ADAPTED]
    given = {name: array for name, array in arrays.items() if name in rank.inputs}
    program, feeds = Program(rank.program, engines, rank.outputs), partial(_upload, backend, given)
    execute(program, alone, feeds)
    if job.adapted:  # also ranks without slots: others may wait for them
        end.begin(1)
        held = {name: backend.upload(arrays[name].copy()) for name in slots}  # copies, as in a session
        execute(program, alone, lambda: {**feeds(), **held})
    running = peak if (peak := peak_bytes()) > loading else resident_bytes()
    loaded += max(0, (_status("RssFile") or 0) - mapped)
    write_job(job.sent, alone.sent)
    counted = slots.union(state.input for state in manifest.states if state.in_place)
    running += sum(array.nbytes for name, array in arrays.items() if name not in counted)
    return measured_memory(rank, max(0, loaded - before), max(loading, running) - before, job.adapted)


def main() -> None:
    """Do the job in the file that the command line names."""
    job: _Job = read_job(sys.argv[1])
    manifest = read_manifest(job.package)
    group = _group(manifest.ranks[job.number]) or [job.number]
    meeting = Meeting(len(group), map_memory(job.meeting) if job.meeting >= 0 else None)
    end = meeting.join(group.index(job.number))
    try:
        with Executor(1) as pool:  # glibc places a thread's blocks otherwise than the main one's, and ranks are threads
            measured = pool.submit(_measure_rank, job, manifest, end).result()
    except BaseException:
        meeting.abort()  # the others wait for this rank
        raise
    print(msgspec.json.encode(measured).decode())
