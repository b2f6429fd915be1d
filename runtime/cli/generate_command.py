"""The command generate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import typer

from splitc.runtime.cli.options import with_options
from splitc.runtime.cli.run_options import Load, loading
from splitc.runtime.cli.shared_options import JSON, PACKAGE
from splitc.runtime.cli.terminal import err, print_json, print_output
from splitc.runtime.explained import explained
from splitc.runtime.generate.room import USUAL, count_tokens
from splitc.runtime.generate.sampling import Sampling
from splitc.runtime.generate.signature import find_signature
from splitc.runtime.generate.text import Text, read_prompt
from splitc.runtime.generate.tokens import PROMPT_CHUNK, Timings
from splitc.runtime.units import format_seconds


@with_options("load", loading)
def generate_command(
    load: Load,
    package: Path = PACKAGE,
    prompt: str | None = typer.Option(None, "--prompt", "-p", help="The text to continue."),
    prompt_ids: str | None = typer.Option(None, "--prompt-ids", help="The prompt as token ids: 1,2,3."),
    tokenizer: Path | None = typer.Option(
        None, "--tokenizer", help="tokenizer.json, or its folder. Without one, token ids are printed."
    ),
    max_new_tokens: int | None = typer.Option(
        None,
        "--max-new-tokens",
        "-n",
        min=1,
        help=f"Tokens to generate. Default: {USUAL}, or fewer if the model has no room for more.",
    ),
    temperature: float = typer.Option(0.0, "--temperature", help="0: the likeliest token. Above 0: random ones."),
    top_k: int = typer.Option(0, "--top-k", help="Choose among this many of the likeliest tokens. 0: all."),
    top_p: float = typer.Option(1.0, "--top-p", help="Choose among the fewest tokens with this total probability."),
    seed: int = typer.Option(0, "--seed", help="Seed of random tokens."),
    stop: list[int] = typer.Option([], "--stop", help="A token id to stop at, repeatable. Default: the tokenizer's."),
    prefill: Path | None = typer.Option(
        None, "--prefill", help="A package for the prompt, if exported separately: a model that takes no caches."
    ),
    prompt_chunk: int = typer.Option(PROMPT_CHUNK, "--prompt-chunk", min=1, help="Tokens of the prompt per run."),
    as_json: bool = JSON,
) -> None:
    """Generate text, or tokens, with a package of a language model."""
    text = Text.load(tokenizer) if tokenizer else None
    ids = read_prompt(text, prompt, prompt_ids)
    sampling = Sampling(temperature, top_k, top_p, seed)
    stops = stop or (text.find_endings() if text else [])
    made = Generated(text)
    with ExitStack() as stack:
        session = stack.enter_context(load(package))
        first = stack.enter_context(load(prefill, devices=None, module=None)) if prefill else None
        count = count_tokens(session.manifest, find_signature(session.manifest), len(ids), max_new_tokens)
        stream = session.generate(
            ids,
            max_new_tokens=count,
            sampling=sampling,
            stop_tokens=stops,
            prompt_chunk=prompt_chunk,
            prefill=first,
            timings=made.timings,
        )
        with made.printed(as_json):
            for token in stream:
                made.tokens.append(token)
                if not as_json:
                    print_output(text.step(token) if text else f"{token} ")
            whole = max_new_tokens or USUAL
            made.ended = "stop" if len(made.tokens) < count else "room" if count < whole else "limit"
    if not as_json:
        if made.ended == "room":
            err.print(f"the model has room for no more than {len(ids) + count - 1} tokens", style="dim")
        err.print(f"prompt     {_rate(made.timings.prompt_tokens, made.timings.prompt_seconds)}", style="dim")
        err.print(f"generation {_rate(made.timings.tokens, made.timings.seconds)}", style="dim")


@dataclass
class Generated:
    """What was generated so far. `ended` says why no more: at a stop token, the limit, the room's end, or an error."""

    text: Text | None
    tokens: list[int] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    ended: str = "error"

    @contextmanager
    def printed(self, as_json: bool) -> Iterator[None]:
        """Print it at the end. If the block fails or is interrupted, nothing that was made is lost."""
        try:
            yield
        except BrokenPipeError:
            raise
        except BaseException as error:
            if self.tokens:
                self._print(as_json, "terminated" if isinstance(error, SystemExit) else str(explained(error) or error))
            raise
        self._print(as_json)

    def _print(self, as_json: bool, error: str | None = None) -> None:
        if not as_json:
            print_output("\n")
            return
        result = {"tokens": self.tokens, "text": None, "ended": self.ended, "timings": self.timings}
        try:
            result["text"] = self.text.decode(self.tokens) if self.text else None
        finally:
            print_json(result if error is None else {**result, "error": error})


def _rate(tokens: int, seconds: float) -> str:
    rate = f", {tokens / seconds:.1f} tokens/s" if seconds else ""
    return f"{tokens:5} tokens in {format_seconds(seconds)}{rate}"
