"""One rank at work: a thread that loads its engines and runs its program for each request, in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy.typing as npt

from splitc.runtime.arrays import is_zeros, zeros
from splitc.runtime.collectives import Transport
from splitc.runtime.engines import Backend
from splitc.runtime.errors import SplitcError
from splitc.runtime.failures import Failure, attempt
from splitc.runtime.manifest import Rank, State
from splitc.runtime.parts import cut_part, cut_places, part_shape
from splitc.runtime.ranks.loop import Program, Span, execute
from splitc.runtime.tools.rank_memory import RankMemory

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Served:
    """A request on one rank: when it began and ended there, in seconds of time.perf_counter, and its steps."""

    start: float
    end: float
    spans: Sequence[Span]


NEVER = Served(0.0, 0.0, ())


def closed_before() -> SplitcError:
    """What a request gets that was cancelled."""
    return SplitcError("the session was closed before this request ran")


@dataclass(eq=False)
class Request:
    """One run on its way through the ranks, each of which adds its part; the last one calls `done`.

    `sequence` is the number of the stateful sequence that it belongs to, `first` the states that it begins with;
    with `room` there is room in them for what is to come, so that they are written in place.
    `outputs` and `served` are by rank.
    """

    feeds: Mapping[str, Array]
    waiting: int
    done: Callable[[Request], None]
    sequence: int | None = None
    first: Mapping[str, Array] = field(default_factory=dict)
    room: bool = False
    outputs: dict[int, dict[str, Array]] = field(default_factory=dict)
    served: dict[int, Served] = field(default_factory=dict)
    error: BaseException | None = None
    submitted: float = field(default_factory=time.perf_counter)
    replayed: bool = False
    started: bool = False
    cancelled: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> bool:
        """Whether to run it. All ranks get the same answer: once one has begun, it is too late to cancel."""
        with self.lock:
            self.started = self.started or not self.cancelled
            return self.started

    def cancel(self) -> None:
        """Do not run it, unless a rank has begun."""
        with self.lock:
            self.cancelled = True

    def finish(self, rank: int, outputs: Mapping[str, Array], served: Served, error: BaseException | None) -> None:
        """What came of it on one rank; only the first time counts."""
        with self.lock:
            if rank in self.outputs:
                return
            self.outputs[rank] = dict(outputs)
            self.served[rank] = served
            self.error = self.error or error
            self.waiting -= 1
            if self.waiting:
                return
        self.done(self)


class Worker(threading.Thread):
    """One rank of a session. `states` are those that stay on the ranks.

    `requests` are run in their order; what else the thread is to do comes with them, as a function.
    `broken` is called when the thread itself fails, not just a request.
    `resident` has the output for each input that is a state; `sequences` hold the states.
    `why_plain` says, once it is loaded, what keeps its work from being captured as a CUDA graph, if anything does.
    """

    def __init__(
        self,
        number: int,
        rank: Rank,
        states: Sequence[State],
        package: Path,
        backend: Backend,
        transport: Transport,
        broken: Callable[[BaseException], None],
    ) -> None:
        super().__init__(name=f"splitc rank {number} ({rank.device})", daemon=True)
        self.requests: SimpleQueue[Request | Callable[[], None] | None] = SimpleQueue()
        self.backend = backend
        self.number = number
        self._rank = rank
        stays = [state for state in states if state.input in rank.inputs]
        self.resident = {state.input: state.output for state in stays}
        self._in_place = [state for state in stays if state.in_place]
        self._package = package
        self.ready: Future[None] = Future()
        self.why_plain: str | None = None
        self._parts = {part.name: part for part in rank.parts}
        self._overrides = {each.value: each for each in rank.overrides}
        self.transport = transport
        self._broken = broken
        # So that a device that works by itself has the next request to do while one waits for what it did.
        self._finisher = ThreadPoolExecutor(1) if backend.asynchronous else None
        self.sequences: dict[int | None, dict[str, Any]] = {}

    def run(self) -> None:
        try:
            self._program = self._load()
            self.ready.set_result(None)
        except BaseException as error:  # the session waits for this
            self.ready.set_exception(error)
            return
        try:
            while self._serve_next():
                pass
        except BaseException as error:  # a thread has no caller: the session must know that it is gone
            self._broken(error)
        finally:
            # Here, and not whenever the garbage collector comes by: this thread is on the right device.
            self.sequences.clear()
            if self._finisher is not None:
                self._finisher.shutdown()
            self.transport.leave()
            self.backend.detach()
            del self._program

    def _serve_next(self) -> bool:
        """Run what comes next. Returns whether there was something; nothing of it stays here."""
        request = self.requests.get()
        if isinstance(request, Request):
            if request.begin():
                self._serve(request)
            else:
                request.finish(self.number, {}, NEVER, closed_before())
        elif request is not None:
            request()
        return request is not None

    def _load(self) -> Program:
        """Load the engines; those that exchange values while they run learn with whom."""
        self.backend.attach()
        self._before = self.backend.used_bytes()
        engines = []
        for file in self._rank.engines:
            source = self._package / file.source if file.source is not None else None
            engines.append(self.backend.load(self._package / file.path, source, file.sizes_only))
        self.backend.reserve(self._rank.activation_bytes + 2 * self._rank.cache_bytes)
        for file, engine in zip(self._rank.engines, engines):
            if file.group:
                engine.connect(self.transport.join(file.group))
        self.why_plain = next((why for each in engines if (why := getattr(each, "why_plain", None))), None)
        self._loaded = self.backend.used_bytes()
        return Program(self._rank.program, engines, [*self._rank.outputs, *self._rank.keeps])

    def device_memory(self) -> RankMemory | None:
        """What the rank's own device holds more than before it was loaded; None where that is the host's memory.

        What CuPy and the engines have once taken they keep, so after a run this is the most that it took.
        """
        now = self.backend.used_bytes()
        if now is None or self._before is None or self._loaded is None:
            return None
        rank, before = self._rank, self._before
        return RankMemory(rank.device, self._loaded - before, now - before, rank.weights_bytes, rank.total_bytes)

    def _serve(self, request: Request) -> None:
        start = time.perf_counter()
        fetch = attempt(lambda: self._run_request(request))
        if self._finisher is None:
            self._finish(request, start, fetch)
        else:
            self._finisher.submit(self._finish, request, start, fetch)

    def _finish(self, request: Request, start: float, fetch: Any) -> None:
        """Give the request what came of it; `fetch` waits for its outputs."""
        made, spans = (fetch, ()) if isinstance(fetch, Failure) else (attempt(fetch[0]), fetch[1])
        served = Served(start, time.perf_counter(), spans)
        if not isinstance(made, Failure):
            request.finish(self.number, made, served, None)
            return
        request.finish(self.number, {}, served, made.error)
        if any(file.group for file in self._rank.engines):
            self._broken(made.error)  # the other ranks' engines wait for this one's on their GPUs, and would for ever

    def _run_request(self, request: Request) -> tuple[Callable[[], dict[str, Array]], list[Span]]:
        """Run the program. Returns what waits for the outputs."""
        states = self.sequences.get(request.sequence, {})
        values, spans = self.execute(request, states, lambda name: self.backend.upload(self.cut(name, request)))
        if request.sequence is not None:
            kept = {n: self.backend.settle(values[output], states.get(n)) for n, output in self.resident.items()}
            if not states or any(kept[name] is not states[name] for name in kept):  # recordings know the states by it
                self.sequences[request.sequence] = kept
        return self.backend.fetch({name: values[name] for name in self.given(request)}), spans

    def execute(
        self, request: Request, states: Mapping[str, Any], upload: Callable[[str], Any]
    ) -> tuple[dict[str, Any], list[Span]]:
        """Run the program on the states that stay on this rank, and on what `upload` makes of inputs."""
        into: dict[str, Any] = {}

        def feeds() -> dict[str, Any]:
            fed = {name: states[name] if name in states else upload(name) for name in self._rank.inputs}
            fed.update({value: upload(value) for value, each in self._overrides.items() if each.input in request.feeds})
            if request.room:
                into.update({state.output: fed[state.input] for state in self._in_place})
            return fed

        return execute(self._program, self.transport, feeds, self.backend.accumulate, into)

    def given(self, request: Request) -> list[str]:
        """The outputs that the rank gives the request, rather than keep as a state."""
        kept = set(self.resident.values()) if request.sequence is not None else set[str]()
        return [name for name in self._rank.outputs if name not in kept]

    def forget(self, sequence: int) -> None:
        """Let the states of a sequence go."""
        self.sequences.pop(sequence, None)

    def cut(self, name: str, request: Request) -> Array:
        """This rank's part of an input, or of an optional one, by the name of its weight."""
        if name in self._overrides:
            return cut_places(request.feeds[self._overrides[name].input], self._overrides[name].places)
        array = request.first[name] if name in request.first else request.feeds[name]
        part = self._parts.get(name)
        if part is None:
            return array
        return zeros(part_shape(array.shape, part), array.dtype) if is_zeros(array) else cut_part(array, part)
