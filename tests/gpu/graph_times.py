"""Errors and times of a model's packages, compared with the unsplit model in ONNX Runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from splitc.runtime import Session
from splitc.runtime.feeds.fills import make_inputs
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.tools.compare import compare
from splitc.runtime.tools.unsplit import all_feeds

Arrays = Mapping[str, npt.NDArray[Any]]
# Requests in flight; rounds of turns; the seconds and the most requests of a turn.
IN_FLIGHT, ROUNDS, SECONDS, REQUESTS = 4, 5, 0.3, 20
ONE, UNSPLIT, KEPT = "one device", "unsplit", "unsplit, kept"
# The times, in order: requests of new shapes, of shapes seen before, and of a stream.
NEW, AGAIN, STREAM = "new", "again", f"{IN_FLIGHT} in flight"


@dataclass
class Row:
    """A package's results: its largest error, seconds by the name of the time, and its failure.

    `times` are medians of what was measured, `predicted` what the plan says.
    """

    error: float | None = None
    problem: str = ""
    weights: str = ""
    memory: str = ""
    failure: str = ""
    notes: list[str] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record the first error in the block, which ends it."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or first_line(error)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


@dataclass(frozen=True)
class Feeds:
    """Arrays for a package's inputs, and for all inputs of the unsplit model."""

    own: Arrays
    whole: Arrays


def make_feeds(manifest: Manifest, shapes: Mapping[str, Sequence[int]]) -> Feeds:
    """Made-up inputs of these shapes, or of the planned ones."""
    sized = [
        msgspec.structs.replace(tensor, sample_shape=list(shapes.get(tensor.name, tensor.sample_shape or ())))
        for tensor in manifest.inputs
    ]
    own = make_inputs(sized)
    return Feeds(own, all_feeds(manifest, own))


class Unsplit:
    """The unsplit model in a session of ONNX Runtime, with IO binding."""

    def __init__(self, model: Path, device: Device) -> None:
        self._kind, self._index = device.kind, device.index
        providers: list[Any] = ["CPUExecutionProvider"]
        if device.kind == "cuda":
            ort.preload_dlls()
            providers.insert(0, ("CUDAExecutionProvider", {"device_id": str(device.index), "use_tf32": "0"}))
        options = ort.SessionOptions()
        options.log_severity_level = 4
        self._session = ort.InferenceSession(str(model), options, providers=providers, enable_fallback=0)
        if len(self._session.get_providers()) < len(providers):
            raise RuntimeError("ONNX Runtime dropped its CUDA provider")
        self._names = [each.name for each in self._session.get_outputs()]

    def run(self, feeds: Feeds) -> dict[str, npt.NDArray[Any]]:
        binding = self._bind(feeds)
        self._session.run_with_iobinding(binding)
        return dict(zip(self._names, binding.copy_outputs_to_cpu(), strict=True))

    def keep(self, feeds: Feeds) -> Callable[[], None]:
        """A function that runs the model on inputs on the device, and leaves its outputs there."""
        binding = self._bind(feeds)

        def run() -> None:
            self._session.run_with_iobinding(binding)
            binding.synchronize_outputs()

        return run

    def _bind(self, feeds: Feeds) -> Any:
        binding = self._session.io_binding()
        for each in self._session.get_inputs():
            value = ort.OrtValue.ortvalue_from_numpy(
                np.ascontiguousarray(feeds.whole[each.name]), self._kind, self._index
            )
            binding.bind_ortvalue_input(each.name, value)
        for name in self._names:
            binding.bind_output(name, self._kind, self._index)
        return binding


class Measured:
    """A model's loaded packages by name, and their results in `rows`.

    The first of the `feeds` have the planned shapes, others do not. Outputs are compared with those of `expected`.
    """

    def __init__(self, unsplit: Unsplit, expected: Unsplit, feeds: Sequence[Feeds], rows: Mapping[str, Row]) -> None:
        self._unsplit, self._feeds, self._rows = unsplit, feeds, rows
        self._sessions: dict[str, Session] = {}
        self._expected_of = expected
        self._expected: tuple[Feeds, Arrays] | None = None

    def add(self, name: str, session: Session) -> None:
        """Run a package eagerly, captured and replayed, and compare its outputs."""
        self._sessions[name] = session
        for _ in range(3):
            self._run_compared(name, self._feeds[0])

    def take_times(self) -> None:
        """Measure all times, and add the sessions' notes."""
        self._time_new()
        count = self._count()
        self._time_in_turns(AGAIN, {name: self._repeated(name, count) for name in (*self._sessions, UNSPLIT)})
        self._time_in_turns(AGAIN, {KEPT: self._kept(count)})
        self._time_in_turns(STREAM, {name: self._stream(name, count) for name in self._sessions})
        for name, session in self._sessions.items():
            self._rows[name].notes = session.notes

    def _time_new(self) -> None:
        """Time the first request of each of the other shapes."""
        times: dict[str, list[float]] = {name: [] for name in (UNSPLIT, *self._sessions)}
        for feeds in self._feeds[1:]:
            times[UNSPLIT].append(_seconds(partial(self._unsplit.run, feeds)))
            for name in self._sessions:
                with self._rows[name].noted():
                    times[name].append(self._run_compared(name, feeds))
        for name, each in times.items():
            if each:
                self._rows[name].times[NEW] = median(each)

    def _run_compared(self, name: str, feeds: Feeds) -> float:
        """Run a request, record its largest error, and return its seconds."""
        if self._expected is None or self._expected[0] is not feeds:
            self._expected = feeds, self._expected_of.run(feeds)
        session, row, expected = self._sessions[name], self._rows[name], self._expected[1]
        start = time.perf_counter()
        outputs = session.run(feeds.own)
        seconds = time.perf_counter() - start
        for each in compare(expected, outputs, number_type=session.manifest.number_type):
            row.error = max(row.error or 0.0, each.relative)
            if not each.passed:
                row.problem = each.problem or "differs"
        if not all(np.isfinite(array).all() for array in expected.values() if array.dtype.kind == "f"):
            row.problem = "not finite in the model itself"
        return seconds

    def _count(self) -> int:
        """The number of requests in a turn."""
        return max(1, min(REQUESTS, int(SECONDS / _seconds(lambda: self._unsplit.run(self._feeds[0])))))

    def _repeated(self, name: str, count: int) -> Callable[[], float]:
        feeds = self._feeds[0]
        session = self._sessions.get(name)
        run: Callable[[], Any] = (
            (lambda: self._unsplit.run(feeds)) if session is None else lambda: session.run(feeds.own)
        )
        return lambda: _seconds(lambda: [run() for _ in range(count)]) / count

    def _kept(self, count: int) -> Callable[[], float]:
        run = self._unsplit.keep(self._feeds[0])
        return lambda: _seconds(lambda: [run() for _ in range(count)]) / count

    def _stream(self, name: str, count: int) -> Callable[[], float]:
        session, many = self._sessions[name], [self._feeds[0].own] * (count + IN_FLIGHT)
        return lambda: _seconds(lambda: sum(1 for _ in session.map(many, in_flight=IN_FLIGHT))) / len(many)

    def _time_in_turns(self, what: str, work: Mapping[str, Callable[[], float]]) -> None:
        """The median of each work's seconds, in turns, after one turn to warm up. Work that fails is left out."""
        times: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(1 + ROUNDS):
            for name, run in work.items():
                if not self._rows[name].failure:
                    with self._rows[name].noted():
                        times[name].append(run())
        for name, each in times.items():
            if len(each) > 1:
                self._rows[name].times[what] = median(each[1:])


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
