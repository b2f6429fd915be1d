"""Requests of sequences: recorded as a package runs them, and compared with the unsplit model's, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from splitc.runtime.arrays.array import Array, number_type
from splitc.runtime.engines.onnxruntime_cpu import open_session
from splitc.runtime.feeds.fills import fill_array
from splitc.runtime.generate.conversation import ModelRunner, StateHolder
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import Fill, Manifest, Tensor, of_role
from splitc.runtime.requests.added_feeds import chosen_rows
from splitc.runtime.requests.empty_states import empty_states
from splitc.runtime.tools.compare import Difference, compare
from splitc.runtime.tools.judge import judge
from splitc.runtime.tools.unsplit import all_feeds, open_reference

Arrays = dict[str, Array]
Feeds = Mapping[str, npt.ArrayLike]
Differences = list[Difference]
CPUS = [Device("cpu", 0)]


@dataclass(frozen=True)
class Step:
    """A request of a sequence, and its outputs. The first `padded` tokens of its first row mean nothing."""

    feeds: Arrays
    outputs: Arrays
    padded: int = 0

    def difference(self, number_type: str, expected: Mapping[str, Array], actual: Mapping[str, Array]) -> Differences:
        """Compare outputs, without those of padding and those that the package does not have."""
        told = {name: self._told(array) for name, array in expected.items() if name in self.outputs}
        return compare(told, {name: self._told(array) for name, array in actual.items()}, number_type=number_type)

    def _told(self, array: Array) -> Array:
        if not self.padded or array.ndim < 2:
            return array
        array = array.copy()
        array[0, : self.padded] = 0
        return array


@dataclass
class _Sequence:
    """Hands everything on to a sequence, and keeps its requests."""

    known: StateHolder
    steps: list[Step]

    def run(self, feeds: Feeds, padded: int = 0) -> Arrays:
        outputs = self.known.run(feeds)
        self.steps.append(Step({name: np.array(array) for name, array in feeds.items()}, outputs, padded))
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.known, name)


@dataclass
class Recorder:
    """A session that keeps the requests of its sequences."""

    session: ModelRunner
    sequences: list[list[Step]] = field(default_factory=list)

    @property
    def manifest(self) -> Manifest:
        return self.session.manifest

    @property
    def replays(self) -> bool:
        return self.session.replays

    def run(self, feeds: Feeds) -> Arrays:
        raise AssertionError("a model with states runs in sequences")

    def start(self, capacity: int | None = None) -> Any:
        self.sequences.append([])
        return _Sequence(self.session.start(capacity), self.sequences[-1])


class Unsplit:
    """The unsplit model behind a session's interface: states are bound from run to run, and only outputs are read."""

    replays = False

    def __init__(self, model: Path, manifest: Manifest, threads: int = 1) -> None:
        self.model, self.manifest = model, manifest
        self.session = open_session(model, threads)

    @property
    def takes_many(self) -> bool:
        """Whether it takes several tokens at once."""
        return not any(
            tensor.shape is not None and tensor.shape[-1] == 1 for tensor in of_role(self.manifest.inputs, "indices")
        )

    def run(self, feeds: Feeds) -> Arrays:
        return self.start().run(feeds)

    def start(self, capacity: int | None = None) -> UnsplitSequence:
        """A sequence; the model allocates its states anew each time."""
        return UnsplitSequence(self)


class UnsplitSequence:
    """A sequence of the unsplit model."""

    def __init__(self, unsplit: Unsplit) -> None:
        self._unsplit = unsplit
        self.states: dict[str, ort.OrtValue] = {}
        self._held: Arrays = {}
        self._inputs = {value.name for value in unsplit.session.get_inputs()}
        self._outputs = [value.name for value in unsplit.session.get_outputs()]

    def run(self, feeds: Feeds) -> Arrays:
        """Run the model with the states of the last run."""
        manifest, session = self._unsplit.manifest, self._unsplit.session
        given = {**self._held, **{name: np.asarray(array) for name, array in feeds.items()}}
        arrays = all_feeds(manifest, given)
        if not self.states:
            empty = empty_states(manifest, given)
            self.states = {name: _value(np.zeros(z.shape, number_type(z.dtype))) for name, z in empty.items()}
        binding = session.io_binding()
        values = {**self.states, **{name: _value(array) for name, array in arrays.items() if name in self._inputs}}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._outputs:
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        results = dict(zip(self._outputs, binding.get_outputs(), strict=True))
        self.states = {state.input: results.pop(state.output) for state in manifest.states}
        return chosen_rows(manifest.kept_rows, {name: value.numpy() for name, value in results.items()}, given)

    def hold(self, feeds: Feeds) -> None:
        """Feed these in all runs."""
        self._held.update({name: np.asarray(array) for name, array in feeds.items()})

    def load(self, states: Feeds) -> None:
        """Begin with these states."""
        self.states = {name: _value(np.asarray(array)) for name, array in states.items()}

    def grow(self, capacity: int) -> None:
        """Each run allocates what it needs."""

    def close(self) -> None:
        """Nothing is held elsewhere."""


