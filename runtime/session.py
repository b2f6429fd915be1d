"""Session: load a package, one worker thread a rank, and run requests through them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Optional, Union

import numpy as np
import numpy.typing as npt

from splitc.runtime.devices import parse_devices, threads_for
from splitc.runtime.engines import Backend
from splitc.runtime.engines.onnxruntime import OnnxRuntimeBackend
from splitc.runtime.errors import FeedError, SplitcError
from splitc.runtime.manifest import Manifest, Part, Rank, Tensor, read_manifest, verify_files
from splitc.runtime.parts import cut_part, join_parts
from splitc.runtime.program import Program, Span, execute
from splitc.runtime.transport import Transport
from splitc.runtime.transport.local import connect

Array = npt.NDArray[Any]


@dataclass
class Request:
    """One run on its way through the ranks, each of which adds its part; the last one completes the future."""

    feeds: Mapping[str, Array]
    waiting: int
    future: Future[dict[int, dict[str, Array]]] = field(default_factory=Future)
    outputs: dict[int, dict[str, Array]] = field(default_factory=dict)
    spans: dict[int, list[Span]] = field(default_factory=dict)
    error: Optional[BaseException] = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def finish(
        self, rank: int, outputs: Mapping[str, Array], spans: list[Span], error: Optional[BaseException]
    ) -> None:
        with self.lock:
            self.outputs[rank] = dict(outputs)
            self.spans[rank] = spans
            self.error = self.error or error
            self.waiting -= 1
            if self.waiting:
                return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.outputs)


class _Worker(threading.Thread):
    """One rank: loads its engines, then runs its program for each request, in the order of submission."""

    def __init__(self, number: int, rank: Rank, package: Path, backend: Backend, transport: Transport) -> None:
        super().__init__(name=f"splitc rank {number} ({rank.device})", daemon=True)
        self.requests: SimpleQueue[Optional[Request]] = SimpleQueue()
        self._number = number
        self._rank = rank
        self._backend = backend
        engines = [backend.load(package / engine.path) for engine in rank.engines]
        self._program = Program(rank.program, engines, rank.outputs)
        self._parts = {part.name: part for part in rank.parts}
        self._transport = transport

    def run(self) -> None:
        while (request := self.requests.get()) is not None:
            try:
                outputs, spans = self._run_request(request)
                request.finish(self._number, outputs, spans, None)
            except BaseException as error:  # a thread has no caller: whoever waits for the request gets it
                request.finish(self._number, {}, [], error)

    def _run_request(self, request: Request) -> tuple[dict[str, Array], list[Span]]:
        def feeds() -> dict[str, Any]:
            return {name: self._backend.upload(self._cut(name, request.feeds[name])) for name in self._rank.inputs}

        values, spans = execute(self._program, self._transport, feeds, self._backend.accumulate)
        return {name: self._backend.download(values[name]) for name in self._rank.outputs}, spans

    def _cut(self, name: str, array: Array) -> Array:
        part = self._parts.get(name)
        return array if part is None else cut_part(array, part)


class Session:
    """A package, loaded on its devices and ready to run.

        with Session("package") as session:
            outputs = session.run({"input_ids": ids})

    `threads` is the number for each CPU device (default: the package's own, else the cores divided among them).
    `verify=False` skips comparing the files' hashes with the manifest, which reads every byte of the weights once.
    Raises PackageError for a package that is damaged or that an engine can't load.
    """

    def __init__(self, package: Union[str, Path], *, threads: Optional[int] = None, verify: bool = True) -> None:
        self.package = Path(package)
        self.manifest: Manifest = read_manifest(self.package)
        if verify:
            verify_files(self.package, self.manifest.files)
        devices = [parse_devices([rank.device])[0] for rank in self.manifest.ranks]
        self.threads = threads_for(devices, threads or self.manifest.threads)
        self._passed = {tensor.name for tensor in self.inputs} & {tensor.name for tensor in self.outputs}
        self._closed = False
        # All ranks must see requests in one order, whoever submits them: values of two requests have the same names.
        self._order = threading.Lock()
        transports = connect(len(devices))
        self._workers = [
            _Worker(number, rank, self.package, OnnxRuntimeBackend(self.threads), transports[number])
            for number, rank in enumerate(self.manifest.ranks)
        ]
        for worker in self._workers:
            worker.start()

    @property
    def inputs(self) -> list[Tensor]:
        """The model's inputs: names, number types and shapes."""
        return self.manifest.inputs

    @property
    def outputs(self) -> list[Tensor]:
        """The model's outputs: names, number types and shapes."""
        return self.manifest.outputs

    def run(self, feeds: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """Run the model once. Feeds and outputs are arrays by name, in the shapes of the model's inputs and outputs.

        Raises FeedError for feeds that the model does not take.
        """
        return self.run_timed(feeds)[0]

    def run_timed(self, feeds: Mapping[str, npt.ArrayLike]) -> tuple[dict[str, Array], dict[int, list[Span]]]:
        """As `run`; returns beside the outputs when each step of each rank's program ran."""
        if self._closed:
            raise SplitcError("the session is closed")
        request = Request(check_feeds(feeds, self.inputs), len(self._workers))
        with self._order:
            for worker in self._workers:
                worker.requests.put(request)
        outputs = self._join(request.future.result())
        # No rank makes an output that is an input.
        outputs.update({name: request.feeds[name].copy() for name in self._passed})
        return {tensor.name: outputs[tensor.name] for tensor in self.outputs}, request.spans

    def _join(self, outputs: Mapping[int, Mapping[str, Array]]) -> dict[str, Array]:
        """The ranks' outputs together: those that are whole, and those of which ranks have parts."""
        joined: dict[str, Array] = {}
        parts: dict[str, list[tuple[Part, Array]]] = {}
        for number, rank in enumerate(self.manifest.ranks):
            own = {part.name: part for part in rank.parts}
            for name, array in outputs[number].items():
                if name in own:
                    parts.setdefault(name, []).append((own[name], array))
                else:
                    joined[name] = array
        joined.update({name: join_parts(each) for name, each in parts.items()})
        return joined

    def close(self) -> None:
        """End the workers and free their engines. Requests under way are completed first."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            worker.requests.put(None)
        for worker in self._workers:
            worker.join()
        self._workers = []

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()


def check_feeds(feeds: Mapping[str, npt.ArrayLike], inputs: Sequence[Tensor]) -> dict[str, Array]:
    """The feeds as arrays. Raises FeedError when a name, a number type or a shape is not what the inputs say."""
    known = [tensor.name for tensor in inputs]
    if missing := [name for name in known if name not in feeds]:
        raise FeedError(
            f"no array for the input{'s' * (len(missing) > 1)} {', '.join(missing)}; the model takes {_list(inputs)}"
        )
    if extra := [name for name in feeds if name not in known]:
        raise FeedError(f"the model has no input {', '.join(extra)}; it takes {_list(inputs)}")
    arrays = {tensor.name: np.asarray(feeds[tensor.name]) for tensor in inputs}
    for tensor in inputs:
        array = arrays[tensor.name]
        if str(array.dtype) != tensor.dtype:
            raise FeedError(f"input '{tensor.name}' is {array.dtype}, and the model takes {tensor.dtype}")
        sizes = zip(array.shape, tensor.shape)
        if array.ndim != len(tensor.shape) or any(isinstance(want, int) and have != want for have, want in sizes):
            want, have = format_shape(tensor.shape), format_shape(array.shape)
            raise FeedError(f"input '{tensor.name}' has shape {have}, and the model takes {want}")
    return arrays


def format_shape(shape: Sequence[Union[int, str, None]]) -> str:
    """A shape for people: `2 x sequence x 64`; `scalar` where it has no dimension."""
    return " x ".join("?" if size is None else str(size) for size in shape) or "scalar"


def _list(inputs: Sequence[Tensor]) -> str:
    return ", ".join(f"{tensor.name} ({tensor.dtype}, {format_shape(tensor.shape)})" for tensor in inputs)
