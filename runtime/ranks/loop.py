"""The loop that runs a rank's program for one request.

Values are of the backend's own type (`splitc.runtime.engines`), and opaque to the loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

from splitc.runtime.collectives import Exchange
from splitc.runtime.engines import Engine
from splitc.runtime.package.steps import Receive, Reduce, Run, Send, Step
from splitc.runtime.threads.failures import Failure, attempt


@dataclass(frozen=True)
class Replay:
    """The replay of a CUDA graph with all steps of the rank. `captured`: it was captured for this request."""

    captured: bool = False


@dataclass(frozen=True)
class Span:
    """When one step ran, in seconds of time.perf_counter."""

    step: Step | Replay
    start: float
    end: float


@dataclass(frozen=True)
class Program:
    """A rank's steps, the engines that they run, and the names of the values to return."""

    steps: Sequence[Step]
    engines: Sequence[Engine]
    outputs: Sequence[str] = ()

    @cached_property
    def last_uses(self) -> Mapping[int, Sequence[str]]:
        """For each step the values to free after it: no later step reads them, and they are not outputs."""
        last: dict[str, int] = {}
        for number, step in enumerate(self.steps):
            last.update(dict.fromkeys(self._names(step), number))
        uses: dict[int, list[str]] = {}
        for name, number in last.items():
            if name not in self.outputs:
                uses.setdefault(number, []).append(name)
        return uses

    def _names(self, step: Step) -> list[str]:
        """The names of the values that a step reads or makes."""
        if isinstance(step, Run):
            engine = self.engines[step.engine]
            return [*engine.inputs, *engine.outputs]
        return [*step.parts, *step.wholes] if isinstance(step, Reduce) else [step.value]


def execute(
    program: Program,
    exchange: Exchange,
    feeds: Callable[[], Mapping[str, Any]],
    into: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[dict[str, Any], list[Span]]:
    """Run the program on the values of `feeds`. Returns the values that are live at the end, and the time of each step.

    Outputs in `into` are written to those values.

    After a failure, the rest of the program runs without computing: values from other ranks are received, and a Failure
    is sent to them instead of values. So a failed request leaves no values in flight. The first error is raised at the
    end.
    """
    fed = attempt(feeds)
    failure = fed if isinstance(fed, Failure) else None
    values: dict[str, Any] = {} if isinstance(fed, Failure) else dict(fed)
    spans = []
    for number, step in enumerate(program.steps):
        start = time.perf_counter()
        failure = _do(program, exchange, step, values, into, failure)
        spans.append(Span(step, start, time.perf_counter()))
        for name in program.last_uses.get(number, ()):
            values.pop(name, None)
    if failure is not None:
        raise failure.error
    return values, spans


def _do(
    program: Program,
    exchange: Exchange,
    step: Step,
    values: dict[str, Any],
    into: Mapping[str, Any],
    failure: Failure | None,
) -> Failure | None:
    """Do a step, and add what it makes to the values. Returns the first failure so far: then nothing is computed."""
    if isinstance(step, Send):
        return _send(exchange, step, failure or values[step.value])
    if isinstance(step, Receive):
        values[step.value] = received = attempt(partial(exchange.receive, step.source, step.value))
        return failure or (received if isinstance(received, Failure) else None)
    if isinstance(step, Reduce):
        parts = failure or [values[name] for name in step.parts]
        made = attempt(lambda: exchange.all_reduce(step, parts))
        if not isinstance(made, Failure):
            made = dict(zip(step.wholes, made, strict=True))
    else:
        made = failure or attempt(partial(_run, program.engines[step.engine], values, into))
    if isinstance(made, Failure):
        return failure or made
    values.update(made)
    return failure


def _run(engine: Engine, values: Mapping[str, Any], into: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: into[name] for name in engine.outputs if name in into}
    given = {name: values[name] for name in engine.optional.intersection(values)}
    return engine.run({**{name: values[name] for name in engine.inputs}, **given}, own)


def _send(exchange: Exchange, step: Send, value: Any) -> Failure | None:
    """Send a value, or a Failure if sending fails. Returns that Failure; None if the value was sent."""
    failed = attempt(partial(exchange.send, step.target, step.value, value))
    if isinstance(failed, Failure):  # nothing was sent, but the other rank waits
        value = failed
        exchange.send(step.target, step.value, value)
    return value if isinstance(value, Failure) else None
