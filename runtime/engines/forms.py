"""An engine in several files: each takes other inputs, and a request has the one that takes what it brings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from splitc.runtime.engines import Engine


class EngineForms:
    """Runs the `plain` form, or the first of `others` that has one of its inputs among the values of a request.

    Each of these has a name, the inputs by which it is chosen, and a function that loads it: when it is first needed.
    Values for other engines of the rank may be among those of a request.
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
        """Why the work for values of these names can't be captured, as far as it is known. None if it can."""
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
        """The name of the form that takes these values; None for the plain one."""
        return next((name for name, (inputs, _) in self._others.items() if not inputs.isdisjoint(values)), None)
