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
    - `by_branch`: engines have a branch for batches of several rows that read several tokens after earlier ones.
    - `one_row`: they can't at all: such a request must have one row.
    - `room`: an input whose size is the available room.
    """

    input: str
    states: list[str]
    axis: int
    adds: int = 0
    reads: tuple[str, int] | None = None
    by_branch: bool = False
    room: str | None = None
    one_row: bool = False

    @property
    def names(self) -> list[str]:
        """The inputs for it."""
        return [self.input, *([] if self.room is None else [self.room])]


class KeptRows(Struct, frozen=True):
    """An input of a language model's last product: the indices of the tokens whose rows of `outputs` are computed.

    - `input`: its name. It is int64, [rows]. Requests that do not feed it get all rows.
    - `outputs`: the axis of rows, by output.
    - `reads`: the input, and its axis, that has as many tokens as an output has rows.
    """

    input: str
    outputs: dict[str, int]
    reads: tuple[str, int]


class Preamble(Struct, frozen=True):
    """A graph that is run before the ranks, on the CPU, in the file `file`.

    - `inputs`: the inputs that it takes. `consumed`: those of them that no rank takes.
    - `outputs`: the ranks' inputs that it computes.
    - `masks`: outputs that only attention adds to its scores, with the input for the length of its caches. A request
      omits all of them if they hide only later tokens: engines have a form without masks.
    - `windows`: masks that hide all but the last tokens, with their number, the token itself included. The form without
      masks does so too.
    - `blanks`: outputs that say which rows of an attention are zeros. They are omitted with the masks if no row is.
    - `plain`: the file of a graph that computes neither masks nor blanks. It is for requests whose inputs `ones` are
      all ones, with a last axis as long as all tokens so far: what masks would hide is known then.
    - `batched`: those of `ones` whose first axis is as long as the batch. `batch`: the inputs and the number of their
      axis that is.
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
