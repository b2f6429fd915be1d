"""Session: load a package, one worker thread a rank, and stream requests through them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy.typing as npt

from splitc.runtime.arrays import Zeros, number_type
from splitc.runtime.batches import cut_batches, join_batches
from splitc.runtime.collectives.connect import connect_devices
from splitc.runtime.devices import Device, parse_devices, threads_for
from splitc.runtime.engines.backends import make_backend
from splitc.runtime.engines.built_here import check_built_here
from splitc.runtime.engines.kinds import choose_engine
from splitc.runtime.errors import MisuseError, SplitcError
from splitc.runtime.feeds import check_feeds
from splitc.runtime.futures import in_order, then
from splitc.runtime.generate.tokens import generate
from splitc.runtime.manifest import Manifest, Part, State, Tensor, read_manifest, verify_files
from splitc.runtime.memory_use import RankMemory
from splitc.runtime.parts import join_parts
from splitc.runtime.ranks.request import NEVER, InFlightRequest, Served
from splitc.runtime.ranks.thread import Worker
from splitc.runtime.replay.recording import Recording, Recordings
from splitc.runtime.sequence import StateSequence
from splitc.runtime.steps import overlap

Array = npt.NDArray[Any]

# Seconds between two looks whether a session is broken or closed.
BROKEN = 0.1
# Seconds that a session waits, when it is closed, for requests under way; then their engines are stopped.
PATIENCE = 10.0


class Session:
    """A package, loaded on its devices and ready to run.

        with Session("package") as session:
            outputs = session.run({"input_ids": ids})

    `threads` is the number for each CPU device (default: the package's own, else the cores divided among them).
    `verify=False` skips comparing the files' hashes with the manifest, which reads every byte of the weights once.
    `devices` are others to run on than the package was made for, one for each rank; an ONNX Runtime package for GPUs
    runs on CPU devices too, and the other way round.
    On GPUs, requests of sizes that came before are replayed as CUDA graphs, unless `cuda_graphs` is False.
    At most `in_flight` requests are under way at a time (default: two a stage): their feeds, what they have on the
    devices and their outputs are what the session holds beside its weights. Any number of threads may use one session.
    Raises PackageError for a package that is damaged or that an engine can't load.
    """

    def __init__(
        self,
        package: str | Path,
        *,
        threads: int | None = None,
        verify: bool = True,
        in_flight: int | None = None,
        devices: Sequence[str] | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        self.package = Path(package)
        self.manifest: Manifest = read_manifest(self.package)
        self.devices = _choose_devices(self.manifest, devices)
        check_built_here(self.package, self.manifest, self.devices)
        if verify:
            verify_files(self.package, self.manifest.files)
        self.threads = threads_for(self.devices, threads or self.manifest.threads)
        self.in_flight = in_flight or 2 * len(self.devices)
        self._passed = {tensor.name for tensor in self.inputs} & {tensor.name for tensor in self.outputs}
        self._parts = [{part.name: part for part in rank.parts} for rank in self.manifest.ranks]
        self._places = threading.BoundedSemaphore(self.in_flight)
        self._sequences = itertools.count()
        self._overlap = overlap([rank.program for rank in self.manifest.ranks])
        self._recordings: Recordings | None = None
        self._closed = False
        self._closing = threading.Lock()
        self._failure: BaseException | None = None
        # Requests don't know their futures, which give them: outputs would go when the garbage collector comes by, and
        # it counts objects, not bytes.
        self._under_way: dict[InFlightRequest, Future[InFlightRequest]] = {}
        # All ranks must see requests in one order, whoever submits them: values of two requests have the same names.
        self._order = threading.Lock()
        build = self.manifest.build
        backends = [
            make_backend(self.manifest.engine, device, self.threads, build, cuda_graphs) for device in self.devices
        ]
        self._collectives = connect_devices(self.devices, backends)
        self.resident_states = find_resident(self.manifest)
        self._workers = [
            Worker(number, rank, self.resident_states, self.package, backend, collectives, self._break)
            for number, (rank, backend, collectives) in enumerate(zip(self.manifest.ranks, backends, self._collectives))
        ]
        for worker in self._workers:
            worker.start()
        self._wait_loaded()
        if cuda_graphs and all(each.capturable for each in self._collectives):
            self._recordings = Recordings(self._workers, self._check_usable)

    def _wait_loaded(self) -> None:
        """Wait until each rank has its engines. Raises the first error; the other ranks are then ended."""
        done, _ = wait([worker.ready for worker in self._workers], return_when=FIRST_EXCEPTION)
        failed = [error for future in done if (error := future.exception()) is not None]
        if failed:
            self._collectives[0].abort(failed[0])
            self.close()
            raise failed[0]

    @property
    def by_host(self) -> list[tuple[str, str]]:
        """Pairs of GPUs that exchange values through the host, since copies between them come out wrong here."""
        pairs = {pair for each in self._collectives for pair in each.by_host}
        return [(f"cuda{source}", f"cuda{target}") for source, target in sorted(pairs)]

    @property
    def notes(self) -> list[str]:
        """What a user should know of how the GPUs work."""
        notes = [note for worker in self._workers for note in worker.backend.notes]
        if self._recordings is not None and self._recordings.blocker is not None:
            notes.append(f"requests are not replayed as CUDA graphs: {self._recordings.blocker}")
        return notes

    def device_memory(self) -> list[RankMemory]:
        """What the ranks' GPUs hold since the session began, beside what was predicted; nothing for CPU devices."""
        return [memory for worker in self._workers if (memory := worker.device_memory()) is not None]

    @property
    def inputs(self) -> list[Tensor]:
        """The model's inputs: names, number types and shapes."""
        return self.manifest.inputs

    @property
    def optional(self) -> list[Tensor]:
        """Inputs that need not be fed: the model has values for them."""
        return self.manifest.optional

    @property
    def outputs(self) -> list[Tensor]:
        """The model's outputs: names, number types and shapes."""
        return self.manifest.outputs

    def run(self, feeds: Mapping[str, npt.ArrayLike], *, micro_batch: int | None = None) -> dict[str, Array]:
        """Run the model once. Feeds and outputs are arrays by name, in the shapes of the model's inputs and outputs.

        `micro_batch` cuts a batch into pieces of so many rows, which are in the stages at the same time.
        Raises FeedError for feeds that the model does not take, MisuseError where its batch can't be cut.
        """
        if micro_batch is None:
            return self.run_timed(feeds)[0]
        arrays = check_feeds(feeds, self.inputs, self.optional)
        pieces = cut_batches(arrays, self.manifest.batch, micro_batch)
        answers = list(in_order(map(self._submit, pieces), self.in_flight))
        return join_batches(answers, self.manifest.batch)

    def run_timed(self, feeds: Mapping[str, npt.ArrayLike]) -> tuple[dict[str, Array], dict[int, Served]]:
        """As `run`; returns beside the outputs when each rank did what."""
        request = self.submit_request(check_feeds(feeds, self.inputs, self.optional), here=True).result()
        return self.join(request), request.served

    def submit(self, feeds: Mapping[str, npt.ArrayLike]) -> Future[dict[str, Array]]:
        """Start a run, and return at once: the future gives the outputs. Requests run in the order of submission.

        The feeds are copied, and may be changed when it returns. Waits while `in_flight` requests are under way. A
        request that fails fails alone. Raises as `run` does.
        """
        return self._submit(check_feeds(feeds, self.inputs, self.optional, copy=True))

    def _submit(self, arrays: Mapping[str, Array]) -> Future[dict[str, Array]]:
        """As `submit`, of arrays that nobody changes while the request is under way."""
        return then(self.submit_request(arrays), self.join)

    def map(
        self, feeds: Iterable[Mapping[str, npt.ArrayLike]], *, in_flight: int | None = None
    ) -> Iterator[dict[str, Array]]:
        """Run each of the feeds, with `in_flight` of them under way at a time; yields the outputs in the same order.

        It takes no more from `feeds` than are under way or asked for. The first that fails ends it with its error.
        """
        return in_order(map(self.submit, feeds), min(in_flight or self.in_flight, self.in_flight))

    def start(self, capacity: int | None = None) -> StateSequence:
        """Open a stateful sequence: its states (caches, recurrent states) stay on the ranks from run to run.

        With `capacity`, caches that an engine can write in place get room for so many tokens at once; without, and for
        other caches, each run makes them anew, longer.
        """
        if not self.manifest.states:
            raise MisuseError(
                f"{self.manifest.source.name} has no states: none of its outputs goes into an input again"
            )
        return StateSequence(self, next(self._sequences), capacity)

    def generate(self, prompt: Sequence[int], **options: Any) -> Iterator[int]:
        """Tokens that follow the prompt, as they come; the options are those of `generate.tokens.generate`."""
        return generate(self, prompt, **options)

    def submit_request(
        self,
        arrays: Mapping[str, Array],
        sequence: int | None = None,
        initial: Mapping[str, Array | Zeros] | None = None,
        room: bool = False,
        here: bool = False,
    ) -> Future[InFlightRequest]:
        """Start a run of checked feeds: of a stateful sequence, where that is given, from the states `initial` on.

        `room` says that these have room for what is to come. One who waits for the result anyway may have the calling
        thread replay the request, if it is replayed: `here`.
        """
        self._places.acquire()
        request = InFlightRequest(arrays, len(self._workers), self._done, sequence, initial or {}, room)
        future: Future[InFlightRequest] = Future()
        with self._order:
            try:
                self._check_usable()
                recording = self._find_recording(request)
            except BaseException:
                self._places.release()
                raise
            self._under_way[request] = future
            if recording is None:
                for worker in self._workers:
                    worker.requests.put(request)
        if recording is not None:
            play = partial(recording[0].play, request, recording[1])
            if here:
                play()
            else:
                self._workers[0].requests.put(play)
        return future

    def _find_recording(self, request: InFlightRequest) -> tuple[Recordings, Recording] | None:
        """The recording to replay the request with, if it is to be replayed.

        Where requests overlap, only those that find nothing else under way are. What is replayed and what is not never
        run together: both work on the same streams.
        """
        if self._recordings is None:
            return None
        others = list(self._under_way)
        if request.initial:
            self._recordings.adopt(request)
        # What replaces weights goes another way than what is recorded.
        key = None if any(tensor.name in request.feeds for tensor in self.optional) else self._recordings.takes(request)
        recording = None
        if key is not None and not (self._overlap and others):
            self._wait_for([other for other in others if not other.replayed])
            recording = self._recordings.find(request, key)
        if recording is None:
            self._wait_for([other for other in others if other.replayed])
            self._recordings.behind = True
            return None
        request.replayed = True
        return self._recordings, recording

    def _wait_for(self, requests: Sequence[InFlightRequest]) -> None:
        """Wait for requests to end. Raises SplitcError when the session breaks, or is closed."""
        futures = [future for request in requests if (future := self._under_way.get(request)) is not None]
        while wait(futures, BROKEN).not_done:
            self._check_usable()

    def _check_usable(self) -> None:
        if self._closed or self._failure is not None:
            raise self._unusable()

    def _unusable(self) -> SplitcError:
        if self._failure is not None:
            return SplitcError(f"the session is broken: {type(self._failure).__name__}: {self._failure}")
        return SplitcError("the session is closed")

    def _done(self, request: InFlightRequest) -> None:
        future = self._under_way.pop(request)
        self._places.release()
        if request.error is not None:
            future.set_exception(request.error)
        else:
            future.set_result(request)

    def _break(self, error: BaseException) -> None:
        """A worker has died: nobody may wait for it any more."""
        self._failure = self._failure or error
        self._collectives[0].abort(error)
        with self._order:
            waiting = list(self._under_way)
        for request in waiting:
            for number in range(len(self.manifest.ranks)):
                request.finish(number, {}, NEVER, self._unusable())

    def forget(self, sequence: int) -> None:
        """Let the states of a sequence go."""
        with self._order:
            if self._recordings is not None:
                self._recordings.forget(sequence)
            for worker in self._workers:
                worker.requests.put(partial(worker.forget, sequence))

    def join(self, request: InFlightRequest) -> dict[str, Array]:
        """The ranks' outputs together: whole ones, those of which ranks have parts, and inputs handed back."""
        joined: dict[str, Array] = {}
        parts: dict[str, list[tuple[Part, Array]]] = {}
        for number in range(len(self._parts)):
            own = self._parts[number]
            for name, array in request.outputs[number].items():
                if name in own:
                    parts.setdefault(name, []).append((own[name], array))
                else:
                    joined[name] = array
        joined.update({name: join_parts(each) for name, each in parts.items()})
        joined.update({name: request.feeds[name].copy() for name in self._passed})
        return {
            # Before version 10 TensorRT gives int32 where the model says int64.
            tensor.name: joined[tensor.name].astype(number_type(tensor.dtype), copy=False)
            for tensor in self.outputs
            if tensor.name in joined
        }

    def close(self) -> None:
        """End the workers and free their engines, in bounded time.

        What has begun is completed (or stopped after PATIENCE seconds), what has not is cancelled.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True  # before all else: who waits while he orders requests looks at it
        with self._order:
            for request in list(self._under_way):  # they end meanwhile
                request.cancel()
            if self._recordings is not None:
                self._recordings.end(PATIENCE)
            for worker in self._workers:
                worker.requests.put(None)
        deadline = time.monotonic() + PATIENCE
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        if any(worker.is_alive() for worker in self._workers):
            for worker in self._workers:
                worker.backend.stop()
            self._break(SplitcError("the session was closed while this request ran"))
            for worker in self._workers:
                worker.join(1.0)
        self._workers = []

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _choose_devices(manifest: Manifest, asked: Sequence[str] | None) -> list[Device]:
    """The device of each rank. Raises MisuseError unless there is one for each, of the kind that the engines need."""
    devices = parse_devices(asked or [rank.device for rank in manifest.ranks])
    if len(devices) != len(manifest.ranks):
        raise MisuseError(f"the package has {len(manifest.ranks)} ranks, and {len(devices)} devices are named for it")
    choose_engine(manifest.engine, devices)
    return devices


def find_resident(manifest: Manifest) -> list[State]:
    """The states that stay on the ranks in a sequence: each rank that takes one makes it too. Others are carried."""
    resident = []
    for state in manifest.states:
        takers = [rank for rank in manifest.ranks if state.input in rank.inputs]
        if takers and all(state.output in (*rank.outputs, *rank.keeps) for rank in takers):
            resident.append(state)
    return resident