def _value(array: Array) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"))


def compare_steps(sequences: Sequence[Sequence[Step]], unsplit: Unsplit) -> Differences:
    """The differences of all outputs of all steps from the unsplit model's, fed the same, with states of its own.

    What the unsplit model itself explains is excused: see `judge`.
    """
    differences = []
    for steps in sequences:
        whole = unsplit.start()
        for number, step in enumerate(steps):
            before = {name: value.numpy() for name, value in whole.states.items()}
            expected = whole.run(step.feeds)
            compared = partial(step.difference, unsplit.manifest.number_type)
            made = compared(expected, step.outputs)
            if before and not all(difference.passed for difference in made):
                with open_reference(unsplit.model, unsplit.manifest, CPUS, 1) as reference:
                    made = judge(compared, reference, {**step.feeds, **before}, expected, step.outputs).differences
            differences += [replace(difference, name=f"{difference.name} of step {number}") for difference in made]
    return differences


def made_feeds(manifest: Manifest, rows: int, before: int, new: int, padded: int = 0) -> Arrays:
    """Feeds of a request with `new` tokens after others, by the roles of its inputs.

    The first `padded` tokens of the first row are hidden by a mask, if the model takes one.
    """
    inputs = {tensor.name: tensor for tensor in manifest.inputs}
    states = [(inputs[state.input].shape or [], state.grows) for state in manifest.states]
    taken = [tensor for tensor in manifest.inputs if tensor.name not in {state.input for state in manifest.states}]
    batch = {size for shape, grows in states for axis, size in enumerate(shape) if axis != grows}
    steps = {size for tensor in taken if not _is_mask(tensor) for size in tensor.shape or ()} - batch
    sizes = {**dict.fromkeys(batch, rows), **dict.fromkeys(steps, new)}
    sizes |= {shape[grows]: before for shape, grows in states if grows is not None and shape}
    feeds = {}
    for tensor in taken:
        shape = [n if isinstance(n, int) else sizes.get(n, before + new) for n in tensor.shape or ()]
        feeds[tensor.name] = _made_feed(tensor, shape, before, padded)
    return feeds


def _is_mask(tensor: Tensor) -> bool:
    return tensor.role is not None and tensor.role.kind in ("mask", "bias")


def _made_feed(tensor: Tensor, shape: Sequence[int], before: int, padded: int) -> Array:
    dtype, kind = number_type(tensor.dtype), None if tensor.role is None else tensor.role.kind
    if kind == "mask":
        array: Array = np.ones(shape)
        array[0, ..., :padded] = 0
    elif kind == "positions":
        array = np.broadcast_to(before + np.arange(shape[-1] if shape else 1), shape or (1,)).reshape(shape)
    elif kind == "bias" and len(shape) > 2:
        hidden = np.arange(shape[-1]) > np.arange(before, before + shape[-2])[:, None]
        array = np.broadcast_to(np.where(hidden, -1e4, 0), shape)
    else:
        fill = tensor.fill or Fill("normal")
        return fill_array(fill, tensor.dtype, shape, np.random.default_rng(before))
    return array.astype(dtype, order="C")


def run_rows(session: Recorder, rows: int, lengths: Sequence[int], padded: int = 0) -> None:
    """Run a sequence of requests with so many tokens each, in several rows. The first row begins with padding."""
    before = 0
    with closing(session.start(sum(lengths) + 3 if session.manifest.lengths else None)) as sequence:
        for new in lengths:
            feeds = made_feeds(session.manifest, rows, before, new, padded)
            sequence.run(feeds, max(0, padded - before))
            before += new
