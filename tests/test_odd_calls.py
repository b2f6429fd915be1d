"""Random calls on a session and its sequences, in any order, end in a message or in the right outputs."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitc.runtime import Session
from splitc.runtime.errors import SplitcError
from splitc.runtime.requests.sequence import StateSequence
from tests.conftest import DECODER, Arrays, assert_close, decoder_feeds, run_whole
from tests.helpers.fuzz import seeds

CALLS = 40
# Seconds in which each test must end.
PATIENCE = 300
ODD: list[Any] = [
    *(None, "x", b"x", 5, -1, 2.5, True, [], [[1], [1, 2]], {}, {1: 2}, object(), float("nan"), 1 << 70, [1 << 70]),
    *(np.zeros(0), np.array("x"), np.array([None]), np.zeros((1, 2), "c16"), np.zeros((1, 1, 1, 1, 1, 1)), np.int64(3)),
    *(np.zeros((1, 0), np.int64), np.zeros((0, 0), np.int64), np.zeros((1, 3), ">i8"), np.zeros((1, 3), "V8")),
]
CAPACITIES: list[Any] = [None, 0, 1, 8, -3, 2.5, "8", 1 << 31, 1 << 80, True, [], float("nan"), np.int32(7)]


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def new_feeds(random: np.random.Generator, past: int) -> Arrays:
    """Valid feeds for a sequence that has read this many tokens."""
    new = int(random.integers(1, 4))
    return {
        "input_ids": random.integers(0, DECODER.vocabulary, (1, new)),
        "attention_mask": np.ones((1, past + new), np.int64),
        "position_ids": np.arange(past, past + new)[None],
    }


def made_odd(feeds: Arrays, random: np.random.Generator) -> Any:
    """Something wrong or odd in place of the feeds, or in one of them."""
    name = list(feeds)[random.integers(len(feeds))]
    odd = ODD[random.integers(len(ODD))]
    how = random.integers(6)
    if how == 0:
        return odd
    if how == 1:
        return {other: array for other, array in feeds.items() if other != name}
    if how == 2:
        return {**feeds, [1, None, "x", (), b"y"][random.integers(5)]: odd}
    if how == 3:
        return {**feeds, name: feeds[name].astype(["f4", "f8", "i4", "u8", "?", "O", "U5"][random.integers(7)])}
    if how == 4:
        return {**feeds, name: feeds[name][..., : random.integers(3)]}
    return {**feeds, name: odd}


class Caller:
    """Makes random calls on a session, and knows the unsplit model's outputs."""

    def __init__(self, model: Path, session: Session, random: np.random.Generator) -> None:
        self.model, self.session, self.random = model, session, random
        self.sequences: list[tuple[StateSequence, list[int]]] = []
        self.right = self.said = 0

    def call(self) -> None:
        calls = [self.run, self.submit, self.start, *[self.go_on] * 3, self.load, self.grow, self.close]
        try:
            calls[self.random.integers(len(calls))]()
            self.right += 1
        except SplitcError as error:
            assert str(error)
            self.said += 1

    def run(self) -> None:
        feeds = decoder_feeds(1, int(self.random.integers(1, 4)), int(self.random.integers(3)))
        if self.random.random() < 0.6:
            self.session.run(made_odd(feeds, self.random))
        else:
            assert_close(self.session.run(feeds), run_whole(self.model, feeds), 2e-5)

    def submit(self) -> None:
        feeds = decoder_feeds(1, 2, 1)
        futures = [self.session.submit(feeds), self.session.submit(made_odd(feeds, self.random))]
        assert_close(futures[0].result(60), run_whole(self.model, feeds), 2e-5)
        futures[1].result(60)

    def start(self) -> None:
        capacity = CAPACITIES[self.random.integers(len(CAPACITIES))]
        self.sequences.append((self.session.start(capacity), []))

    def _sequence(self) -> tuple[StateSequence, list[int]]:
        if not self.sequences:
            self.sequences.append((self.session.start(), []))
        return self.sequences[self.random.integers(len(self.sequences))]

    def go_on(self) -> None:
        sequence, tokens = self._sequence()
        feeds = new_feeds(self.random, len(tokens))
        if self.random.random() < 0.3:
            sequence.run(made_odd(feeds, self.random))
            # The odd feeds were accepted, so it is not known what this sequence has read.
            self.sequences = [each for each in self.sequences if each[0] is not sequence]
            return
        found = sequence.run(feeds)
        tokens += feeds["input_ids"][0].tolist()
        self._check(found, tokens)

    def _check(self, found: Arrays, tokens: list[int]) -> None:
        past = decoder_feeds(1, 1, 0)
        whole = {name: array for name, array in past.items() if name.startswith("past")}
        ids = np.array([tokens])
        whole.update(input_ids=ids, attention_mask=np.ones_like(ids), position_ids=np.arange(len(tokens))[None])
        expected = run_whole(self.model, whole)["logits"][:, -found["logits"].shape[1] :]
        assert_close(found, {"logits": expected}, 1e-4)

    def load(self) -> None:
        sequence = self._sequence()[0]
        states = {name: array for name, array in decoder_feeds(1, 1, 0).items() if name.startswith("past")}
        sequence.load(states if self.random.random() < 0.5 else made_odd(states, self.random))

    def grow(self) -> None:
        self._sequence()[0].grow(CAPACITIES[self.random.integers(len(CAPACITIES))])

    def close(self) -> None:
        place = int(self.random.integers(len(self.sequences) or 1))
        for _ in range(self.random.integers(1, 3)):
            if self.sequences:
                self.sequences[place][0].close()
        if self.random.random() < 0.1:
            self.session.close()


@pytest.mark.fuzz
@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize("seed", seeds(1))
def test_any_calls_end_in_a_message_or_in_the_right_outputs(
    package: Path, decoder: Path, seed: int, ranks: str
) -> None:
    with Session(package, verify="never", threads=1, ranks=ranks) as session:
        caller = Caller(decoder, session, np.random.default_rng(seed))
        for _ in range(CALLS):
            caller.call()
        assert caller.right, "some calls are right"


def test_odd_devices_are_said(package: Path) -> None:
    for odd in ([3, 3, 3], [None], [["cpu0"]], b"cpu0", ["cpu0"]):
        with pytest.raises(SplitcError):
            Session(package, devices=odd)  # type: ignore[arg-type]
