"""The output of the command generate: tokens or text as they are generated, or JSON at the end."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from splitc.runtime.cli.terminal import err, print_json, print_output
from splitc.runtime.files.explained import explained
from splitc.runtime.generate.text import Text
from splitc.runtime.generate.tokens import Timings
from splitc.runtime.units import format_seconds


@dataclass
class Generated:
    """The tokens generated so far. `ended` says why it stopped: a stop token, the limit, no more room, or an error."""

    text: Text | None
    tokens: list[int] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    ended: str = "error"

    def take(self, stream: Generator[int, None, str], as_json: bool) -> None:
        """Take all tokens of a stream and print them; JSON at the end.

        If the stream fails or is interrupted, the tokens generated before are still printed.
        """
        with self._printed(as_json):
            while True:
                try:
                    token = next(stream)
                except StopIteration as end:
                    self.ended = end.value
                    return
                self.tokens.append(token)
                if not as_json:
                    print_output(self.text.step(token) if self.text else f"{token} ")

    @contextmanager
    def _printed(self, as_json: bool) -> Iterator[None]:
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

    def print_rates(self) -> None:
        """Print times and rates to standard error."""
        timings = self.timings
        if timings.encoder_seconds:
            err.print(f"encoder    {format_seconds(timings.encoder_seconds)}", style="dim")
        err.print(f"prompt     {_rate(timings.prompt_tokens, timings.prompt_seconds)}", style="dim")
        err.print(f"generation {_rate(timings.tokens, timings.seconds)}", style="dim")


def _rate(tokens: int, seconds: float) -> str:
    rate = f", {tokens / seconds:.1f} tokens/s" if seconds else ""
    return f"{tokens:5} tokens in {format_seconds(seconds)}{rate}"
