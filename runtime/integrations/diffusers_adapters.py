"""A pipeline's methods for adapters (LoRA) if its models are sessions with slots. Their names are diffusers'."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any

from splitc.runtime.adapters.adapter import Adapter
from splitc.runtime.adapters.adapter_files import adapter_of, read_adapter
from splitc.runtime.adapters.asked import divide
from splitc.runtime.errors import MisuseError
from splitc.runtime.integrations.arguments import FORWARD
from splitc.runtime.session.session import Session
from splitc.runtime.units import first_few

# Methods that would change the weights.
MERGES = ("fuse_lora", "unfuse_lora", "enable_lora_hotswap")
# The pipelines' method that runs text encoders, with a scale for their adapters.
PROMPT = "encode_prompt"
Weight = float | Mapping[str, float] | None


class PackageAdapters:
    """The adapters of a pipeline on a package. `sessions_of` gives its models by component."""

    # The sums that `disable_lora` switched off, by component.
    _switched_off: Mapping[str, Mapping[str, float]] = MappingProxyType({})

    def load_lora_weights(
        self,
        source: str | Path | Mapping[str, Any],
        adapter_name: str | None = None,
        *,
        weight_name: str | None = None,
        **options: Any,
    ) -> None:
        """Load an adapter from a file, a folder, or tensors by name, into each component that it has a part for.

        It replaces the active adapters, as in diffusers: `set_adapters` activates several. Raises MisuseError for a
        file that is no adapter or has nothing for this pipeline, a component without slots, a name that is taken, and
        options that packages lack. Nothing changes then.
        """
        if given := [name for name, value in options.items() if value]:
            raise MisuseError(f"load_lora_weights of a package has no option '{given[0]}'")
        sessions = sessions_of(self)
        name = adapter_name or _new_name(sessions)
        if any(name in session.adapters for session in sessions.values()):
            raise MisuseError(f"there is an adapter '{name}': delete_adapters('{name}') first, or take another name")
        if isinstance(source, Mapping):
            adapter = adapter_of(source)
        else:
            adapter = read_adapter(Path(source) / weight_name if weight_name else source)
        done: list[Session] = []
        try:
            for component, part in _parts(adapter, sessions).items():
                sessions[component].adapters.add(name, part)
                done.append(sessions[component])
        except BaseException:
            for session in done:
                session.adapters.unload(name)
            raise
        self._switched_off = {}
        for session in done:
            session.adapters.use(name)
            for note in session.adapters.notes:
                if f"'{name}'" in note:
                    warnings.warn(note, stacklevel=2)

    def set_adapters(
        self, adapter_names: str | Sequence[str], adapter_weights: Weight | Sequence[Weight] = None
    ) -> None:
        """Use a weighted sum of adapters. A weight of None is 1; a mapping has a weight for each component.

        Raises MisuseError for an adapter that is not loaded, and for weights that are not such numbers.
        """
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        weights = list(adapter_weights) if isinstance(adapter_weights, Sequence) else [adapter_weights] * len(names)
        if len(names) != len(weights):
            raise MisuseError(f"{len(names)} adapters and {len(weights)} weights: give one for each")
        sessions = sessions_of(self)
        _need_loaded(names, sessions)
        sums = {
            component: {
                name: _weight(weight, component)
                for name, weight in zip(names, weights, strict=True)
                if name in session.adapters
            }
            for component, session in sessions.items()
        }
        self._switched_off = {}
        for component, asked in sums.items():
            sessions[component].adapters.use(asked)

    def unload_lora_weights(self, **_: Any) -> None:
        """Forget all adapters."""
        self.delete_adapters(_names(sessions_of(self)))

    def delete_adapters(self, adapter_names: str | Sequence[str]) -> None:
        """Forget adapters. Raises MisuseError for one that is not loaded."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        sessions = sessions_of(self)
        _need_loaded(names, sessions)
        for session in sessions.values():
            for name in names:
                if name in session.adapters:
                    session.adapters.unload(name)

    def get_list_adapters(self) -> dict[str, list[str]]:
        """The loaded adapters of each component that has any."""
        return {name: list(session.adapters) for name, session in sessions_of(self).items() if session.adapters}

    def get_active_adapters(self) -> list[str]:
        """The active adapters."""
        return list(dict.fromkeys(name for session in sessions_of(self).values() for name in session.adapters.used))

    def disable_lora(self) -> None:
        """Use no adapter until the next `enable_lora` or `set_adapters`."""
        sessions = sessions_of(self)
        if used := {name: session.adapters.used for name, session in sessions.items() if session.adapters.used}:
            self._switched_off = used
        for session in sessions.values():
            session.adapters.use({})

    def enable_lora(self) -> None:
        """Use the adapters again that `disable_lora` switched off, unless others were set or loaded since."""
        sessions = sessions_of(self)
        off, self._switched_off = self._switched_off, {}
        for component, used in off.items():
            adapters = sessions[component].adapters
            adapters.use({name: times for name, times in used.items() if name in adapters})


