"""What a manifest says of states: what stays from request to request, how long it is, and what follows from that."""

from __future__ import annotations

from msgspec import Struct


class State(Struct, frozen=True):
    """An input that is fed with an output of the run before (a past and its present).

    A sequence begins with zeros. A state that grows has length 0 along the axis `grows` then. With `in_place` the
    engine can write the output over the input, which may have the capacity for later tokens.
    """

    input: str
    output: str
    grows: int | None = None
    in_place: bool = False


class Length(Struct, frozen=True):
    """How many rows of the states `states` are filled along the axis `axis`, where engines write them in place.

    Ranks take it as the size of the input `input`, which requests do not give. Each request adds `adds` rows, or, where
    `reads` is set, as many as that input has along that axis. With `room_for_batches`, several rows of the batch read
    several tokens after others only in states that have room for them. With `one_row`, they can't: such a request is
    for one row. `room` is an input whose size is the room that there is.
    """

    input: str
    states: list[str]
    axis: int
    adds: int = 0
    reads: tuple[str, int] | None = None
    room_for_batches: bool = False
    room: str | None = None
    one_row: bool = False

    @property
    def names(self) -> list[str]:
        """The inputs for it."""
        return [self.input, *([] if self.room is None else [self.room])]


class Preamble(Struct, frozen=True):
    """A graph that is run before the ranks, on the CPU, in the file `file`.

    It takes the `inputs`, of which no rank takes those `consumed`, and makes the `outputs`, which are inputs of ranks.
    `masks` are those among them that only attention adds to its scores, by the input for the length of its caches. All
    of them are left out of a request in which they hide nothing but later tokens: engines have a form without. Those
    with `windows` hide all but the last so many tokens, itself included, and so does that form. `blanks` say which rows
    of an attention are zeros; they are left out with the masks, if that is none.

    The graph in the file `plain`, if there is one, makes none of the masks and blanks. It is for requests whose inputs
    `ones` are all ones, with a last axis as long as all tokens so far: what masks would hide is known there. Those that
    are `batched` have a first axis as long as the batch, which inputs have as the axes of these numbers in `batch`.
    """

    file: str
    inputs: list[str]
    outputs: list[str]
    consumed: list[str] = []
    masks: dict[str, str] = {}
    plain: str | None = None
    ones: list[str] = []
    windows: dict[str, int] = {}
    blanks: list[str] = []
    batched: list[str] = []
    batch: dict[str, int] = {}
