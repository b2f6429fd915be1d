"""Parse and format bytes, seconds, shapes and values by name for users. What is shown can't control a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

from splitc.runtime.errors import MisuseError

_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
# The most bytes that anything may have, and the most characters of a user's text in a message.
MOST_BYTES, LONGEST = 1 << 60, 60
# A smaller number without a unit is more likely to lack one. A choice: no device has so little.
LEAST_BYTES = 1 << 10


def parse_bytes(text: str) -> int:
    """Bytes from `20GiB`, `500MB`, `1.5g` or a number. Units with an i are powers of 1024.

    Raises MisuseError for any other text, and for a small number without a unit.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if not match or match[2] not in _SCALES:
        raise MisuseError(
            f"can't read '{shortened(text)}' as an amount of memory: write 20GiB, 500MB or a number of bytes"
        )
    size = float(match[1]) * _SCALES[match[2]]
    if not match[2] and not text.strip().lower().endswith("b") and 0 < size < LEAST_BYTES:
        raise MisuseError(f"'{text.strip()}' is a number of bytes: is {text.strip()}GiB meant, or {text.strip()}B?")
    if size > MOST_BYTES:
        raise MisuseError(f"'{shortened(text)}' is more memory than there can be")
    return int(size)


def parse_bandwidth(text: str) -> float:
    """Bytes per second from `25GB/s`, or from `200Gbit/s`.

    Raises MisuseError for any other text. `Gb/s` is one: it may be meant for bits or for bytes.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]i?)(B|bit)/s", text.strip())
    if not match or not float(match[1]):
        raise MisuseError(f"can't read '{shortened(text)}' as a bandwidth: write 25GB/s (bytes) or 200Gbit/s (bits)")
    return float(match[1]) * _SCALES[match[2].lower()] / (8 if match[3] == "bit" else 1)


def parse_seconds(text: str) -> float:
    """Seconds from `5us`, `5µs`, `0.1ms`, `20ns` or `1s`. Raises MisuseError for any other text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(s|ms|us|µs|ns)", text.strip())
    if not match:
        raise MisuseError(f"can't read '{shortened(text)}' as a time: write 5us, 0.1ms or 1s")
    return float(match[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}[match[2]]


def plural(count: int, word: str) -> str:
    """The count with its word: `1 rank`, `2 ranks`."""
    return f"{count:,} {word}{'s' * (count != 1)}"


def named_values(
    option: str, texts: Sequence[str], form: str, divide: Callable[[str, str], tuple[str, str, str]] = str.rpartition
) -> dict[str, str]:
    """An option's values by name, as in `NAME=VALUE`. The last `=` divides: names in models may contain some.

    Raises MisuseError, which says the `form`, for other text, and for a name that comes twice.
    """
    values: dict[str, str] = {}
    for text in texts:
        name, _, value = divide(text, "=")
        if not name or not value:
            raise MisuseError(f"can't read {option} {shortened(text)}: write {form}")
        if name in values:
            raise MisuseError(
                f"{option} gives '{name}' twice, the second time by {shortened(text)}: leave out one of them"
            )
        values[name] = value
    return values


def whole_number(option: str, value: Any, least: int, most: int | None = None, of: str = "") -> int:
    """The value of an option or an argument, which may be one of numpy's.

    Raises MisuseError unless it is a whole number from `least` on, to `most` if that is given.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= (most or int(value)):
        ends = "on" if most is None else f"to {most:,}"
        raise MisuseError(f"{option} {shortened(repr(value))}: it is a number{of} from {least} {ends}")
    return int(value)


def shortened(text: str) -> str:
    """A user's text for a message: only its beginning if it is long."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def shortened_middle(text: str, most: int) -> str:
    """A name of at most `most` characters: its beginning and its end, which tell names of one model apart."""
    if len(text) <= most:
        return text
    last = (most - 1) * 2 // 3
    return f"{text[: most - 1 - last]}…{text[len(text) - last :]}"


def block_range(blocks: Sequence[str]) -> str:
    """Blocks in short: `layers.0..layers.5 (6)`."""
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]}..{blocks[-1]} ({len(blocks)})"


def first_few(names: Sequence[str]) -> str:
    """Names for a message, the first three if there are more than four: `a, b, c and 9 more`."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def format_bytes(count: int | None) -> str:
    """Bytes with three digits: `1.50 GiB`, `167 MiB`. None is no limit."""
    if count is None:
        return "no limit"
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        # 999.5 and more would be printed as 1000.
        if abs(size) < 999.5 or unit == "TiB":
            break
        size /= 1024
    digits = 0 if unit == "B" or abs(size) >= 99.95 else 1 if abs(size) >= 9.995 else 2
    return f"{size:.{digits}f} {unit}"


def format_seconds(seconds: float) -> str:
    """A time with three digits: `12.3 ms`."""
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def format_shape(shape: Sequence[int | str | None] | None) -> str:
    """A shape as `2 x sequence x 64`, or `scalar` if it has no dimension. None is any shape."""
    if shape is None:
        return "any shape"
    return " x ".join("?" if size is None else str(size) for size in shape) or "scalar"


# What is shown for control characters, except newlines and tabs, and for those that change the direction of text.
VISIBLE = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    127: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD),
}


def visible(text: str) -> str:
    """The text, with control characters replaced by symbols."""
    return text.translate(VISIBLE)
