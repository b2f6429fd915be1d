"""Session: load a package, one worker thread a rank, and stream requests through them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy.typing as npt

from splitc.runtime.admission import Admission
from splitc.runtime.arrays import Array, Zeros
from splitc.runtime.batches import cut_batches, join_batches
from splitc.runtime.devices import Device, parse_devices, threads_for
from splitc.runtime.engines.backends import make_backend
from splitc.runtime.engines.built_here import check_built_here
from splitc.runtime.engines.kinds import choose_engine
from splitc.runtime.errors import MisuseError
from splitc.runtime.feeds import check_feeds
from splitc.runtime.futures import in_order, then
from splitc.runtime.generate.tokens import generate
from splitc.runtime.manifest import Manifest, Tensor, read_manifest
from splitc.runtime.memory_use import RankMemory
from splitc.runtime.outputs import OutputJoiner
from splitc.runtime.package_files import verify_files
from splitc.runtime.ranks.request import InFlightRequest, Served
from splitc.runtime.ranks.workers import Workers
from splitc.runtime.sequence import StateSequence, find_resident


class Session:
    """A package, loaded on its devices and ready to run.

        with Session("package") as session:
            outputs = session.run({"input_ids": ids})

    `threads` is the number for each CPU device (default: the package's own, else the cores divided among them).
    `verify=False` skips comparing the files' hashes with the manifest, which reads every byte of the weights once.
    `devices` are others to run on than the package was made for, one for each rank; an ONNX Runtime package for GPUs
    runs on CPU devices too, and the other way round.
    On GPUs, requests of previously seen shapes are replayed as CUDA graphs, unless `cuda_graphs` is False.
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
        self.resident_states = find_resident(self.manifest)
        self._sequences = itertools.count()
        self._joiner = OutputJoiner(self.manifest)
        build = self.manifest.build
        backends = [
            make_backend(self.manifest.engine, device, self.threads, build, cuda_graphs) for device in self.devices
        ]
        self._workers = Workers(self.package, self.manifest, self.resident_states, self.devices, backends, self._fail)
        replay = cuda_graphs and self._workers.capturable
        self._admission = Admission(self._workers, self.manifest, self.in_flight, replay)

    def _fail(self, error: BaseException) -> None:
        """A rank has died."""
        self._admission.fail(error)

    @property
    def by_host(self) -> list[tuple[str, str]]:
        """Pairs of GPUs that exchange values through the host, since copies between them come out wrong here."""
        return [(f"cuda{source}", f"cuda{target}") for source, target in self._workers.by_host]

    @property
    def notes(self) -> list[str]:
        """What a user should know of how the GPUs work."""
        notes, recordings = self._workers.notes, self._admission.recordings
        if recordings is not None and recordings.blocker is not None:
            notes.append(f"requests are not replayed as CUDA graphs: {recordings.blocker}")
        return notes

    def device_memory(self) -> list[RankMemory]:
        """What the ranks' GPUs hold since the session began, beside what was predicted; nothing for CPU devices."""
        return self._workers.device_memory()

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
        return self._admission.submit(arrays, sequence, initial or {}, room, here)

    def forget(self, sequence: int) -> None:
        """Let the states of a sequence go."""
        self._admission.forget(sequence)

    def join(self, request: InFlightRequest) -> dict[str, Array]:
        """The ranks' outputs together: whole ones, those of which ranks have parts, and inputs handed back."""
        return self._joiner.join(request)

    def close(self) -> None:
        """End the workers and free their engines, in bounded time.

        What has begun is completed (or stopped after 10 seconds), what has not is cancelled.
        """
        self._admission.close()

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
