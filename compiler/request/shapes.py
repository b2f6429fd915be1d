"""Shapes and states as users give them. This module imports none of the compiler's libraries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from splitc.runtime.errors import MisuseError
from splitc.runtime.feeds.asked_shapes import LARGEST as LARGEST
from splitc.runtime.feeds.asked_shapes import Shape as Shape
from splitc.runtime.units import format_shape, named_values, whole_number


@dataclass(frozen=True)
class AskedShapes:
    """Inputs' shapes by name, from a user: those to plan for, or a range with its typical shapes.

    If only some of them are given for an input, they replace the missing ones. `stated` are sizes from a config beside
    the model, None for an axis that it does not mention. They hold for inputs without given shapes.
    """

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    smallest: Mapping[str, Shape] = field(default_factory=dict)
    typical: Mapping[str, Shape] = field(default_factory=dict)
    largest: Mapping[str, Shape] = field(default_factory=dict)
    stated: Mapping[str, Sequence[int | None]] = field(default_factory=dict)

    def three(self) -> tuple[dict[str, Shape], dict[str, Shape], dict[str, Shape]]:
        """The smallest, the typical and the largest shape of each input."""
        return (
            {**self.largest, **self.typical, **self.shapes, **self.smallest},
            {**self.smallest, **self.largest, **self.shapes, **self.typical},
            {**self.smallest, **self.typical, **self.shapes, **self.largest},
        )


def check_order(smallest: Mapping[str, Shape], typical: Mapping[str, Shape], largest: Mapping[str, Shape]) -> None:
    """Raise MisuseError if a size of an input decreases from the smallest to the typical or the largest shape."""
    for name, high in largest.items():
        low, middle = smallest[name], typical[name]
        if any(not a <= b <= c for a, b, c in zip(low, middle, high, strict=False)):
            given = ", ".join(map(format_shape, (low, middle, high)))
            raise MisuseError(
                f"the smallest, typical and largest shapes of '{name}' are {given}: these must not get smaller "
                "(--min-shapes, --opt-shapes, --max-shapes)"
            )


def check_size(size: int) -> bool:
    """Whether a size can be planned for."""
    return 0 <= size <= LARGEST


def checked_shapes(option: str, shapes: Mapping[str, Sequence[int]] | None) -> dict[str, Shape] | None:
    """Shapes by the names of inputs, as a program gives them. Raises MisuseError unless all sizes are whole numbers."""
    if shapes is None:
        return None
    if not isinstance(shapes, Mapping):
        raise MisuseError(
            f"{option} {shapes!r}: it has lists of sizes by the names of inputs, as in {{'ids': (1, 16)}}"
        )
    checked = {}
    for name, sizes in shapes.items():
        if isinstance(sizes, str) or not isinstance(sizes, Iterable):
            raise MisuseError(f"{option} gives '{name}' the shape {sizes!r}: a shape is a list of sizes, as in (1, 16)")
        checked[name] = tuple(whole_number(f"{option}: a size of '{name}' is", size, 0, LARGEST) for size in sizes)
    return checked


@dataclass(frozen=True)
class AskedStates:
    """Outputs by the inputs that they replace in the next run. With `alone` there are no other states.

    `where` names the place where they are given, for messages.
    """

    outputs: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False
    where: str = "--state"


def parse_states(texts: Sequence[str]) -> dict[str, str]:
    """Pairs of names from `past=present`. Raises MisuseError for any other text, and for a name that comes twice."""
    return named_values("--state", texts, "INPUT=OUTPUT")
