"""The thread of one rank: it loads the rank's engines and runs its program for each request, in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from splitc.runtime.arrays import Array, Zeros
from splitc.runtime.collectives import Collectives
from splitc.runtime.engines import Backend, Communicator, Room
from splitc.runtime.engines.gpu_device import GpuDevice
from splitc.runtime.engines.gpu_outputs import hand_over
from splitc.runtime.engines.weight_places import SwapRoom
from splitc.runtime.executor import Executor
from splitc.runtime.failures import Failure, attempt, clear_frames
from splitc.runtime.gpu_feeds import Feed, GpuFeed
from splitc.runtime.manifest import Rank, State
from splitc.runtime.memory_use import RankMemory
from splitc.runtime.parts import cut_part, cut_places, part_shape
from splitc.runtime.ranks.loop import Program, Span, execute
from splitc.runtime.ranks.request import NEVER, InFlightRequest, Served, closed_before


def not_replayed(reason: str) -> str:
    """The message for the user where requests run eagerly."""
    return f"requests are not replayed as CUDA graphs: {reason}"


# A function that waits for a request's outputs, when each step ran, and whether a state of the sequence grew.
Ran = tuple[Callable[[], dict[str, Array]], list[Span], bool]


class Requests(Protocol):
    """Where a rank gets its requests from."""

    def get(self) -> InFlightRequest | Callable[[], None] | None:
        """Wait for the next request, function to call, or None at the end."""


class Replays(Protocol):
    """The rank's own recordings of requests as CUDA graphs. `notes` say why requests are not replayed."""

    @property
    def notes(self) -> list[str]: ...

    def play(self, worker: Worker, request: InFlightRequest) -> tuple[dict[str, Array], Span] | None:
        """Replay the request: its outputs, and when the GPU worked. None if it has to run eagerly."""

    def forget(self, worker: Worker, sequence: int, reusable: bool) -> None:
        """The sequence has ended, and its states are about to be freed, unless they are `reusable` for another one."""

    def clear(self) -> None:
        """Drop all recordings. NCCL's communicators can't be released before those with their work."""


