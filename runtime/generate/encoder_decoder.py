"""Text from an encoder and a decoder that are modules of one package."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays.array import Array, number_type
from splitc.runtime.errors import MisuseError
from splitc.runtime.generate.conversation import Conversation, ModelRunner, StateHolder
from splitc.runtime.generate.feeder import Feeder, check_tokens
from splitc.runtime.generate.signature import find_signature, find_token_inputs
from splitc.runtime.generate.tokens import generate
from splitc.runtime.generate.wiring import STATES_AXES, Wiring, find_links, find_masks, find_wanted, find_wiring
from splitc.runtime.package.manifest import Manifest, Tensor, of_role


class BoundModel:
    """A model without the inputs `feeds`, which are added to each request, and held on the ranks by a sequence.

    For the methods see ModelRunner.
    """

    def __init__(self, session: ModelRunner, feeds: Mapping[str, npt.ArrayLike]) -> None:
        self._session = session
        self._feeds = feeds
        open_inputs = [tensor for tensor in session.manifest.inputs if tensor.name not in feeds]
        self.manifest = msgspec.structs.replace(session.manifest, inputs=open_inputs)

    @property
    def replays(self) -> bool:
        return self._session.replays

    def run(self, feeds: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        return self._session.run({**feeds, **self._feeds})

    def start(self, capacity: int | None = None) -> StateHolder:
        """A sequence, with the bound inputs held."""
        sequence = self._session.start(capacity)
        sequence.hold(self._feeds)
        return sequence


class EncoderDecoder:
    """The modules of a package that generate together, by name.

        encoded = model.encode_tokens([13, 7, 1])
        tokens = list(model.generate(encoded, [0], max_new_tokens=20, stop_tokens=[1]))

    `sessions` may be a Pipeline. What the decoder reads of the encoder is computed once for a text, and stays on the
    ranks. The caller gives the decoder's prompt and the tokens to stop at: `Pipeline.generate` takes them from configs.
    Raises MisuseError for modules that do not generate together.
    """

    def __init__(self, sessions: Mapping[str, ModelRunner]) -> None:
        if not isinstance(sessions, Mapping):
            raise MisuseError(f"an EncoderDecoder takes a Pipeline, as in Pipeline('package'), not {sessions!r}")
        self.wiring: Wiring = find_wiring({name: session.manifest for name, session in sessions.items()})
        self._sessions = sessions

    @property
    def decoder(self) -> Manifest:
        """The manifest of the decoder that reads the newest token."""
        return self._sessions[self.wiring.decoder].manifest

    @property
    def encoder(self) -> Manifest | None:
        """The manifest of the encoder; None if there is none."""
        return None if self.wiring.encoder is None else self._sessions[self.wiring.encoder].manifest

    def encode(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run the encoder on its feeds. The result has its outputs, and its mask, as the decoder reads these positions.

        Without an encoder it is empty. Raises as `Session.run` does.
        """
        if self.encoder is None:
            return {}
        masks = {
            mask.name: np.asarray(feeds[mask.name])
            for mask in of_role(self.encoder.inputs, "mask")
            if mask.name in feeds
        }
        return {**masks, **self._sessions[str(self.wiring.encoder)].run(feeds)}

    def encode_tokens(self, tokens: Sequence[int]) -> Mapping[str, Array]:
        """Run the encoder on a text's token ids. Raises MisuseError for tokens that it does not take."""
        if self.encoder is None:
            return {}
        return self.encode(_feeds_of_tokens(self.encoder, tokens))

    def encode_features(self, features: Array) -> Mapping[str, Array]:
        """Run the encoder on the features of a sound, [1, bins, frames]. Raises MisuseError for other encoders."""
        tensor = find_features(self.encoder)
        return self.encode({tensor.name: features.astype(number_type(tensor.dtype))})

    def generate(
        self, encoded: Mapping[str, Array], prompt: Sequence[int], **options: Any
    ) -> Generator[int, None, str]:
        """Yield the ids of the tokens that follow the decoder's prompt. `encoded` is what an `encode` method returned.

        For the options, what is returned, and errors, see `generate.tokens.generate`.
        """
        decoder, prefill = self._decoders(encoded)
        return generate(decoder, prompt, prefill=prefill, **options)

    def logits_after(self, encoded: Mapping[str, Array], tokens: Sequence[int]) -> Array:
        """The logits of the decoder's next token after these, [vocabulary]."""
        decoder, prefill = self._decoders(encoded)
        signature = find_signature(decoder.manifest, None if prefill is None else prefill.manifest)
        conversation = Conversation(decoder, signature, len(tokens), None)
        try:
            return conversation.read_prompt(tokens, len(tokens), prefill)
        finally:
            conversation.close()

    def _decoders(self, encoded: Mapping[str, Array]) -> tuple[BoundModel, BoundModel | None]:
        """The decoder's uses, bound to their feeds from the encoder: see DecoderUses."""
        return self.wiring.opened(lambda name: BoundModel(self._sessions[name], self._cross_feeds(name, encoded)))

    def _cross_feeds(self, decoder: str, encoded: Mapping[str, Array]) -> dict[str, Array]:
        """A decoder's feeds from its encoder, with masks. Without a mask of the encoder's, nothing is padding."""
        if self.encoder is None or not encoded:
            return {}
        manifest = self._sessions[decoder].manifest
        links = find_links(manifest, self.encoder)
        if missing := [output for output in links.values() if output not in encoded]:
            raise MisuseError(f"the encoder's output '{missing[0]}' is missing: give generate() what encode() returned")
        feeds = {name: encoded[output] for name, output in links.items()}
        own = of_role(self.encoder.inputs, "mask")
        fixed = [size for mask in own for size in (mask.shape or ())[1:] if isinstance(size, int)]
        masks = find_masks(manifest, find_wanted(manifest), fixed)
        return {**feeds, **{mask.name: _cross_mask(mask, own, encoded) for mask in masks}}


