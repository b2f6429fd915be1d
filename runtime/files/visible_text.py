"""Text without power over a terminal or a page: names in models and files may have any characters."""

from __future__ import annotations

# What is shown of characters that control a terminal, or that turn the order of others around: not newlines and tabs.
VISIBLE = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    127: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD),
}


def visible(text: str) -> str:
    """The text with signs in place of such characters."""
    return text.translate(VISIBLE)
