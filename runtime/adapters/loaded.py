"""The adapters of a session: loaded by name, and put into a request in any sum."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from splitc.runtime.adapters.adapter import Adapter, LowRank, read_pair
from splitc.runtime.adapters.adapter_files import adapter_of
from splitc.runtime.adapters.asked import as_pairs, open_adapter, summed
from splitc.runtime.adapters.held import HeldSum, KeptSums
from splitc.runtime.adapters.matching import Layer, match, need_matches
from splitc.runtime.arrays.array import Array, number_type
from splitc.runtime.errors import AdapterError, blamed
from splitc.runtime.package.manifest import Slot, Tensor
from splitc.runtime.units import first_few

# The least rank that ranks are given. A choice: vectors of arithmetic have as many numbers.
LEAST_RANK = 8


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in memory: A and B of each slot that it has an update for, by the slot's number. B has the scale.

    Both are matrices with a row for each unit of the rank, whatever the slot's layout. `unmatched` are the updates
    without a slot, with the reason. `number` is its own: names are those of other adapters later.
    """

    scale: float
    arrays: Mapping[int, tuple[Array, Array]]
    unmatched: Mapping[str, str]
    number: int = field(default_factory=itertools.count().__next__)

    def rank(self, number: int) -> int:
        """The rank of the update of the slot of this number; 0 if there is none."""
        return len(self.arrays[number][0]) if number in self.arrays else 0

    @property
    def bytes(self) -> int:
        """The memory that it takes on the host."""
        return sum(a.nbytes + b.nbytes for a, b in self.arrays.values())


def padded_rank(rank: int) -> int:
    """The rank that sums of this rank have on the ranks: 8, or the next power of two."""
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())


