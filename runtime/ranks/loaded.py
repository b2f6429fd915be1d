"""A rank's engines on its device, and their connections with those of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from splitc.runtime.collectives.collectives import Collectives
from splitc.runtime.engines import Backend, Communicator, Engine, LoadOptions
from splitc.runtime.engines.built_here import newer_named
from splitc.runtime.engines.kinds import find_kind, make_backend
from splitc.runtime.engines.variables import use_first_expert_kernels
from splitc.runtime.gpu.replayable import shares_weights, why_not_replayed, why_unsafe_to_replay
from splitc.runtime.gpu.weight_places import SwapBuffer
from splitc.runtime.hardware.devices import Device
from splitc.runtime.hardware.memory_use import MemoryUse, RankMemory
from splitc.runtime.package.manifest import EngineFile, Manifest, Rank
from splitc.runtime.package.manifest_file import same_package
from splitc.runtime.ranks.loop import Program


class EngineForms:
    """Runs the first of `others` with an input among a request's values, or else the `plain` form.

    Each of `others` has a name, the inputs that choose it, and a function that loads it on first use. A request's
    values may include inputs of the rank's other engines.
    """

    def __init__(self, plain: Engine, others: Mapping[str, tuple[frozenset[str], Callable[[], Engine]]]) -> None:
        self._plain, self._others = plain, others
        self._loaded: dict[str, Engine] = {}
        self.inputs, self.outputs = plain.inputs, plain.outputs
        self.optional = plain.optional.union(*(inputs for inputs, _ in others.values()))
        self.capture_blocker = plain.capture_blocker

    def is_loaded(self, name: str) -> bool:
        """Whether the form of this name is loaded."""
        return name in self._loaded

    def blocker(self, values: Collection[str]) -> str | None:
        """Why the run for values with these names can't be captured; None if it can, as far as known."""
        loaded = self._plain if (name := self._name(values)) is None else self._loaded.get(name)
        return None if loaded is None else loaded.capture_blocker

    def run(self, values: Mapping[str, Any], into: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """See Engine."""
        if (name := self._name(values)) is None:
            return self._plain.run(values, into)
        if name not in self._loaded:
            self._loaded[name] = self._others[name][1]()
        form = self._loaded[name]
        known = {*form.inputs, *form.optional}
        return form.run({given: value for given, value in values.items() if given in known}, into)

    def _name(self, values: Iterable[str]) -> str | None:
        """The name of the form for these values; None for the plain one."""
        return next((name for name, (inputs, _) in self._others.items() if not inputs.isdisjoint(values)), None)


# The form of an engine with slots for adapters, and the one with masks.
ADAPTED, MASKED = "adapted", "masked"


@dataclass(frozen=True)
class Setup:
    """A rank of a package, by its number.

    - `swap`: the buffer that models use for weights in turn, or None.
    - `share`: what its engines may take of the container's memory; None if that is not divided.
    """

    number: int
    package: Path
    manifest: Manifest
    swap: SwapBuffer | None = None
    share: int | None = None

    @property
    def rank(self) -> Rank:
        """The rank's entry in the manifest."""
        return self.manifest.ranks[self.number]

    @property
    def limit(self) -> int | None:
        """The limit for its engines' weights and values: that of its budget, or its share if that is less."""
        return min(filter(None, (self.rank.limit_bytes, self.share)), default=None)


@dataclass(frozen=True)
class LoadedRank:
    """A rank's program and its engines' communicators, one for each of its groups.

    - `capture_blocker`: why its work can't be captured as a CUDA graph; None if it can.
    - `before`, `loaded`: the device's memory before and after loading; None in a thread on a CPU device.
    """

    program: Program
    communicators: Sequence[Communicator]
    capture_blocker: str | None
    before: MemoryUse | None
    loaded: MemoryUse | None

    def begin(self, request: int) -> list[int]:
        """Begin the request with this number in all collectives. Returns the number of its run in each."""
        return [communicator.begin(request) for communicator in self.communicators]

    def check(self) -> None:
        """Raise EngineError if a collective failed."""
        for communicator in self.communicators:
            communicator.check()

    def fail(self, runs: Sequence[int]) -> bool:
        """Fail the runs that `begin` returned, on the ranks whose engines would wait for this rank's.

        Returns whether the collectives of all groups then fail at once.
        """
        told = [communicator.fail(run) for communicator, run in zip(self.communicators, runs, strict=True)]
        return all(told)

    def memory(self, rank: Rank, use: MemoryUse | None) -> RankMemory | None:
        """The growth of the memory since before loading, with the prediction; None if it is not known.

        Weights in mapped files count as far as requests read them.
        """
        if use is None or self.before is None or self.loaded is None:
            return None
        adapted = any(isinstance(one, EngineForms) and one.is_loaded(ADAPTED) for one in self.program.engines)
        total = rank.total_bytes if adapted else rank.total_bytes - rank.adapter_bytes
        loaded = self.loaded.now - self.before.now + max(0, use.mapped - self.loaded.mapped)
        peak = use.peak - self.before.now
        return RankMemory(rank.device, loaded, peak, rank.weights_bytes, rank.loaded_bytes, total)


def make_backend_of(manifest: Manifest, number: int, device: Device, threads: int, cuda_graphs: bool) -> Backend:
    """The backend of a rank, by its number. Raises PackageError if the GPU or a library is missing."""
    rank = manifest.ranks[number]
    replays = not any(why_not_replayed(rank, file) for file in rank.engines)
    return make_backend(manifest.engine, device, threads, manifest.build, cuda_graphs, replays=replays)


def load_rank(setup: Setup, backend: Backend, collectives: Collectives) -> LoadedRank:
    """Load the engines on this thread, and connect those with collectives inside.

    Raises PackageError if an engine can't be loaded, and the error of any other rank in these collectives.
    """
    rank = setup.rank
    backend.attach()
    backend.limit(setup.limit)
    if setup.manifest.maps_weights:
        backend.map_weights()
    if setup.swap is not None:
        backend.swap_weights(setup.swap)
    before = backend.memory()
    if any(file.experts for file in rank.engines):
        use_first_expert_kernels()
    communicators: dict[tuple[int, ...], Communicator] = {}
    engines: list[Engine] = []
    choices = choices_of(setup.manifest, rank)
    with newer_named(setup.manifest), backend.loading():
        for file in rank.engines:
            group = tuple(file.group)
            if group and group not in communicators:
                uses_operators = find_kind(setup.manifest.engine).uses_operators
                communicators[group] = collectives.create_communicator(group, uses_operators)
            source = setup.package / file.source if file.source is not None else None
            weights = file.weights if shares_weights(rank, file) else None
            replays = not why_unsafe_to_replay(rank, file)
            how = LoadOptions(file, source, communicators.get(group), weights, replays)
            engines.append(load_engine(backend, setup, file, choices, how))
    for communicator in communicators.values():
        communicator.connect()
    reserve(setup, backend)
    blockers = [
        why_not_replayed(rank, file) or engine.capture_blocker
        for file, engine in zip(rank.engines, engines, strict=True)
        if why_unsafe_to_replay(rank, file) or engine.capture_blocker
    ]
    program = Program(rank.program, engines, [*rank.outputs, *rank.keeps])
    return LoadedRank(
        program, list(communicators.values()), next(filter(None, blockers), None), before, backend.memory()
    )


def choices_of(manifest: Manifest, rank: Rank) -> dict[str, frozenset[str]]:
    """The inputs that choose the forms of a rank's engines: slots for adapters, and masks."""
    slots = (override.value for override in rank.overrides if override.input in manifest.slot_inputs)
    masks = manifest.masks.intersection(rank.inputs)
    return {ADAPTED: frozenset(slots), MASKED: masks}


def load_engine(
    backend: Backend, setup: Setup, file: EngineFile, choices: Mapping[str, frozenset[str]], how: LoadOptions
) -> Engine:
    """An engine of a rank. Its other forms are loaded on first use."""

    def load(path: str) -> Engine:
        with same_package(setup.package, setup.manifest):
            return backend.load(setup.package / path, how)

    forms = {ADAPTED: file.adapted, MASKED: None if file.unmasked is None else file.path}
    others = {name: (choices[name], partial(load, path)) for name, path in forms.items() if path is not None}
    plain = load(file.unmasked or file.path)
    return EngineForms(plain, others) if others else plain


def reserve(setup: Setup, backend: Backend) -> None:
    """Reserve the memory that the rank needs besides its engines'."""
    rank = setup.rank
    passed = rank.activation_bytes if rank.passed_bytes is None else rank.passed_bytes
    backend.reserve(passed + rank.cache_bytes)
