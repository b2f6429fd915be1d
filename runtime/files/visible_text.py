"""Text without characters that control a terminal or a page: names in models and files may have any."""

from __future__ import annotations

# What is shown for control characters, except newlines and tabs, and for those that change the direction of text.
VISIBLE = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    127: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD),
}


def visible(text: str) -> str:
    """The text, with control characters replaced by symbols."""
    return text.translate(VISIBLE)