def _cross_mask(mask: Tensor, own: Sequence[Tensor], encoded: Mapping[str, Array]) -> Array:
    """A decoder's mask of its encoder's positions: the encoder's `own`, if it is one of the same positions.

    They are the same if both models call their number by one name, or if there are as many as states.
    """
    dtype = number_type(mask.dtype)
    length = next((array.shape[1] for array in encoded.values() if array.ndim == STATES_AXES), 0)
    given = [(tensor.shape, encoded[tensor.name]) for tensor in own if tensor.name in encoded]
    same = [array for shape, array in given if shape == mask.shape or array.shape[1:] == (length,)]
    if not same and any(not array.all() for _, array in given):
        raise MisuseError(
            f"the encoder's mask hides some positions, and the decoder's mask '{mask.name}' has another length: give "
            "the encoder an input without padding"
        )
    return same[0].astype(dtype) if same else np.ones((1, length), dtype)


def reads_sound(encoder: Manifest | None) -> bool:
    """Whether an encoder takes a sound's features: numbers, [batch, bins, frames]."""
    inputs = [] if encoder is None else encoder.inputs
    return len(inputs) == 1 and "float" in inputs[0].dtype and len(inputs[0].shape or ()) == 3


def reads_text(encoder: Manifest) -> bool:
    """Whether an encoder takes tokens."""
    return bool(of_role(encoder.inputs, "indices"))


def describe_encoder(encoder: Manifest) -> str:
    """What an encoder takes, for messages, and what to do."""
    kinds = {2: "the samples of a sound", 3: "the features of a sound", 4: "an image"}
    arrays = [tensor for tensor in encoder.inputs if "float" in tensor.dtype and len(tensor.shape or ()) in kinds]
    named = ", ".join(tensor.name for tensor in encoder.inputs)
    if reads_text(encoder):
        return f"its encoder takes a text ({named}); give it as --prompt"
    if reads_sound(encoder):
        return f"its encoder takes the features of a sound ({named}), as of speech; give it as --audio speech.wav"
    what = kinds[len(arrays[0].shape or ())] if len(arrays) == 1 else "something else"
    return (
        f"its encoder takes {what} ({named}), which generate can't read from a file: in Python, "
        "EncoderDecoder.encode takes the arrays, and EncoderDecoder.generate its outputs"
    )


def find_features(encoder: Manifest | None) -> Tensor:
    """The input of an encoder that takes a sound's features. Raises MisuseError for one that takes something else."""
    inputs = [] if encoder is None else encoder.inputs
    if not reads_sound(encoder):
        taken = "it has no encoder; give a --prompt instead" if encoder is None else describe_encoder(encoder)
        raise MisuseError(f"can't read a sound with this package: {taken}")
    return inputs[0]


def _feeds_of_tokens(encoder: Manifest, tokens: Sequence[int]) -> dict[str, Array]:
    """The feeds of an encoder of text. Raises MisuseError if it takes something else, and as `check_tokens`."""
    if not reads_text(encoder):
        raise MisuseError(f"can't read a text with this package: {describe_encoder(encoder)}")
    inputs = find_token_inputs(encoder)
    known = check_tokens(encoder, inputs, tokens)
    return Feeder(encoder, inputs).feeds(known, len(known))