class Adapters(Mapping[str, LoadedAdapter]):
    """The adapters that a session has loaded, by name. `kept` are the sums that the ranks hold.

    session.adapters.load("style", "style.safetensors", scale=0.8)
    session.run(feeds, adapters={"style": 1.0, "pose": 0.3})
    session.adapters.use({"style": 1.0})  # the default of all requests
    """

    def __init__(self, slots: Sequence[Slot], kept: KeptSums) -> None:
        self._slots, self._kept = slots, kept
        self._loaded: dict[str, LoadedAdapter] = {}
        self._used: Mapping[str, float] = {}

    def __getitem__(self, name: str) -> LoadedAdapter:
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)

    def load(self, name: str, file: str | Path | Mapping[str, Any], scale: float = 1.0) -> LoadedAdapter:
        """Load an adapter under a name: a file, a folder, or arrays or tensors by the names that files give them.

        `scale` multiplies the adapter's own scale. For what is returned and raised see `add`.
        """
        self._need_slots()
        adapter = adapter_of(file) if isinstance(file, Mapping) else open_adapter(str(file))
        return self.add(name, adapter, scale)

    def use_files(self, files: str | Iterable[str | tuple[str, float]]) -> None:
        """Load files, and make their sum the default for requests that name no adapters.

        Each has its factor beside it, or is text as on the command line: `style.safetensors:0.8`.
        """
        sums = summed(as_pairs(files))
        for file in sums:
            self.load(file, file)
        self.use(sums)

    def add(self, name: str, adapter: Adapter, scale: float = 1.0) -> LoadedAdapter:
        """Load an adapter that was read, under a name. One of this name is replaced.

        The result lists its updates that have no layer here (`unmatched`). Raises AdapterError for a package without
        slots, a file that is no adapter, and an adapter of another model. Then nothing changes.
        """
        self._need_slots()
        if not math.isfinite(scale):
            raise AdapterError(f"the scale of an adapter is a number, not {scale}")
        layers = [Layer(tuple(slot.names), slot.inputs, slot.outputs, tuple(slot.kernel)) for slot in self._slots]
        matches = match(adapter, layers)
        need_matches(adapter, matches, layers)
        arrays = {
            number: _arrays(update, self._slots[number], adapter.name) for number, update in matches.updates.items()
        }
        return self.put(name, LoadedAdapter(scale, arrays, matches.unmatched))

    def put(self, name: str, adapter: LoadedAdapter) -> LoadedAdapter:
        """Keep an adapter whose slots are known, under a name. One of this name is replaced."""
        self._loaded[name] = adapter
        self._kept.clear()
        return adapter

    def unload(self, name: str) -> None:
        """Forget an adapter. Open sequences with it keep it. Raises AdapterError if none of this name is loaded."""
        self._need([name])
        del self._loaded[name]
        self._used = {other: times for other, times in self._used.items() if other != name}
        self._kept.clear()

    @property
    def notes(self) -> list[str]:
        """Messages for the user: the updates of adapters without a slot."""
        # A copy, since other threads may load and unload some.
        loaded = list(self._loaded.items())
        return [
            f"the adapter '{name}' is used in part: {len(why)} of its {len(why) + len(adapter.arrays)} layers have "
            f"no slot here, such as {next(iter(why))}: {next(iter(why.values()))}"
            for name, adapter in loaded
            if (why := adapter.unmatched)
        ]

    @property
    def used(self) -> Mapping[str, float]:
        """The default sum, for requests that name no adapters."""
        return dict(self._used)

    def use(self, asked: Mapping[str, float] | str) -> None:
        """Set the default sum, for requests that name no adapters and for new sequences.

        Raises AdapterError for an adapter that is not loaded.
        """
        self._used = self._read(asked)

    def sum(self, asked: Mapping[str, float] | str | None) -> HeldSum | None:
        """The weighted sum of adapters; None if all factors are 0. A name alone is one adapter, with factor 1.

        If `asked` is None, it is the default sum; if it is empty, there is none. Raises AdapterError for one that is
        not loaded.
        """
        read = self._used if asked is None else self._read(asked)
        parts = tuple(sorted((name, times) for name, times in read.items() if times))
        if not parts:
            return None
        adapters = [(self._loaded[name], times) for name, times in parts]
        ranks = [sum(adapter.rank(number) for adapter, _ in adapters) for number in range(len(self._slots))]
        rank = padded_rank(max(ranks))
        key = tuple((adapter.number, times) for adapter, times in adapters)
        held = self._kept.get(key, rank, partial(self._add, [name for name, _ in parts], adapters, rank))
        if any(self._loaded.get(name) is not adapter for (name, _), (adapter, _) in zip(parts, adapters, strict=True)):
            self._kept.clear()  # a thread has replaced an adapter since it was read, and cleared too early for this sum
        return held

    def _read(self, asked: Mapping[str, float] | str) -> Mapping[str, float]:
        with blamed("name one adapter, or give strengths by name, as in {'style': 0.8}"):
            sums = {asked: 1.0} if isinstance(asked, str) else {name: float(times) for name, times in asked.items()}
        self._need(list(sums))
        if wrong := [name for name, times in sums.items() if not math.isfinite(times)]:
            raise AdapterError(
                f"the strength of the adapter '{wrong[0]}' is {sums[wrong[0]]}, which is not a finite number"
            )
        return sums

    def _need_slots(self) -> None:
        if not self._slots:
            raise AdapterError(
                "this package has no slots for adapters: compile with --lora-slots 16, or merge with --lora"
            )

    def _need(self, names: Sequence[str]) -> None:
        if missing := [name for name in names if name not in self._loaded]:
            known = first_few(list(self._loaded)) or "none"
            raise AdapterError(f"no adapter '{missing[0]}' is loaded: there are {known}")

    def _add(
        self, names: Sequence[str], adapters: Sequence[tuple[LoadedAdapter, float]], rank: int
    ) -> dict[str, Array]:
        """The arrays of a sum: the adapters' ranks side by side, each B times its adapter's factor.

        All slots are padded with zeros to one rank, so that shapes stay the same from sum to sum. Raises AdapterError
        for a factor that makes numbers which are not finite.
        """
        feeds: dict[str, Array] = {}
        for number, slot in enumerate(self._slots):
            a, b = feeds[slot.a.name], feeds[slot.b.name] = _zeros(slot.a, rank), _zeros(slot.b, rank)
            a, b = _rows(slot, a, b)
            start = 0
            for name, (adapter, times) in zip(names, adapters, strict=True):
                if number in adapter.arrays:
                    part = slice(start, start + adapter.rank(number))
                    first, second = adapter.arrays[number]
                    with np.errstate(over="ignore", invalid="ignore"):
                        a[part], b[part] = first, second * np.float32(times * adapter.scale)
                    if not (np.isfinite(a[part]).all() and np.isfinite(b[part]).all()):
                        raise AdapterError(
                            f"the adapter '{name}', times {times * adapter.scale:g}, has numbers that are not finite "
                            f"in {slot.b.dtype}, for the layer {slot.names[0]}: ask for a smaller strength"
                        )
                    start = part.stop
        return feeds


def _arrays(update: LowRank, slot: Slot, name: str) -> tuple[Array, Array]:
    """A and B of an update in single precision, with a row for each unit of the rank. B has the scale.

    Raises AdapterError if numbers are not finite; `name` is the adapter's.
    """
    a, b = read_pair(update, name)
    scale = update.scale if update.for_slots else update.scale / slot.factor
    with np.errstate(over="ignore", invalid="ignore"):
        b = np.ascontiguousarray(b.reshape(len(b), -1).T * np.float32(scale))
    if not np.isfinite(b).all():
        raise AdapterError(
            f"the adapter {name} has numbers for '{update.module}' that are not finite in float32, times its scale "
            f"{scale:g}"
        )
    return a.reshape(len(a), -1), b


def _zeros(tensor: Tensor, rank: int) -> Array:
    """A slot's A or B of this rank, which is its only size that is not fixed."""
    sizes = [size if isinstance(size, int) else rank for size in tensor.shape or ()]
    return np.zeros(sizes, number_type(tensor.dtype))


def _rows(slot: Slot, a: Array, b: Array) -> tuple[Array, Array]:
    """Views of a slot's A and B with a row for each unit of the rank."""
    return (a.reshape(len(a), -1), b.reshape(len(b), -1).T) if slot.kernel else (a.T, b)
