"""An engine in several files with different inputs. The feeds of a request choose the file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from splitc.runtime.engines import Engine


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
