"""The command generate, for a package whose modules generate together: an encoder and a decoder."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from splitc.runtime.arrays.array import Array
from splitc.runtime.cli.generated import Generated
from splitc.runtime.cli.terminal import muted_stderr, print_warning
from splitc.runtime.errors import MisuseError
from splitc.runtime.generate.decoder_prompt import find_prompt
from splitc.runtime.generate.encoder_decoder import EncoderDecoder, describe_encoder, find_features, reads_text
from splitc.runtime.generate.log_mel import read_log_mel
from splitc.runtime.generate.package_configs import find_beside, generation_config, read_beside, understood
from splitc.runtime.generate.room import USUAL
from splitc.runtime.generate.sampling import Sampling
from splitc.runtime.generate.sound import read_sound
from splitc.runtime.generate.text import read_prompt
from splitc.runtime.generate.token_rules import read_rules
from splitc.runtime.generate.tokens import Timings
from splitc.runtime.session.pipeline import Pipeline

PREPROCESSOR = "preprocessor_config.json"
# Where configs say how many tokens a decoder has positions for.
POSITIONS = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings", "n_positions")


@dataclass(frozen=True)
class Asked:
    """What the user asked for: a text or a sound, and how tokens are chosen."""

    prompt: str | None
    prompt_ids: str | None
    audio: Path | None
    language: str | None
    task: str | None
    most: int | None
    sampling: Sampling
    stops: list[int]


def generate_with_modules(pipeline: Pipeline, asked: Asked, made: Generated, as_json: bool) -> None:
    """Generate from a text or a sound, and put it into `made`. Raises MisuseError for modules that can't do that."""
    model = EncoderDecoder(pipeline)
    decoder = model.wiring.decoders[-1]
    config = generation_config(pipeline.package, decoder)
    if (beams := config.get("num_beams") or 1) > 1:
        print_warning(f"the generation config asks for {beams} beams; splitc goes for the likeliest token each time")
    with made.printed(as_json):
        for encoded, given in _encode(pipeline, model, asked, made):
            with understood(f"the generation config of {decoder}"):
                after = partial(model.logits_after, encoded)
                prompt = given or find_prompt(config, asked.language, asked.task, after)
                # A length that configs state is that of an answer, which a user's own prompt may exceed.
                stated = {key: each for key, each in config.items() if key != "max_length"} if given else config
                most = _most_tokens(stated, len(prompt), asked.most)
                ends = asked.stops or _ends(config) or (made.text.find_endings() if made.text else [])
                rules = read_rules(config, len(prompt), most, ends)
            timings = Timings()
            stream = model.generate(
                encoded,
                prompt,
                max_new_tokens=most - len(prompt),
                sampling=asked.sampling,
                stop_tokens=ends,
                timings=timings,
                rules=rules,
            )
            count = made.take(stream, as_json)
            made.timings.add(timings)
            made.ended = "stop" if count < most - len(prompt) else "limit"


def _encode(
    pipeline: Pipeline, model: EncoderDecoder, asked: Asked, made: Generated
) -> Iterator[tuple[Mapping[str, Array], list[int]]]:
    """What the encoder makes, for each window of a sound, and the decoder's prompt if the user gave it."""
    start = time.perf_counter()
    if asked.audio is None:
        if asked.prompt is None and asked.prompt_ids is None and model.encoder and not reads_text(model.encoder):
            raise MisuseError(f"generate needs what the model is to read: {describe_encoder(model.encoder)}")
        with muted_stderr():
            tokens = read_prompt(made.text, asked.prompt, asked.prompt_ids)
        encoded = model.encode_tokens(tokens)
        made.timings.encoder_seconds = time.perf_counter() - start
        yield encoded, [] if model.encoder else tokens
        return
    tensor, module = find_features(model.encoder), str(model.wiring.encoder)
    file = find_beside(pipeline.package, module, PREPROCESSOR)
    if file is None:
        raise MisuseError(f"the package has no {PREPROCESSOR}, which says how the model's features are made of a sound")
    maker = read_log_mel(read_beside(pipeline.package, module, PREPROCESSOR), file, tensor.shape or [])
    sound = read_sound(asked.audio, maker.rate)
    if len(sound) > maker.samples:
        seconds = maker.samples // maker.rate
        print_warning(f"the model hears {seconds} s at a time, and words at the borders of {seconds} s may be lost")
    for features in maker.windows(sound):
        start = time.perf_counter()
        encoded = model.encode_features(features)
        made.timings.encoder_seconds += time.perf_counter() - start
        yield encoded, []


def _ends(config: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text."""
    ends = config.get("eos_token_id")
    return [each for each in (ends if isinstance(ends, list) else [ends]) if isinstance(each, int)]


def _most_tokens(config: Mapping[str, Any], prompt: int, asked: int | None) -> int:
    """The most tokens with the prompt: as asked for or as the config says, and no more than the decoder's positions.

    Raises MisuseError if more were asked for than there are positions.
    """
    positions = next((config[key] for key in POSITIONS if isinstance(config.get(key), int)), None)
    if asked is not None:
        if positions is not None and prompt + asked - 1 > positions:
            raise MisuseError(
                f"the decoder has {positions} positions, and {prompt} tokens of its prompt and {asked} new ones need "
                f"{prompt + asked - 1}: ask for {positions - prompt + 1} at most"
            )
        return prompt + asked
    new, whole = config.get("max_new_tokens"), config.get("max_length")
    most = prompt + new if isinstance(new, int) else whole if isinstance(whole, int) else prompt + USUAL
    return max(prompt + 1, most if positions is None else min(most, positions + 1))
