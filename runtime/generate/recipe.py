"""Text from the modules of a package, by the configs that travel with them: first tokens, stop tokens, rules."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import read_config
from splitc.runtime.generate.capacity import USUAL
from splitc.runtime.generate.conversation import ModelRunner
from splitc.runtime.generate.encoder_decoder import EncoderDecoder, describe_encoder, find_features
from splitc.runtime.generate.image_prompt import read_images, read_positions
from splitc.runtime.generate.package_configs import find_beside, generation_config, understood
from splitc.runtime.generate.sampling import Sampling
from splitc.runtime.generate.sound import LogMel, read_log_mel, read_sound
from splitc.runtime.generate.token_rules import find_prompt, read_rules
from splitc.runtime.generate.tokens import LIMIT, Timings
from splitc.runtime.generate.vision_language import find_vision_wiring, generate_about_images
from splitc.runtime.units import whole_number

PREPROCESSOR = "preprocessor_config.json"
# Where configs say how many tokens a decoder has positions for.
POSITIONS = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings", "n_positions")
# What the encoder made, and the decoder's prompt if it is the caller's own.
Encoded = tuple[Mapping[str, Array], Sequence[int]]


def generate_text(
    modules: Mapping[str, ModelRunner],
    package: Path,
    prompt: Sequence[int] | None = None,
    *,
    images: Sequence[str | Path] = (),
    question: str = "",
    **options: Any,
) -> Generator[int, None, str]:
    """Yield the tokens that the modules of a package make of a prompt, of a sound, or of a `question` about `images`.

    For what the modules can be, and the options, see `generate_from_encoder` and `generate_about_images`.
    """
    wiring = find_vision_wiring({name: session.manifest for name, session in modules.items()})
    if wiring is None and not images:
        return generate_from_encoder(modules, package, prompt, **options)
    if wiring is None:
        raise MisuseError(
            f"can't read images with the modules {', '.join(modules)}: splitc knows a vision model, one that makes "
            "embeddings of tokens, and a decoder that reads embeddings"
        )
    if any(options.pop(name, None) is not None for name in ("sound", "language", "task")):
        raise MisuseError("these modules read a text and images (--prompt, --image), and no sound")
    options.pop("warn", None)  # there is nothing to warn of
    options["other_stop_tokens"] = _read_stops(generation_config(package, wiring.decoder)) or options.get(
        "other_stop_tokens", ()
    )
    read = partial(read_images, package, wiring.vision, question, [Path(image) for image in images])
    places = partial(read_positions, package, wiring.decoder)
    return generate_about_images(modules, wiring, read if images else prompt, places, **options)


def generate_from_encoder(
    modules: Mapping[str, ModelRunner],
    package: Path,
    prompt: Sequence[int] | None = None,
    *,
    sound: str | Path | None = None,
    language: str | None = None,
    task: str | None = None,
    max_new_tokens: int | None = None,
    sampling: Sampling = Sampling(),
    stop_tokens: Collection[int] = (),
    other_stop_tokens: Collection[int] = (),
    timings: Timings | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> Generator[int, None, str]:
    """Yield the tokens that modules make of a prompt's tokens, or of the WAV file `sound`. Returns STOP or LIMIT.

    The modules are an encoder and its decoder, or a decoder with caches and one without. What the arguments leave open
    is taken from the configs in the folder `package`: the decoder's first tokens, those that end a text (if the configs
    have none: `other_stop_tokens`), the most tokens of a text, and those that are permitted. `language` and `task` are
    for speech, as in the generation config: "en", "transcribe". A sound that is longer than the encoder takes at once
    is cut into windows, each a text of its own. `timings` is filled meanwhile, and `warn` gets what a user should know.

    With the first token it raises MisuseError for other modules, for an input that the encoder does not take, and for a
    damaged config.
    """
    model = EncoderDecoder(modules)
    decoder = model.wiring.decoder
    config = generation_config(package, decoder)
    with understood(f"the generation config of {decoder}"):
        beams = int(config.get("num_beams") or 1)
    if beams > 1:
        warn(f"the generation config asks for {beams} beams; splitc takes the likeliest token each time")
    others = _read_stops(config) or other_stop_tokens
    timings = Timings() if timings is None else timings
    if sound is None:
        inputs = _encode_prompt(model, prompt, timings)
    else:
        inputs = _encode_sound(model, package, Path(sound), timings, warn)
    ended = LIMIT
    for encoded, own in inputs:
        with understood(f"the generation config of {decoder}"):
            first = own or find_prompt(config, language, task, partial(model.logits_after, encoded))
            # A length that configs state is that of an answer, which a user's own prompt may exceed.
            stated = {key: value for key, value in config.items() if key != "max_length"} if own else config
            most = _most_tokens(stated, len(first), max_new_tokens)
            rules = read_rules(config, len(first), most, list(stop_tokens or others))
        text = Timings()
        ended = yield from model.generate(
            encoded,
            first,
            max_new_tokens=most - len(first),
            sampling=sampling,
            stop_tokens=stop_tokens,
            other_stop_tokens=others,
            timings=text,
            rules=rules,
        )
        timings.add(text)
    return ended


def _encode_prompt(model: EncoderDecoder, prompt: Sequence[int] | None, timings: Timings) -> Iterator[Encoded]:
    """The encoder's outputs for a prompt. Without an encoder, the prompt is the decoder's own."""
    if prompt is None:
        if model.encoder is None:
            raise MisuseError("there is no prompt: give --prompt with a --tokenizer, or --prompt-ids 1,2,3")
        raise MisuseError(f"generate needs what the model is to read: {describe_encoder(model.encoder)}")
    start = time.perf_counter()
    encoded = model.encode_tokens(prompt)
    timings.encoder_seconds += time.perf_counter() - start
    yield encoded, () if model.encoder else prompt


def _encode_sound(
    model: EncoderDecoder, package: Path, sound: Path, timings: Timings, warn: Callable[[str], None]
) -> Iterator[Encoded]:
    """The encoder's outputs for each window of a sound."""
    features = _find_preprocessor(model, package)
    samples = read_sound(sound, features.rate)
    if len(samples) > features.samples:
        seconds = features.samples // features.rate
        warn(f"the model hears {seconds} s at a time: words at the borders of these windows may be lost")
    for window in features.windows(samples):
        start = time.perf_counter()
        encoded = model.encode_features(window)
        timings.encoder_seconds += time.perf_counter() - start
        yield encoded, ()


