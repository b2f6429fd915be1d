"""The command generate, and its output: tokens or text as they are generated, or JSON at the end."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from splitc.runtime.cli import completion
from splitc.runtime.cli.bars import shown_bars
from splitc.runtime.cli.options import with_options
from splitc.runtime.cli.run_options import Load, loading
from splitc.runtime.cli.shared_options import JSON, PACKAGE, package_there, there
from splitc.runtime.cli.terminal import err, muted_stderr, print_json, print_output, print_warning
from splitc.runtime.errors import MisuseError
from splitc.runtime.files.explained import explained
from splitc.runtime.generate.capacity import USUAL
from splitc.runtime.generate.package_configs import find_tokenizer
from splitc.runtime.generate.sampling import Sampling
from splitc.runtime.generate.text import Text, read_prompt
from splitc.runtime.generate.tokens import PROMPT_CHUNK, ROOM, Timings
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.pipeline_file import find_module, read_pipeline
from splitc.runtime.session.pipeline import Pipeline
from splitc.runtime.units import format_seconds


@dataclass(frozen=True)
class Prompt:
    """Options of the command: the text, tokens, images or sound to continue, translate or transcribe."""

    prompt: str | None = typer.Option(None, "--prompt", "-p", help="The text to continue, or to translate.")
    prompt_ids: str | None = typer.Option(None, "--prompt-ids", help="The prompt as token ids: 1,2,3.")
    image: list[Path] = typer.Option([], "--image", help="An image that the prompt is about, repeatable.")
    audio: Path | None = typer.Option(
        None, "--audio", help="A WAV file to transcribe or translate.", callback=there("file")
    )
    language: str | None = typer.Option(
        None,
        "--language",
        help="The language that is spoken: en. Default: the model says.",
        autocompletion=completion.languages,
    )
    task: str | None = typer.Option(
        None,
        "--task",
        help="What to do with speech: transcribe or translate.",
        autocompletion=completion.one_of(("transcribe", "translate")),
    )


def _sampling(
    temperature: float = typer.Option(0.0, "--temperature", help="0: the likeliest token. Above 0: sample."),
    top_k: int = typer.Option(0, "--top-k", help="Choose among this many of the likeliest tokens. 0: all."),
    top_p: float = typer.Option(1.0, "--top-p", help="Choose among the fewest tokens with this total probability."),
    seed: int = typer.Option(0, "--seed", help="Seed of sampling."),
) -> Sampling:
    return Sampling(temperature, top_k, top_p, seed)


@with_options("load", loading)
@with_options("given", Prompt)
@with_options("sampling", _sampling)
def generate_command(
    load: Load,
    given: Prompt,
    sampling: Sampling,
    package: Path = PACKAGE,
    tokenizer: Path | None = typer.Option(
        None,
        "--tokenizer",
        help="tokenizer.json, or its folder. Default: the package's; without, ids are printed.",
        callback=there("tokenizer"),
    ),
    max_new_tokens: int | None = typer.Option(
        None,
        "--max-new-tokens",
        "-n",
        min=1,
        help=f"Tokens to generate. Default: {USUAL}, or what an encoder-decoder's configs say; fewer without room.",
    ),
    stop: list[int] = typer.Option([], "--stop", help="A token id to stop at, repeatable. Default: the tokenizer's."),
    prefill: Path | None = typer.Option(
        None,
        "--prefill",
        help="A package for the prompt, if exported separately: usually of a model that takes no caches.",
        autocompletion=completion.packages,
        callback=package_there,
    ),
    prompt_chunk: int = typer.Option(PROMPT_CHUNK, "--prompt-chunk", min=1, help="Tokens of the prompt per run."),
    as_json: bool = JSON,
) -> None:
    """Generate text or tokens with a language model, or with an encoder and its decoder."""
    module, devices = load.keywords["module"], load.keywords["devices"]
    pipeline = read_pipeline(package)
    if module is not None:
        find_module(package, module)  # raises the error if there is none
    needs_text = given.prompt is not None or given.audio is not None
    file = tokenizer or (find_tokenizer(package, module) if needs_text else None)
    with muted_stderr():
        result = Generated(Text.load(file) if file else None, as_json)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "timings": result.timings}
    endings = result.text.find_endings() if result.text and not stop else []
    options |= {"stop_tokens": stop, "other_stop_tokens": endings}
    if pipeline is not None and len(pipeline.modules) > 1 and module is None:
        if devices or prefill:
            raise MisuseError(f"{'--device' if devices else '--prefill'} is for one model: name it by --module")
        _generate_with_modules(load, package, given, result, options)
    else:
        options["prompt_chunk"] = prompt_chunk
        _generate_with_one(load, package, prefill, given, result, options)
    result.print_rates()


def _generate_with_one(
    load: Load, package: Path, prefill: Path | None, given: Prompt, result: Generated, options: Mapping[str, Any]
) -> None:
    """Generate with the package of one model. `prefill`, if given, is a package for the prompt."""
    if given.audio is not None or given.image:
        read_manifest(find_module(package, load.keywords["module"]))  # raises the error if there is no package
        option, parts = ("--image", "a vision model") if given.image else ("--audio", "an encoder")
        raise MisuseError(f"{option} is for a package with {parts} and a decoder, and this is one model")
    ids = result.read(given)
    with ExitStack() as stack:
        with shown_bars():
            session = stack.enter_context(load(package))
            first = stack.enter_context(load(prefill, devices=None, module=None)) if prefill else None
        result.take(session.generate(ids, prefill=first, **options))
    if result.ended == ROOM and not result.as_json:
        err.print(f"the model has room for no more than {len(ids) + len(result.tokens) - 1} tokens", style="dim")


def _generate_with_modules(
    load: Load, package: Path, given: Prompt, result: Generated, options: Mapping[str, Any]
) -> None:
    """Generate with all modules of a package together."""
    is_given = given.prompt is not None or given.prompt_ids is not None
    ids = result.read(given) if is_given and not given.image else None
    speech = {"sound": given.audio, "language": given.language, "task": given.task}
    seen = {"images": given.image, "question": given.prompt or ""}
    opening = {key: value for key, value in load.keywords.items() if key not in ("module", "devices")}
    with ExitStack() as stack:
        with shown_bars():
            modules = stack.enter_context(Pipeline(package, **opening))
        result.take(modules.generate(ids, warn=print_warning, **speech, **seen, **options))


@dataclass
class Generated:
    """The tokens generated so far. `ended` says why it stopped: a stop token, the limit, no more room, or an error."""

    text: Text | None
    as_json: bool
    tokens: list[int] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    ended: str = "error"

    def read(self, given: Prompt) -> list[int]:
        """The prompt's tokens."""
        with muted_stderr():
            return read_prompt(self.text, given.prompt, given.prompt_ids)

    def take(self, stream: Generator[int, None, str]) -> None:
        """Take all tokens of a stream and print them; JSON at the end.

        If the stream fails or is interrupted, the tokens generated before are still printed.
        """
        try:
            for token in self._until_ended(stream):
                self.tokens.append(token)
                if not self.as_json:
                    print_output(self.text.step(token) if self.text else f"{token} ")
        except BrokenPipeError:
            raise
        except BaseException as error:
            if self.tokens:
                self._print("terminated" if isinstance(error, SystemExit) else str(explained(error) or error))
            raise
        self._print()

    def _until_ended(self, stream: Generator[int, None, str]) -> Iterator[int]:
        self.ended = yield from stream

    def _print(self, error: str | None = None) -> None:
        if not self.as_json:
            print_output("\n")
            return
        result = {"tokens": self.tokens, "text": None, "ended": self.ended, "timings": self.timings}
        try:
            result["text"] = self.text.decode(self.tokens) if self.text else None
        finally:
            print_json(result if error is None else {**result, "error": error})

    def print_rates(self) -> None:
        """Print times and rates to standard error, beside text."""
        if self.as_json:
            return
        timings = self.timings
        if timings.encoder_seconds:
            err.print(f"encoder    {format_seconds(timings.encoder_seconds)}", style="dim")
        err.print(f"prompt     {_rate(timings.prompt_tokens, timings.prompt_seconds)}", style="dim")
        err.print(f"generation {_rate(timings.tokens, timings.seconds)}", style="dim")


def _rate(tokens: int, seconds: float) -> str:
    rate = f", {tokens / seconds:.1f} tokens/s" if seconds else ""
    return f"{tokens:5} {'token' if tokens == 1 else 'tokens'} in {format_seconds(seconds)}{rate}"
