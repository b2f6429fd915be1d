"""Shapes as users give them on the command line, and made-up inputs in these."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest import Tensor
from splitc.runtime.units import format_shape, shortened

Shape = tuple[int, ...]
# The largest size that is planned for: with one byte per element, no memory would hold more.
LARGEST = 1 << 40
# A name with its shape, up to a comma or the end. Names may have commas and colons in them.
_SHAPE = re.compile(r"(.+?:(?:\[[^\]]*\]|\d+(?:x\d+)*)),")


def parse_shapes(texts: Sequence[str], option: str = "--shapes") -> dict[str, Shape]:
    """Parse shapes from `name:1x16` or polygraphy's `name:[1,16]`. A scalar is `name:[]`.

    Several in one text are separated by commas, as in trtexec: `name:1x16,other:1x16`. Raises MisuseError, which names
    the `option`, for any other text, and for a name that occurs twice.
    """
    shapes = {}
    for text in (part for joined in texts for part in [p for p in _SHAPE.split(joined) if p] or [joined]):
        name, _, sizes = text.rpartition(":")
        numbers = re.split(r"[x,]", sizes.strip().strip("[]").replace(" ", ""))
        is_scalar = sizes.replace(" ", "") == "[]"
        if not name or not (is_scalar or all(number.isascii() and number.isdigit() for number in numbers)):
            raise MisuseError(f"can't read {option} '{text}': write NAME:1x16 or NAME:[1,16]")
        if large := [number for number in numbers if len(number) > 15 or int(number or 0) > LARGEST]:
            raise MisuseError(f"{option} gives '{name}' the size {shortened(large[0])}, and the largest is {LARGEST:,}")
        if name in shapes:
            raise MisuseError(f"{option} gives '{name}' two shapes, the second as '{text}': leave out one of them")
        shapes[name] = tuple(int(number) for number in numbers if number)
    return shapes


def resized(inputs: Sequence[Tensor], shapes: Mapping[str, Shape]) -> list[Tensor]:
    """The inputs with these shapes to be made up in. Others with the same symbols, or sums of them, follow.

    Raises MisuseError for a shape of an unknown input, or with another number of axes.
    """
    known = {tensor.name: tensor for tensor in inputs}
    if unknown := [name for name in shapes if name not in known]:
        raise MisuseError(
            f"--shapes names '{unknown[0]}', and the package has no such input: it has {', '.join(known)}"
        )
    planned, sizes = dict[str, int](), dict[str, int]()
    for tensor in inputs:
        given = shapes.get(tensor.name, tensor.sample_shape or ())
        if tensor.shape is not None and len(given) != len(tensor.shape):
            raise MisuseError(
                f"--shapes gives '{tensor.name}' as {format_shape(given)}, and the model takes "
                f"{format_shape(tensor.shape)}"
            )
        axes = zip(tensor.shape or (), given, strict=tensor.shape is not None)
        known_now = sizes if tensor.name in shapes else planned
        known_now.update((symbol, size) for symbol, size in axes if isinstance(symbol, str))
    for symbol in planned.keys() - sizes.keys():
        terms = symbol.split(" + ")
        if not sizes.keys().isdisjoint(terms) and all(term in planned or term in sizes for term in terms):
            sizes[symbol] = sum(sizes.get(term, planned.get(term, 0)) for term in terms)
    return [_with_sizes(tensor, shapes.get(tensor.name), sizes) for tensor in inputs]


def _with_sizes(tensor: Tensor, given: Shape | None, sizes: Mapping[str, int]) -> Tensor:
    if given is not None:
        return msgspec.structs.replace(tensor, sample_shape=list(given))
    if tensor.shape is None or tensor.sample_shape is None:
        return tensor
    made = [
        sizes.get(symbol, size) if isinstance(symbol, str) else size
        for symbol, size in zip(tensor.shape, tensor.sample_shape, strict=True)
    ]
    return msgspec.structs.replace(tensor, sample_shape=made)