def scaled(used: Mapping[str, float], scale: float) -> dict[str, float]:
    """A sum of adapters with all strengths times a scale."""
    return {name: times * scale for name, times in used.items()}


def with_scaled_prompt(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A pipeline's `encode_prompt` whose `lora_scale` multiplies the strengths of the adapters in use, for the call."""

    @wraps(plain)
    def encode(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(plain).bind(self, *args, **kwargs)
        scale = bound.arguments.pop("lora_scale", None)  # diffusers would look for its own layers
        if scale is None:
            return plain(*bound.args, **bound.kwargs)
        used = {session: session.adapters.used for session in sessions_of(self).values()}
        try:
            for session, names in used.items():
                session.adapters.use(scaled(names, scale))
            return plain(*bound.args, **bound.kwargs)
        finally:
            for session, names in used.items():
                session.adapters.use(names)

    return encode


def sessions_of(pipeline: Any) -> dict[str, Session]:
    """The sessions of a pipeline's models, by component."""
    parts = {name: getattr(part, "sessions", {}) for name, part in pipeline.components.items()}
    return {name: sessions[FORWARD] for name, sessions in parts.items() if FORWARD in sessions}


def _parts(adapter: Adapter, sessions: Mapping[str, Session]) -> dict[str, Adapter]:
    """An adapter's part for each component. An adapter that names no models is for the pipeline's denoiser."""
    parts = divide(adapter)
    taking = [name for name, session in sessions.items() if session.manifest.slots]
    if set(parts) == {None}:
        denoisers = [name for name in sessions if name in ("unet", "transformer")]
        parts = dict.fromkeys(denoisers or taking, parts[None])
    named = {name: part for name, part in parts.items() if name is not None}
    for name in named:
        if name not in taking:
            why = "has no slots for adapters: compile with --lora-slots 16" if name in sessions else "is not here"
            raise MisuseError(f"the adapter {adapter.name} has a part for {name}, which {why}")
    if not named or None in parts:
        raise MisuseError(
            f"the adapter {adapter.name} has modules of no model of this pipeline: {first_few(list(adapter.updates))}"
        )
    return named


def _weight(weight: Any, component: str) -> float:
    own = weight.get(component, 1.0) if isinstance(weight, Mapping) else weight
    if own is None:
        return 1.0
    if not isinstance(own, Real):
        raise MisuseError(
            f"an adapter's weight for {component} is one number, not {own!r}: blocks have none of their own"
        )
    return float(own)


def _names(sessions: Mapping[str, Session]) -> list[str]:
    return list(dict.fromkeys(name for session in sessions.values() for name in session.adapters))


def _need_loaded(names: Sequence[str], sessions: Mapping[str, Session]) -> None:
    known = _names(sessions)
    if missing := [name for name in names if name not in known]:
        raise MisuseError(f"no adapter '{missing[0]}' is loaded: there are {first_few(known) or 'none'}")


def _new_name(sessions: Mapping[str, Session]) -> str:
    """A name in diffusers' style."""
    known = _names(sessions)
    return next(name for number in itertools.count() if (name := f"default_{number}") not in known)
