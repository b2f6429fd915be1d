"""Feeds from the call of a model's method: each argument is fed to the input of its name."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from splitc.runtime.errors import FeedError
from splitc.runtime.package.manifest import FixedInput, Tensor

VARIABLE = inspect.Parameter.VAR_POSITIONAL


@dataclass(frozen=True)
class ModelMethod:
    """A method that a package's module replaces, with the module's inputs.

    `name` is for errors. The signature is the original method's.
    """

    name: str
    signature: inspect.Signature
    inputs: Sequence[Tensor]
    optional: Sequence[Tensor] = ()
    fixed: Sequence[FixedInput] = ()

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The tensors of a call by input, and all its arguments by name.

        Dicts count as the arguments that they contain. If the model has one input, it gets the first tensor. Raises
        FeedError for a tensor without an input, and for an input without a tensor.
        """
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(self._flat(bound.arguments))
        named = {name: value for name, value in arguments.items() if _holds_tensors(value)}
        if len(self.inputs) == 1 and self.inputs[0].name not in named:
            first = next(iter(named), None)
            named = {self.inputs[0].name if name == first else name: value for name, value in named.items()}
        known = [tensor.name for tensor in (*self.inputs, *self.optional)]
        feeds = {name: self._number(arguments, named, name) for name in known}
        self._check_unused(named)
        if missing := [tensor.name for tensor in self.inputs if feeds[tensor.name] is None]:
            raise FeedError(f"{self.name} is called without '{missing[0]}', which the compiled model reads")
        return {name: value for name, value in feeds.items() if value is not None}, arguments

    def _flat(self, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The arguments, with dicts, the signature's `*args` and lists for numbered inputs taken apart."""
        for name, value in arguments.items():
            if isinstance(value, Mapping):
                yield from self._flat(value)
            elif name in self.signature.parameters and self.signature.parameters[name].kind == VARIABLE:
                yield from ((f"{name}[{place}]", item) for place, item in enumerate(value))
            elif isinstance(value, (list, tuple)) and any(tensor.name == f"{name}_0" for tensor in self.inputs):
                yield from ((f"{name}_{place}", item) for place, item in enumerate(value))
            else:
                yield name, value

    def _number(self, arguments: Mapping[str, Any], named: Mapping[str, Any], name: str) -> Any:
        """The tensor or number for an input."""
        value = named.get(name, arguments.get(name))
        return np.asarray(value) if isinstance(value, (bool, int, float)) else value

    def _check_unused(self, named: Mapping[str, Any]) -> None:
        """Raise FeedError for a tensor that no input takes, or that differs from the value its input was bound to."""
        bound = {tensor.name: tensor.value for tensor in self.fixed}
        known = {tensor.name for tensor in (*self.inputs, *self.optional)}
        for name, value in named.items():
            if name in known:
                continue
            if name not in bound:
                raise FeedError(
                    f"{self.name} is called with '{name}', and the compiled model has no such input: export the model "
                    f"with it, or call the pipeline without what needs it. It takes {', '.join(sorted(known))}"
                )
            if bound[name] is not None and not np.array_equal(np.asarray(value), np.asarray(bound[name])):
                raise FeedError(f"{self.name} is called with another '{name}' than it was compiled for (--set)")


def method_of(owner: type, method: str, name: str, session: Any) -> ModelMethod:
    """A class's method that a session replaces."""
    plain: Callable[..., Any] = getattr(owner, method)
    parameters = list(inspect.signature(plain).parameters.values())[1:]  # without self
    fixed = session.manifest.fixed
    return ModelMethod(name, inspect.Signature(parameters), session.inputs, session.optional, fixed)


def numbered_together(outputs: Mapping[str, Any], lengths: Mapping[str, int]) -> dict[str, Any]:
    """Join outputs whose names end in a number, such as `hidden_states.3`, into one tuple, `hidden_states`.

    `lengths` are the known lengths of tuples, by name. Numbers that the model lacks give None. Names with an
    underscore, such as `samples_3`, are joined if there are several, numbered from 0.
    """
    merged: dict[str, Any] = {}
    for name, value in outputs.items():
        stem, dot, number = name.rpartition("." if "." in name else "_")
        if dot and number.isdigit() and (dot == "." or _count(outputs, stem) > max(1, int(number))):
            merged.setdefault(stem, {})[int(number)] = value
        else:
            merged[name] = value
    return {
        name: tuple(map(value.get, range(max(*value, lengths.get(name, 0) - 1, 0) + 1)))
        if isinstance(value, dict)
        else value
        for name, value in merged.items()
    }


def _count(names: Collection[str], stem: str) -> int:
    """How many of the names are `stem_0`, `stem_1` and so on, without a gap."""
    return next(number for number in itertools.count() if f"{stem}_{number}" not in names)


def _holds_tensors(value: Any) -> bool:
    """Whether an argument is a tensor of any library, or a sequence of such."""
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(item) for item in value)
    return hasattr(value, "shape") and hasattr(value, "dtype")