def _find_preprocessor(model: EncoderDecoder, package: Path) -> LogMel:
    """The preprocessor for sounds. Raises MisuseError for an encoder of other inputs, and without a config."""
    tensor, module = find_features(model.encoder), str(model.wiring.encoder)
    file = find_beside(package, module, PREPROCESSOR)
    if file is None:
        raise MisuseError(
            f"the package has no {PREPROCESSOR}, which says how the model's features are made of a sound: copy it from "
            "the model that was exported into the exported folder, and compile that again"
        )
    return read_log_mel(read_config(file), file, tensor.shape or [])


def _read_stops(config: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text."""
    stops = config.get("eos_token_id")
    return [token for token in (stops if isinstance(stops, list) else [stops]) if isinstance(token, int)]


def _most_tokens(config: Mapping[str, Any], prompt: int, asked: int | None) -> int:
    """The most tokens with the prompt: as asked for or as the config says, and no more than the decoder's positions.

    Raises MisuseError if more were asked for than there are positions.
    """
    positions = next((config[key] for key in POSITIONS if isinstance(config.get(key), int)), None)
    if asked is not None:
        asked = whole_number("--max-new-tokens", asked, 0, of=" of tokens")
        if positions is not None and prompt + asked - 1 > positions:
            raise MisuseError(
                f"the decoder has {positions} positions, and {prompt} tokens of its prompt and {asked} new ones need "
                f"{prompt + asked - 1}: ask for {positions - prompt + 1} at most"
            )
        return prompt + asked
    new, whole = config.get("max_new_tokens"), config.get("max_length")
    most = prompt + new if isinstance(new, int) else whole if isinstance(whole, int) else prompt + USUAL
    return max(prompt + 1, most if positions is None else min(most, positions + 1))
