"""Text from images: a vision model, a table of embeddings, and a decoder that reads embeddings, found by structure."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from splitc.runtime.arrays.array import Array, number_type
from splitc.runtime.errors import MisuseError
from splitc.runtime.generate.conversation import ModelRunner
from splitc.runtime.generate.embedded_model import EmbeddedModel, Embedding, check_rows
from splitc.runtime.generate.image_prompt import ImagePrompt, Positions
from splitc.runtime.generate.signature import find_logits
from splitc.runtime.generate.tokens import Timings, generate
from splitc.runtime.generate.wiring import DecoderUses, find_uses, find_wanted, fits
from splitc.runtime.package.manifest import Manifest, Tensor, of_role

# A token that no text has: of a prompt without images.
NO_IMAGE = -1


@dataclass(frozen=True)
class VisionWiring(DecoderUses):
    """The modules that take part."""

    vision: str
    embedding: str


def find_vision_wiring(manifests: Mapping[str, Manifest]) -> VisionWiring | None:
    """Find the parts; None for modules that are something else."""
    decoders = [name for name, manifest in manifests.items() if _embeds_of(manifest) is not None]
    uses = find_uses(manifests, decoders)
    embeddings = [
        name
        for name, manifest in manifests.items()
        if name not in decoders and all(_makes_embeddings(manifest, manifests[decoder]) for decoder in decoders)
    ]
    visions = [name for name in manifests if name not in (*decoders, *embeddings) and _reads_pixels(manifests[name])]
    if uses is None or len(embeddings) != 1 or len(visions) != 1:
        return None
    return VisionWiring(uses.first, uses.step, visions[0], embeddings[0])


def _embeds_of(manifest: Manifest) -> Tensor | None:
    """The input of embeddings of a decoder that reads no tokens; None for other models."""
    wanted = find_wanted(manifest)
    if of_role(manifest.inputs, "indices") or len(wanted) != 1 or not find_logits(manifest):
        return None
    tensor = next(tensor for tensor in manifest.inputs if tensor.name == wanted[0])
    return tensor if len(tensor.shape or ()) == 3 else None


def _makes_embeddings(manifest: Manifest, decoder: Manifest) -> bool:
    taken = _embeds_of(decoder)
    return taken is not None and _ids_of(manifest) is not None and any(fits(taken, made) for made in manifest.outputs)


def _ids_of(manifest: Manifest) -> Tensor | None:
    ids = of_role(manifest.inputs, "indices")
    return ids[0] if len(ids) == 1 else None


def _reads_pixels(manifest: Manifest) -> bool:
    return bool(find_wanted(manifest)) and _ids_of(manifest) is None


def generate_about_images(
    modules: Mapping[str, ModelRunner],
    wiring: VisionWiring,
    prompt: Callable[[], ImagePrompt] | Sequence[int] | None,
    positions: Callable[[ImagePrompt], Positions],
    *,
    timings: Timings | None = None,
    **options: Any,
) -> Generator[int, None, str]:
    """Yield the tokens after a question about images, which is read by calling `prompt`, or after a prompt's tokens.

    `positions` says where the tokens of a prompt with images are, for a decoder to which that matters. For the other
    options and what is returned see `tokens.generate`.
    """
    if prompt is None:
        raise MisuseError("there is no prompt: give --prompt, with an --image or without")
    timings = Timings() if timings is None else timings
    start = time.perf_counter()
    asked = prompt() if callable(prompt) else ImagePrompt(prompt, NO_IMAGE, {})
    decoder, prefill = _embedded(modules, wiring, asked, positions)
    timings.encoder_seconds += time.perf_counter() - start if asked.arrays else 0.0
    return (yield from generate(decoder, asked.ids, prefill=prefill, timings=timings, **options))


def _embedded(
    modules: Mapping[str, ModelRunner],
    wiring: VisionWiring,
    prompt: ImagePrompt,
    positions: Callable[[ImagePrompt], Positions],
) -> tuple[EmbeddedModel, EmbeddedModel | None]:
    """The decoder's uses, fed with tokens: see DecoderUses."""
    decoder, table = modules[wiring.decoder].manifest, modules[wiring.embedding].manifest
    embeds, ids = _embeds_of(decoder), _ids_of(table)
    assert embeds is not None and ids is not None
    output = next(made for made in table.outputs if fits(embeds, made))
    slot = next((tensor for tensor in table.inputs if tensor.name in find_wanted(table)), None)
    features = _see(modules[wiring.vision], prompt, embeds)
    places = _places(decoder, prompt, positions)
    embedding = Embedding(modules[wiring.embedding], ids, output.name, slot, prompt.image_token, features)
    return wiring.opened(lambda name: EmbeddedModel(modules[name], embeds.name, embedding, *places))


def _see(vision: ModelRunner, prompt: ImagePrompt, embeds: Tensor) -> Array:
    """The features of the images, one row for each token that stands for one."""
    manifest, width = vision.manifest, (embeds.shape or [None])[-1]
    if not prompt.arrays:
        return np.empty((0, width if isinstance(width, int) else 0), number_type(embeds.dtype))
    if missing := [tensor.name for tensor in manifest.inputs if tensor.name not in prompt.arrays]:
        raise MisuseError(
            f"the vision model ({manifest.source.name}) takes '{missing[0]}', and the processor makes "
            f"{', '.join(prompt.arrays)}"
        )
    outputs = vision.run({t.name: prompt.arrays[t.name].astype(number_type(t.dtype)) for t in manifest.inputs})
    wide = [array for array in outputs.values() if not isinstance(width, int) or array.shape[-1] == width]
    if not wide:
        raise MisuseError(f"no output of the vision model ({manifest.source.name}) is {width} wide, as embeddings are")
    features = wide[0].reshape(-1, wide[0].shape[-1])
    check_rows(features, list(prompt.ids).count(prompt.image_token))
    return features


def _places(
    decoder: Manifest, prompt: ImagePrompt, positions: Callable[[ImagePrompt], Positions]
) -> tuple[str, Positions] | tuple[()]:
    """The decoder's input of several numbers for a token, and what they are; nothing in text, or without
    such an input.

    Raises MisuseError for another number of them than transformers' model has.
    """
    for tensor in of_role(decoder.inputs, "positions") if prompt.arrays else ():
        if len(tensor.shape or ()) != 3:
            continue
        rows = (tensor.shape or [])[0]
        made = positions(prompt)
        if made.prompt.shape != ((count := rows if isinstance(rows, int) else len(made.prompt)), len(prompt.ids)):
            raise MisuseError(
                f"{decoder.source.name} takes {count} positions for each of {len(prompt.ids)} tokens "
                f"('{tensor.name}'), and transformers' model gives {list(made.prompt.shape)}: they are not of one model"
            )
        return tensor.name, made
    return ()
