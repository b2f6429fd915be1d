"""A package in a server, with separate answers to the requests of many clients."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from splitc.runtime.adapters.asked import read_names, split_part
from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import EngineError, FeedError, MisuseError, SplitcError
from splitc.runtime.feeds.on_gpu import is_on_gpu
from splitc.runtime.hardware.devices import Device
from splitc.runtime.requests.metrics import Metrics
from splitc.runtime.serving.interface import Interface, find_interface, find_rows
from splitc.runtime.serving.kept_sequences import Answer, KeptSequences, SequenceStep
from splitc.runtime.serving.serving_file import Serving, read_serving
from splitc.runtime.serving.waits import Waits
from splitc.runtime.session.session import Session
from splitc.runtime.threads.futures import Executor


@dataclass(frozen=True)
class ServedRequest:
    """A client's request: arrays by name, which must not change until it is answered, and its sequence.

    Arrays are numpy's, or CuPy's if they are on a GPU. `adapter` names adapters of the export, as in `style`, or
    `style:0.8,pose:0.3` for a weighted sum. A sequence has those of its first request.
    """

    feeds: Mapping[str, Array]
    step: SequenceStep | None = None
    adapter: str = ""


class ServedPackage:
    """A package, loaded as its `serving.json` says, which answers requests of any number of threads.

    Clients see scalars as arrays of one element, since Triton has no scalars. If the session breaks because a rank
    died, requests in flight fail, sequences are lost, and the next request opens another session. If that happens again
    and again, requests fail for a while before the next attempt: see Waits. `counts_sequences`: the server itself
    limits the number of sequences. Raises as `Session` does, and MisuseError for a wrong file.
    """

    def __init__(self, file: Path, *, counts_sequences: bool = False) -> None:
        self._folder = file.parent
        self.serving: Serving = read_serving(file)
        self._most = None if counts_sequences else self.serving.most_sequences
        self._opening, self._waits = threading.Lock(), Waits()
        self._before, self._closed = Metrics(), False
        with self._waits.loading():
            self._session, self._sequences = self._open()
        self.interface: Interface = find_interface(self._session.manifest, self.serving.sequences)
        self._joins = find_rows(self._session.manifest, self.interface) is not None and not self.serving.sequences
        fed = (*self.interface.inputs, *self.interface.optional)
        self._scalars = {tensor.name for tensor in fed if tensor.shape == []}

    def _open(self) -> tuple[Session, KeptSequences | None]:
        serving = self.serving
        session = Session(
            self._folder / serving.package,
            devices=serving.devices or None,
            threads=serving.threads,
            in_flight=serving.in_flight,
            ranks=serving.ranks,
            verify=serving.verify,
            cuda_graphs=serving.cuda_graphs,
            host_code=serving.host_code,
        )
        try:
            for name, text in serving.adapters.items():
                part, path = split_part(text)
                file = self._folder / path
                session.adapters.load(name, file if part is None else f"{part}={file}")
        except BaseException:
            session.close()
            raise
        # As many threads as there can be requests in flight: each waits for its request, and passes on the answer.
        self._pool = Executor(session.in_flight, "splitc serves")
        self._places = threading.BoundedSemaphore(session.in_flight)
        if not serving.sequences:
            return session, None
        kept = KeptSequences(session, self._pool, serving.capacity, serving.idle_seconds, self._most)
        return session, kept

    @property
    def metrics(self) -> Metrics:
        """Counters of all requests, of sessions that broke too."""
        return self._before + self._session.metrics

    @property
    def devices(self) -> Sequence[Device]:
        """The ranks' devices."""
        return self._session.devices

    def submit(self, requests: Sequence[ServedRequest]) -> list[Answer]:
        """Start requests, and return a future of each one's outputs. A request that fails, fails alone.

        Requests whose rows can be batched run together. Except for requests of sequences, it waits while as many
        requests are in flight as the session takes: meanwhile the server's queue grows, and with it the next batch.
        """
        answers: list[Answer] = [Future() for _ in requests]
        try:
            self.need_session()
        except Exception as error:  # whoever waits for an answer gets it
            for answer in answers:
                answer.set_exception(error)
            return answers
        if self._sequences is not None:
            return [self._submit_step(self._sequences, request) for request in requests]
        good = []
        for number, request in enumerate(requests):
            if request.step is None:
                good.append(number)
            else:
                answers[number].set_exception(
                    MisuseError("this model has no sequences: leave out the id, or export it with --sequences")
                )
        for adapter in dict.fromkeys(requests[n].adapter for n in good):
            own = [n for n in good if requests[n].adapter == adapter]
            self._submit_alike([self._shaped(requests[n].feeds) for n in own], [answers[n] for n in own], adapter)
        return answers

    def need_session(self) -> Session:
        """The session, opened again if it is broken. Raises EngineError while it is too early, and after `close`."""
        with self._opening:
            if self._closed:
                raise EngineError("this model was unloaded")
            try:
                self._session.check_usable()
            except SplitcError as error:
                self._waits.check(str(error))
                self._end()
                before = replace(self.metrics, in_flight=0)
                with self._waits.loading():
                    self._session, self._sequences = self._open()
                self._before = before
            return self._session

    def _submit_alike(self, feeds: Sequence[Mapping[str, Array]], answers: Sequence[Answer], adapter: str) -> None:
        """Start requests that have the same adapters, batched if that is possible."""
        groups = group_alike(feeds) if self._joins else [[number] for number in range(len(feeds))]
        for group in groups:
            places = self._places
            places.acquire()
            try:
                own = [feeds[n] for n in group], [answers[n] for n in group]
                work = self._pool.submit(self._serve, *own, adapter)
            except Exception as error:  # there are too many threads, or another client has this session opened again
                places.release()
                for number in group:
                    answers[number].set_exception(error)
                continue
            work.add_done_callback(lambda _, places=places: places.release())  # type: ignore[misc]

    def _submit_step(self, sequences: KeptSequences, request: ServedRequest) -> Answer:
        try:
            if request.step is None:
                raise MisuseError("this model's requests are sequences: give each an id, and mark its first request")
            return sequences.submit(request.step, self._shaped(request.feeds), request.adapter)
        except Exception as error:  # whoever waits for the answer gets it
            failed: Answer = Future()
            failed.set_exception(error)
            return failed

    def _serve(self, feeds: Sequence[Mapping[str, Array]], answers: Sequence[Answer], adapter: str) -> None:
        """Run requests as one batch, and if that fails one by one, so that only the faulty ones fail."""
        asked = [
            (request, answer)
            for request, answer in zip(feeds, answers, strict=True)
            if answer.set_running_or_notify_cancel()
        ]
        if len(asked) > 1:
            try:
                joined, starts = join_rows([request for request, _ in asked])
                parts = part_rows(self._run(joined, adapter), starts)
            except Exception:  # each finds its own error below
                pass
            else:
                for (_, answer), outputs in zip(asked, parts, strict=True):
                    answer.set_result(outputs)
                return
        for request, answer in asked:
            try:
                outputs = self._run(request, adapter)
            except BaseException as error:  # whoever waits for the answer gets it
                answer.set_exception(error)
            else:
                answer.set_result(outputs)

    def _run(self, feeds: Mapping[str, Array], adapter: str) -> dict[str, Array]:
        """Run a batch. Outputs are on the ranks' GPUs if a feed is on a GPU and that is possible."""
        on_device = self._session.device_arrays.possible and any(map(is_on_gpu, feeds.values()))
        return self._session.run(feeds, on_device=on_device, adapters=read_names(adapter))

    def _shaped(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The feeds, with scalars in place of arrays of one element."""
        return {n: a.reshape(()) if n in self._scalars and a.shape == (1,) else a for n, a in feeds.items()}

    def _end(self) -> None:
        if self._sequences is not None:
            self._sequences.close()
        self._session.close()
        self._pool.shutdown(wait=False)

    def close(self) -> None:
        """End the session, in bounded time. Requests that have begun complete; all are answered."""
        with self._opening:  # a request that comes late would open it again
            self._closed = True
        self._end()
        self._pool.shutdown()


def is_clients_fault(error: BaseException) -> bool:
    """Whether the client caused the failure of a request."""
    return isinstance(error, (FeedError, MisuseError))


Feeds = Mapping[str, Array]


def group_alike(requests: Sequence[Feeds]) -> list[list[int]]:
    """The numbers of the requests, grouped by all but their number of rows."""
    groups: dict[Any, list[int]] = {}
    for number, feeds in enumerate(requests):
        rows = {array.shape[:1] for array in feeds.values()}
        alike = tuple(sorted((name, str(a.dtype), a.shape[1:], is_on_gpu(a)) for name, a in feeds.items()))
        # A request whose arrays differ in their rows runs alone, so that it fails alone.
        groups.setdefault((alike, None if len(rows) == 1 and () not in rows else number), []).append(number)
    return list(groups.values())


def join_rows(requests: Sequence[Feeds]) -> tuple[dict[str, Array], list[int]]:
    """One batch with the rows of all requests, and the first row of each request except the first.

    CuPy arrays are joined on their GPU.
    """
    joined = {name: np.concatenate([feeds[name] for feeds in requests]) for name in requests[0]}
    counts = [next(iter(feeds.values())).shape[0] for feeds in requests]
    return joined, [int(row) for row in np.cumsum(counts)[:-1]]


def part_rows(outputs: Feeds, starts: Sequence[int]) -> list[dict[str, Array]]:
    """Split the outputs of a batch into those of each request."""
    parts = {name: np.split(array, starts) for name, array in outputs.items()}
    return [{name: pieces[number] for name, pieces in parts.items()} for number in range(len(starts) + 1)]
