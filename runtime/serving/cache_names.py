"""The names of a decoder's caches: two for each layer. Names of different layers differ only in a number."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest import Manifest, Tensor
from splitc.runtime.package.states import State


@dataclass(frozen=True)
class CacheNames:
    """Patterns of names, with `%d` for the layer's number, and the sizes of a cache: batch x heads x length x head.

    `inputs` and `outputs` are a layer's keys and values.
    """

    inputs: tuple[str, str]
    outputs: tuple[str, str]
    layers: int
    heads: int
    head: int


def find_caches(manifest: Manifest) -> CacheNames:
    """Find the patterns. Raises MisuseError for a model that has no such caches."""
    if not manifest.states:
        raise MisuseError(f"{manifest.source.name} has no caches, which genai needs")
    patterns = _group(manifest.states)
    layers = len(manifest.states) // 2
    if len(patterns) != 2 or any(layers_named != set(range(layers)) for layers_named in patterns.values()):
        names = ", ".join(sorted(taken for taken, _ in patterns)[:4])
        raise MisuseError(
            f"genai needs two caches per layer, keys and values, whose names differ by the layer's number from 0 on; "
            f"{manifest.source.name} has {len(manifest.states)}: {names}"
        )
    heads, head = _sizes(manifest)
    (first, first_output), (second, second_output) = patterns
    return CacheNames((first, second), (first_output, second_output), layers, heads, head)


def _group(states: Sequence[State]) -> dict[tuple[str, str], set[int]]:
    """The patterns of the states' two names, and their layers. The layer's number is the one that differs."""
    possible = [_patterns(state) for state in states]
    counts = Counter(pattern for patterns in possible for pattern in patterns)
    groups: dict[tuple[str, str], set[int]] = {}
    for state, patterns in zip(states, possible, strict=True):
        if not patterns:
            raise MisuseError(
                f"genai needs the layer's number in the names of a cache: '{state.input}', '{state.output}'"
            )
        pattern = max(patterns, key=counts.__getitem__)
        groups.setdefault(pattern, set()).add(patterns[pattern])
    return groups


def _patterns(state: State) -> dict[tuple[str, str], int]:
    """The names with a gap in place of a common number, and that number."""
    if "%" in state.input + state.output:
        return {}
    return {
        (_with_gap(state.input, taken), _with_gap(state.output, given)): int(taken[0])
        for taken in re.finditer(r"\d+", state.input)
        for given in re.finditer(r"\d+", state.output)
        if taken[0] == given[0]
    }


def _with_gap(name: str, number: re.Match[str]) -> str:
    return f"{name[: number.start()]}%d{name[number.end() :]}"


def _sizes(manifest: Manifest) -> tuple[int, int]:
    """The heads of a cache, and the size of each. Raises MisuseError if caches differ, or are of another form."""
    inputs = {tensor.name: tensor for tensor in manifest.inputs}
    forms = {_form(inputs[state.input], state) for state in manifest.states}
    if len(forms) != 1 or None in forms:
        raise MisuseError(
            f"genai needs equal caches, batch x heads x length x head, and {manifest.source.name} has others"
        )
    ((heads, head),) = (form for form in forms if form is not None)
    return heads, head


def _form(tensor: Tensor, state: State) -> tuple[int, int] | None:
    shape = tensor.shape
    if shape is None or len(shape) != 4 or state.grows != 2:
        return None
    heads, head = shape[1], shape[3]
    return (heads, head) if isinstance(heads, int) and isinstance(head, int) else None
