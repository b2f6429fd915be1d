"""The command generate."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import typer

from splitc.runtime.cli.options import with_options
from splitc.runtime.cli.run_options import Load, loading
from splitc.runtime.cli.shared_options import JSON, PACKAGE
from splitc.runtime.cli.terminal import err, out, print_json
from splitc.runtime.generate.sampling import Sampling
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
    max_new_tokens: int = typer.Option(100, "--max-new-tokens", "-n", min=1, help="Tokens to generate."),
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
    timings = Timings()
    tokens: list[int] = []
    with ExitStack() as stack:
        session = stack.enter_context(load(package))
        first = stack.enter_context(load(prefill, devices=None)) if prefill else None
        stream = session.generate(
            ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_tokens=stop or (text.find_endings() if text else []),
            prompt_chunk=prompt_chunk,
            prefill=first,
            timings=timings,
        )
        for token in stream:
            tokens.append(token)
            if not as_json:
                out.print(text.step(token) if text else f"{token} ", end="", soft_wrap=True)
    if as_json:
        print_json({"tokens": tokens, "text": text.decode(tokens) if text else None, "timings": timings})
        return
    out.print()
    err.print(f"prompt     {_rate(timings.prompt_tokens, timings.prompt_seconds)}", style="dim")
    err.print(f"generation {_rate(timings.tokens, timings.seconds)}", style="dim")


def _rate(tokens: int, seconds: float) -> str:
    rate = f", {tokens / seconds:.1f} tokens/s" if seconds else ""
    return f"{tokens:5} tokens in {format_seconds(seconds)}{rate}"
