"""Feeds from the call of a model's method: each argument is fed to the input of its name."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from splitc.runtime.arrays.array import number_type
from splitc.runtime.errors import FeedError
from splitc.runtime.package.manifest import FixedInput, Tensor

VARIABLE = inspect.Parameter.VAR_POSITIONAL
# The method whose numbers and flags users choose. Pipelines call others (`decode`) with flags of their own.
FORWARD = "forward"
# How the names of arguments begin that choose what is returned, and change no number.
ANSWERS = ("return_", "output_", "use_cache")
# The entry of a dict that multiplies adapters' strengths, as in `cross_attention_kwargs={"scale": 0.5}`.
SCALE = "scale"


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
        FeedError for a tensor without an input, for an input without a tensor, and for a number or flag without an
        input that is not the method's default, or not what the model was compiled for.
        """
        bound = self.signature.bind(*args, **kwargs)
        said = {name: value for name, value in self._flat(bound.arguments) if _holds_numbers(value)}
        bound.apply_defaults()
        arguments = dict(self._flat(bound.arguments))
        named = {name: value for name, value in arguments.items() if _holds_tensors(value)}
        if len(self.inputs) == 1 and self.inputs[0].name not in named:
            first = next(iter(named), None)
            named = {self.inputs[0].name if name == first else name: value for name, value in named.items()}
        known = [tensor.name for tensor in (*self.inputs, *self.optional)]
        feeds = {name: self._number(arguments, named, name) for name in known}
        self._check_unused(named, said)
        if missing := [tensor.name for tensor in self.inputs if feeds[tensor.name] is None]:
            raise FeedError(f"{self.name} is called without '{missing[0]}', which the compiled model reads")
        return {name: value for name, value in feeds.items() if value is not None}, arguments

    def strength(self, arguments: Mapping[str, Any]) -> float:
        """What a call multiplies the strengths of adapters by: a dict's `scale`. Without one it is 1."""
        own = {SCALE} & {*self.signature.parameters, *(tensor.name for tensor in (*self.inputs, *self.optional))}
        scale = None if own else arguments.get(SCALE)
        if scale is not None and not isinstance(scale, Real):
            raise FeedError(f"{self.name} is called with the scale {scale!r} of adapters, which is not a number")
        return 1.0 if scale is None else float(scale)

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

    def _check_unused(self, named: Mapping[str, Any], said: Mapping[str, Any]) -> None:
        """Raise FeedError for a tensor or number that no input takes, and that the compiled model does not have."""
        fixed = {tensor.name: tensor for tensor in self.fixed}
        known = {tensor.name for tensor in (*self.inputs, *self.optional)}
        for name, value in {**said, **named}.items():
            if name in known or name.startswith(ANSWERS):
                continue
            if name in fixed:
                if fixed[name].value is not None and not _is_bound(value, fixed[name]):
                    differ = "" if name in named else f": {value}, and not {fixed[name].value}"
                    raise FeedError(
                        f"{self.name} is called with another '{name}' than it was compiled for (--set){differ}"
                    )
            elif name in named:
                raise FeedError(
                    f"{self.name} is called with '{name}', and the compiled model has no such input: export the model "
                    f"with it, or call the pipeline without what needs it. It takes {', '.join(sorted(known))}"
                )
            elif not self._is_default(name, value):
                raise FeedError(
                    f"{self.name} is called with '{name}' {value}, and the compiled model has no such input: an export "
                    f"without it computes with {self.signature.parameters[name].default}, the method's default. Export "
                    "the model with it, or call the pipeline without what needs it"
                )

    def _is_default(self, name: str, value: Any) -> bool:
        """Whether a number is the method's default. If that is not known, it counts as such.

        A default of None is not known: the pipeline may give a size here, which the export has as a constant.
        """
        default = self.signature.parameters[name].default if name in self.signature.parameters else None
        known = isinstance(default, bool | int | float) and self.name.endswith(f".{FORWARD}")
        return not known or bool(np.all(np.asarray(value) == default))


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


def _is_bound(value: Any, fixed: FixedInput) -> bool:
    """Whether an argument is what an input was bound to, in the input's type."""
    bound, given = np.asarray(fixed.value, number_type(fixed.dtype)), np.asarray(value)
    if bound.dtype.kind not in "biu":  # 0.1 is another number in float32
        given = given.astype(bound.dtype)
    return np.array_equal(given.reshape(bound.shape) if given.size == bound.size == 1 else given, bound)


def _holds_numbers(value: Any) -> bool:
    """Whether an argument is a number or flag, or a sequence of such."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_holds_numbers, value))
    return isinstance(value, (bool, int, float, np.number, np.bool_))


def _holds_tensors(value: Any) -> bool:
    """Whether an argument is a tensor of any library, or a sequence of such."""
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(item) for item in value)
    return hasattr(value, "shape") and hasattr(value, "dtype") and not _holds_numbers(value)
