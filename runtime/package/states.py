"""The manifest's entries for states: what stays from request to request, and how long it is."""

from __future__ import annotations

from msgspec import Struct


class State(Struct, frozen=True):
    """An input that is fed with an output of the previous run (a past and its present).

    - `grows`: the axis along which the state grows: a sequence begins with length 0 there, and with zeros otherwise.
    - `in_place`: the engine can write the output over the input, which may have a capacity for later tokens.
    """

    input: str
    output: str
    grows: int | None = None
    in_place: bool = False


class Length(Struct, frozen=True):
    """The number of filled rows of `states` along `axis`, where engines write them in place.

    - `input`: the ranks' input whose size it is. Requests do not feed it.
    - `adds`, `reads`: a request adds `adds` rows, or as many as the input `reads` has along that axis.
    - `room_for_batches`: batches of several rows read several tokens after earlier ones only in states with room for
      them.
    - `one_row`: they can't at all: such a request must have one row.
    - `room`: an input whose size is the available room.
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
