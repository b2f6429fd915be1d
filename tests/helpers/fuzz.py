"""Random damage by seed: a few cases in each test run, more with `make fuzz`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

# How many times as many cases as in an ordinary run.
MORE = int(os.environ.get("SPLITC_FUZZ", "1"))
NAMES = ["x", "", "9**9**9**9", "((((((((a))))))))", "[red]", "a b", "n+1", "input_ids", "é", "\n"]
NUMBERS = [0, -1, 1, 2, 7, 1 << 31, 1 << 62, -5, 17, 1000]
VALUES: list[Any] = [None, -1, 0, 1, 2, 1 << 40, "x", "", [], {}, 0.5, -5.5, 1e308, True, "9" * 50, "layer", "tensor"]
FLOATS = [0.0, -1.0, float("nan"), float("inf"), 1e30]


def seeds(count: int, fuzzed: int | None = None, first: int = 0) -> range:
    """The seeds of a test's cases: in an ordinary run `count` of them, beginning with `first`.

    With `make fuzz` they are MORE times `fuzzed`, by default MORE times `count`, from 0 on.
    """
    return range(first, first + count) if MORE == 1 else range((fuzzed or count) * MORE)


def damage_bytes(content: bytes, random: np.random.Generator) -> bytes:
    """Change, cut off or insert a few bytes."""
    damaged = bytearray(content)
    for _ in range(random.integers(1, 4)):
        place, how = int(random.integers(len(damaged) or 1)), random.integers(3)
        if how == 0:
            damaged[place : place + 1] = random.bytes(1)
        elif how == 1:
            del damaged[place:]
        else:
            damaged[place:place] = random.bytes(5)
    return bytes(damaged)


def damage_json(fields: Any, random: np.random.Generator, spared: Any = None) -> None:
    """Remove, copy, swap or replace something in JSON lists and objects, except in those that are `spared`."""
    found = [(container, key) for container, key in _places(fields) if container is not spared]
    container, key = found[random.integers(len(found))]
    how = random.integers(4)
    if how == 0:
        del container[key]
    elif how == 1 and isinstance(container, list):
        container.append(container[key])
    elif how == 2 and isinstance(container, list):
        other = int(random.integers(len(container)))
        container[key], container[other] = container[other], container[key]
    else:
        container[key] = VALUES[random.integers(len(VALUES))]


def _places(fields: Any) -> Iterator[tuple[Any, Any]]:
    """Each container among the fields, with each of its keys."""
    for key in list(fields) if isinstance(fields, dict) else range(len(fields)):
        yield fields, key
        if isinstance(fields[key], dict | list):
            yield from _places(fields[key])


def damage_message(message: Message, random: np.random.Generator) -> None:
    """Remove, copy, swap or replace something in a protobuf message."""
    found = [message, *_messages(message)]
    place: Any = found[random.integers(len(found))]
    fields = [field for field, _ in place.ListFields()] or list(place.DESCRIPTOR.fields)
    field = fields[random.integers(len(fields))]
    if random.integers(6) == 0 or (not field.is_repeated and field.type == FieldDescriptor.TYPE_MESSAGE):
        place.ClearField(field.name)
    elif field.is_repeated:
        _damage_items(getattr(place, field.name), field, random)
    else:
        setattr(place, field.name, _value(field, random))


def _messages(message: Message) -> Iterator[Message]:
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for each in value if field.is_repeated else [value]:
                yield each
                yield from _messages(each)


def _damage_items(items: Any, field: FieldDescriptor, random: np.random.Generator) -> None:
    if not items:
        return
    one, other = (int(place) for place in random.integers(len(items), size=2))
    how, are_messages = random.integers(4), field.type == FieldDescriptor.TYPE_MESSAGE
    if how == 0:
        del items[one]
    elif how == 1 and are_messages:
        items.add().CopyFrom(items[one])
    elif how == 1:
        items.append(items[one])
    elif how == 2 and not are_messages:
        items[one] = _value(field, random)
    elif are_messages:
        kept = type(items[one])()
        kept.CopyFrom(items[one])
        items[one].CopyFrom(items[other])
        items[other].CopyFrom(kept)
    else:
        items[one], items[other] = items[other], items[one]


def _value(field: FieldDescriptor, random: np.random.Generator) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return NAMES[random.integers(len(NAMES))]
    if field.type == FieldDescriptor.TYPE_BYTES:
        return random.bytes(int(random.integers(9)))
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return FLOATS[random.integers(len(FLOATS))]
    if field.enum_type is not None:
        known = [each.number for each in field.enum_type.values]
        return known[random.integers(len(known))]
    limit = 1 << (31 if field.type in (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_UINT32) else 63)
    number = NUMBERS[random.integers(len(NUMBERS))]
    return number % limit if number >= limit or field.type == FieldDescriptor.TYPE_UINT64 else number
