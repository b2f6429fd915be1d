"""An engine in two files: without slots for adapters, and with them, which is loaded when it is first needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from splitc.runtime.engines import LoadedEngine


class AdaptedEngine:
    """Runs the plain engine, or the one that `load` gives where a request brings values for any of the `slots`.

    Values for slots of other engines of the rank may be among them.
    """

    def __init__(self, plain: LoadedEngine, load: Callable[[], LoadedEngine], slots: frozenset[str]) -> None:
        self._plain, self._load, self._slots = plain, load, slots
        self.inputs, self.outputs = plain.inputs, plain.outputs
        self.optional = plain.optional | slots
        self.capture_blocker = plain.capture_blocker

    @cached_property
    def _adapted(self) -> LoadedEngine:
        return self._load()

    @cached_property
    def _known(self) -> frozenset[str]:
        """What the engine with slots takes."""
        return frozenset((*self._adapted.inputs, *self._adapted.optional))

    @property
    def is_loaded(self) -> bool:
        """Whether the engine with slots is loaded."""
        return "_adapted" in self.__dict__

    @property
    def adapted_blocker(self) -> str | None:
        """The `capture_blocker` of the engine with slots, if it is loaded."""
        return self._adapted.capture_blocker if self.is_loaded else None

    def run(self, values: Mapping[str, Any], into: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """See Engine."""
        if self._slots.isdisjoint(values):
            return self._plain.run(values, into)
        return self._adapted.run({name: value for name, value in values.items() if name in self._known}, into)