class Worker(threading.Thread):
    """The thread of one rank of a session. `states` are those that stay on the ranks.

    The queue `requests` has requests, functions to call on the thread, and None to end it, which are taken in order.
    `broken` is called if the thread itself fails, not just a request. `resident` maps each input that is a state to its
    output. `sequences` hold the states. `capture_blocker`, set after loading, says why the rank's work can't be
    captured as a CUDA graph, or is None. `room` is where a GPU puts the outputs, if that matters. `turns` is the room
    that its weights have in turn with those of other models, if they do.
    """

    def __init__(
        self,
        number: int,
        rank: Rank,
        states: Sequence[State],
        package: Path,
        backend: Backend,
        collectives: Collectives,
        broken: Callable[[BaseException], None],
        requests: Requests | None = None,
        replays: Replays | None = None,
        room: Room | None = None,
        turns: SwapRoom | None = None,
    ) -> None:
        super().__init__(name=f"splitc rank {number} ({rank.device})", daemon=True)
        self.requests: SimpleQueue[InFlightRequest | Callable[[], None] | None] = SimpleQueue()
        self._inbox: Requests = requests or self.requests
        self._replays = replays
        self.room = room
        self._turns = turns
        self.backend = backend
        self.number = number
        self._rank = rank
        stays = [state for state in states if state.input in rank.inputs]
        self.resident = {state.input: state.output for state in stays}
        self._in_place = {state.input: state for state in stays if state.in_place}
        self._package = package
        self.ready: Future[None] = Future()
        self.capture_blocker: str | None = None
        self._parts = {part.name: part for part in rank.parts}
        self._overrides = {each.value: each for each in rank.overrides}
        self.collectives = collectives
        self._broken = broken
        # Waits for results of an asynchronous device on another thread, so that this one can launch the next request.
        self._finisher = Executor(1) if backend.asynchronous else None
        self._unfinished: Future[None] | None = None
        self.sequences: dict[int | None, dict[str, Any]] = {}
        self._communicators: dict[tuple[int, ...], Communicator] = {}

    def run(self) -> None:
        try:
            self._program = self._load()
        except BaseException as error:  # the session waits for this
            attempt(self._leave)  # a GPU that has failed may fail again, of which the session knows enough
            clear_frames(error)  # with the engines that were loaded
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        try:
            while self._serve_next():
                pass
        except BaseException as error:  # a thread has no caller: the session must know that it is gone
            self._broken(error)
        finally:
            self._leave()
            del self._program

    def _leave(self) -> None:
        """Free memory here rather than in the garbage collector, since this thread is on the right device."""
        if self._replays is not None:
            self._replays.clear()
        self.sequences.clear()
        if self._finisher is not None:
            self._finisher.shutdown()
        self.backend.detach()

    def _serve_next(self) -> bool:
        """Run the next request. Returns False at the end. No reference to the request is kept."""
        request = self._inbox.get()
        if isinstance(request, InFlightRequest):
            if request.begin():
                self._serve(request)
            else:
                request.finish(self.number, {}, NEVER, closed_before())
        elif request is not None:
            request()
        return request is not None

    def _load(self) -> Program:
        """Load the engines, and connect those with collectives inside."""
        self.backend.attach()
        if self._turns is not None:
            self.backend.take_turns(self._turns)
        self._before = self.backend.used_bytes()
        engines = []
        is_whole = len(self._rank.engines) == 1  # segments are too many to have two sessions each
        for file in self._rank.engines:
            source = self._package / file.source if file.source is not None else None
            communicator = self.communicator(tuple(file.group)) if file.group else None
            path, weights = self._package / file.path, file.weights if is_whole else None
            engines.append(self.backend.load(path, source, file.sizes_only, communicator, weights, file.attends))
        for each in self._communicators.values():
            each.connect()
        self.backend.reserve(self._rank.activation_bytes + 2 * self._rank.cache_bytes)
        blockers = [engine.capture_blocker for engine in engines]
        # A graph has the sizes of the request that was captured: with other data it reads memory that is not its own.
        blockers += [f"sizes in {file.path} depend on data" for file in self._rank.engines if file.data_sizes]
        self.capture_blocker = next(filter(None, blockers), None)
        self._loaded = self.backend.used_bytes()
        return Program(self._rank.program, engines, [*self._rank.outputs, *self._rank.keeps])

    def bring_in(self) -> None:
        """Bring the weights in, which other models had the memory of. They may have taken more."""
        self.backend.bring_in()
        self.backend.reserve(self._rank.activation_bytes + 2 * self._rank.cache_bytes)

    def communicator(self, group: tuple[int, ...]) -> Communicator:
        """The communicator of engines with collectives inside: one for each group that the rank is in."""
        if group not in self._communicators:
            self._communicators[group] = self.collectives.create_communicator(group, self.backend.uses_operators)
        return self._communicators[group]

    def device_memory(self) -> RankMemory | None:
        """How much more memory the rank's device uses than before loading; None if it uses the host's memory.

        CuPy and the engines never return memory, so after a run this is the peak.
        """
        now = self.backend.used_bytes()
        if now is None or self._before is None or self._loaded is None:
            return None
        rank, before = self._rank, self._before
        return RankMemory(rank.device, self._loaded - before, now - before, rank.weights_bytes, rank.total_bytes)

    def _serve(self, request: InFlightRequest) -> None:
        start = time.perf_counter()
        runs = [communicator.begin() for communicator in self._communicators.values()]
        fetch = attempt(partial(self._replay, request))
        if fetch is not None:
            self._finish(request, runs, start, fetch)
            return
        fetch = attempt(partial(self._run_request, request))
        if self._finisher is None:
            self._finish(request, runs, start, fetch)
        else:
            self._unfinished = self._finisher.submit(self._finish, request, runs, start, fetch)

    def _finish(self, request: InFlightRequest, runs: Sequence[int], start: float, fetch: Any) -> None:
        """Give the request its outputs or its error. `fetch` waits for the outputs; `runs` are its communicators'."""
        made, spans, grew = fetch, [], False
        if not isinstance(fetch, Failure):
            wait, spans, grew = fetch
            made = attempt(partial(self._take, wait))
        served = Served(start, time.perf_counter(), spans, grew)
        if not isinstance(made, Failure):
            request.finish(self.number, made, served, None)
            return
        request.finish(self.number, {}, served, made.error)  # before the others, whose errors only follow from it
        self._give_up(made.error, runs)

    def _take(self, fetch: Callable[[], dict[str, Array]]) -> dict[str, Array]:
        """The outputs, if all collectives went well."""
        made = fetch()
        for communicator in self._communicators.values():
            communicator.check()
        return made

    def _give_up(self, error: BaseException, runs: Sequence[int]) -> None:
        """Make the request fail on the ranks whose engines would wait for this one's. Or else the session is broken."""
        ends = zip(self._communicators.values(), runs, strict=True)
        told = [communicator.fail(run) for communicator, run in ends]
        if not all(told):
            self._broken(error)

    def _replay(self, request: InFlightRequest) -> Ran | None:
        """Replay the request, if it can be."""
        played = None if self._replays is None else self._replays.play(self, request)
        return None if played is None else (lambda: played[0], [played[1]], False)

    def _run_request(self, request: InFlightRequest) -> Ran:
        """Run the program."""
        grew = False
        before = self.sequences.get(request.sequence)
        states = self._begin_states(request) if before is None else before
        values, spans = self.execute(request, states, partial(self._upload, request))
        if request.sequence is not None:
            kept = {n: self.backend.persist_state(values[output], states.get(n)) for n, output in self.resident.items()}
            kept.update({name: each for name, each in states.items() if name not in self.resident})
            grew = self._replays is not None and not all(
                name in states and kept[name].shape == states[name].shape for name in self.resident
            )
            self.sequences[request.sequence] = kept
        given = {name: values[name] for name in self.given(request)}
        wait = self.hand_over(given) if request.on_device else self.backend.fetch(given, self.room)
        return wait, spans, grew

    def run_aside(self, request: InFlightRequest, states: Mapping[str, Any]) -> dict[str, Array]:
        """The outputs of the request, which its sequence knows nothing of: its states stay as they are.

        But for those that are written in place, where running the request again writes the same.
        """
        values, _ = self.execute(request, states, partial(self._upload, request))
        given = {name: values[name] for name in self.given(request)}
        return (self.hand_over(given) if request.on_device else self.backend.fetch(given))()

    def hold_states(self, request: InFlightRequest, states: Mapping[str, Any]) -> dict[str, Any]:
        """Copies of a sequence's states, but for those that are written in place."""
        assert isinstance(self.backend, GpuDevice), "others record nothing"
        held = states.keys() & self.resident.keys() - (self._in_place.keys() if request.room else set())
        return {name: self.backend.copy_of(states[name]) for name in sorted(held)}

    def hand_over(self, values: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        """Begin to give the caller outputs on the rank's GPU. Returns a function that waits, and gives them."""
        assert isinstance(self.backend, GpuDevice), "a session asks for that where all ranks have GPUs"
        return hand_over(self.backend, values)

    def _begin_states(self, request: InFlightRequest) -> dict[str, Any]:
        """What a sequence begins with on this rank: states that are zeros, and feeds that it holds.

        Or what the one has that it goes on from.
        """
        made = self.backend.zeros(self.zeros_of(request))
        if request.after is None:
            held = [n for n in self._rank.inputs if n in request.initial and n not in self.resident]
            # A copy, since the memory of a request's arrays may be another one's later.
            return {**made, **{name: self.backend.upload(self.cut_feed(name, request).copy()) for name in held}}
        known = self.sequences.get(request.after, {})
        for name, longer in made.items():
            axis = self._in_place[name].grows
            assert axis is not None
            self.backend.copy_front(known[name], longer, axis)
        return {**known, **made}

    def execute(
        self, request: InFlightRequest, states: Mapping[str, Any], upload: Callable[[str], Any]
    ) -> tuple[dict[str, Any], list[Span]]:
        """Run the program on the states that stay on this rank, and on other inputs that `upload` makes by name."""
        into: dict[str, Any] = {}

        def feeds() -> dict[str, Any]:
            fed = {name: states[name] if name in states else upload(name) for name in self._rank.inputs}
            fed.update({value: upload(value) for value, each in self._overrides.items() if each.input in request.feeds})
            if request.room:
                into.update({state.output: fed[name] for name, state in self._in_place.items()})
            return fed

        return execute(self._program, self.collectives, feeds, self.backend.accumulate, into)

    def given(self, request: InFlightRequest) -> list[str]:
        """The outputs that the rank gives to the caller rather than keeps as states."""
        kept = set(self.resident.values()) if request.sequence is not None else set[str]()
        return [name for name in self._rank.outputs if name not in kept]

    @property
    def notes(self) -> list[str]:
        """Messages for the user about the engines and replay."""
        if self._replays is None:
            return list(self.backend.notes)
        why = self.capture_blocker
        return [*self.backend.notes, *(self._replays.notes if why is None else [not_replayed(why)])]

    @property
    def has_unfinished(self) -> bool:
        """Whether another thread waits for outputs of this rank."""
        return self._unfinished is not None and not self._unfinished.done()

    def drain(self) -> None:
        """Wait until the outputs of all earlier requests were given, so that they are given in order."""
        if self._unfinished is not None:
            self._unfinished.result()
            self._unfinished = None

    def forget(self, sequence: int, reusable: bool) -> None:
        """Free the states of a sequence, or let another one begin in their memory, if that can be."""
        if self._replays is not None:
            self._replays.forget(self, sequence, reusable)
        self.sequences.pop(sequence, None)

    def _upload(self, request: InFlightRequest, name: str) -> Any:
        """The backend's value for an input: the initial value of a state, or a feed."""
        feed = self.feed_of(name, request)
        if isinstance(feed, GpuFeed):
            assert isinstance(self.backend, GpuDevice), "a session brings it to the host otherwise"
            return self.backend.take(feed)
        return self.backend.upload(feed)

    def zeros_of(self, request: InFlightRequest) -> dict[str, Zeros]:
        """This rank's shards of the states that begin as zeros, by the names of their inputs."""
        zeros = {name: each for name, each in request.initial.items() if isinstance(each, Zeros)}
        parts = {name: self._parts.get(name) for name in self._rank.inputs if name in zeros}
        return {
            name: zeros[name] if part is None else Zeros(part_shape(zeros[name].shape, part), zeros[name].dtype)
            for name, part in parts.items()
        }

    def feed_of(self, name: str, request: InFlightRequest) -> Feed:
        """As `cut_feed`, but a feed that is on a GPU as it is: no rank takes a shard of it, and no weight's place."""
        feed = request.feeds.get(name)
        return feed if isinstance(feed, GpuFeed) else self.cut_feed(name, request)

    def cut_feed(self, name: str, request: InFlightRequest) -> Array:
        """This rank's shard of a feed or of a state's initial array, by the name of the input.

        Or by that of the weight which an optional input replaces. These are on the host.
        """
        if name in self._overrides:
            array: Feed | Zeros = request.feeds[self._overrides[name].input]
            assert not isinstance(array, GpuFeed | Zeros)
            return cut_places(array, self._overrides[name].places)
        array = request.initial[name] if name in request.initial else request.feeds[name]
        assert not isinstance(array, GpuFeed | Zeros)
        part = self._parts.get(name)
        return array if part is None else cut_part(array, part)
