"""Match an adapter's modules with a model's layers, by names and sizes.

Names differ by who wrote them: PEFT has `base_model.model.model.layers.0.self_attn.q_proj`, kohya's scripts
`lora_unet_down_blocks_0_attn1_to_q`, and an exporter may have dropped or added scopes. So names are compared as words
from the end. Numbers identify one of several blocks, and must agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitc.runtime.adapters.adapter import Adapter, LowRank
from splitc.runtime.errors import AdapterError
from splitc.runtime.units import first_few


@dataclass(frozen=True)
class Layer:
    """A layer that takes adapters: its names, and the sizes of its weight."""

    names: tuple[str, ...]
    inputs: int
    outputs: int
    kernel: tuple[int, ...] = ()


@dataclass(frozen=True)
class Matches:
    """The update of each layer that has one, by the layer's number, and why each other update has no layer."""

    updates: Mapping[int, LowRank]
    unmatched: Mapping[str, str]


def match(adapter: Adapter, layers: Sequence[Layer]) -> Matches:
    """Find the layers of an adapter's updates. Two updates of one layer are ambiguous, and match none."""
    known = [[_name(text) for text in layer.names] for layer in layers]
    taken: dict[int, list[LowRank]] = {}
    unmatched: dict[str, str] = {}
    for module, update in adapter.updates.items():
        own = _name(module)
        scores = {number: max(_agreement(own, name) for name in names) for number, names in enumerate(known) if names}
        best = max(scores.values(), default=0)
        alike = [number for number, score in scores.items() if score == best > 0]
        fitting = [number for number in alike if _fits(update, layers[number])]
        if not alike:
            unmatched[module] = "no layer has its name"
        elif not fitting:
            unmatched[module] = _sizes_differ(update, layers[alike[0]])
        elif len(fitting) > 1:
            unmatched[module] = f"several layers may be meant: {first_few([layers[n].names[0] for n in fitting])}"
        else:
            taken.setdefault(fitting[0], []).append(update)
    for updates in (updates for updates in taken.values() if len(updates) > 1):
        why = f"one layer of {first_few([update.module for update in updates])}"
        unmatched.update({update.module: why for update in updates})
    return Matches({number: updates[0] for number, updates in taken.items() if len(updates) == 1}, unmatched)


def need_matches(adapter: Adapter, matches: Matches, layers: Sequence[Layer]) -> None:
    """Raise AdapterError for an adapter of another model: none of its updates has a layer."""
    if not matches.updates:
        module, why = next(iter(matches.unmatched.items()))
        known = first_few([layer.names[0] for layer in layers if layer.names]) or "none"
        raise AdapterError(
            f"the adapter {adapter.name} has nothing for this model, and may be another model's: '{module}': {why}. "
            f"Layers that take adapters: {known}"
        )


@dataclass(frozen=True)
class _Name:
    """A name as words. The last `own` of them are the module's own name, the others its scopes; 0: it is not known.

    `starts` are where scopes begin, in words from the end.
    """

    words: tuple[str, ...]
    own: int
    starts: frozenset[int] = frozenset()


def _name(text: str) -> _Name:
    """The words of a name. What has no dots is of kohya's scripts, which begin with what it is for."""
    parts = [part for part in re.split(r"[./]", text) if part]
    if len(parts) == 1:
        text = re.sub(r"^lora_(unet|transformer|te\d?)_", "", text)
        return _Name(_words(text), 0)
    own = next((number for number, part in enumerate(reversed(parts), 1) if not part.isdecimal()), len(parts))
    starts = frozenset(len(_words(".".join(parts[number:]))) for number in range(len(parts)))
    return _Name(_words(".".join(parts)), len(_words(".".join(parts[-own:]))), starts)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in re.findall(r"[a-zA-Z]+|\d+", text))


def _agreement(module: _Name, layer: _Name) -> int:
    """How much two names have in common from their ends: twice the words, and 1 more for whole scopes.

    So `transformer_blocks.0.to_q` is not `single_transformer_blocks.0.to_q`. 0 if they name different modules.

    The modules' own names are the same, and all numbers: but for one name with a number that is all of the other's end,
    since scopes may lie around a model. Where it is not known which words are the own name, one name is that as well.
    """
    common = 0
    for one, other in zip(reversed(module.words), reversed(layer.words), strict=False):
        if one != other:
            break
        common += 1
    shared = module.words[len(module.words) - common :]
    is_end = common == min(len(module.words), len(layer.words))
    if not common or (not is_end and (not module.own or common < max(module.own, layer.own))):
        return 0
    numbers = [[word for word in name.words if word.isdecimal()] for name in (module, layer)]
    same = numbers[0] == numbers[1] or (is_end and any(map(str.isdecimal, shared)))
    whole = all(not name.starts or common in name.starts for name in (module, layer))
    return 2 * common + whole if same and any(map(str.isalpha, shared)) else 0


def _fits(update: LowRank, layer: Layer) -> bool:
    flat = all(size == 1 for size in (*update.kernel, *layer.kernel))
    return (update.inputs, update.outputs) == (layer.inputs, layer.outputs) and (flat or update.kernel == layer.kernel)


def _sizes_differ(update: LowRank, layer: Layer) -> str:
    own, other = ([entry.inputs, entry.outputs, *entry.kernel] for entry in (update, layer))
    return f"it is for a layer of {own} inputs and outputs, and {layer.names[0]} has {other}"
