"""Checks of packages with placed weights, for any mode."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from splitc.compiler import compile_model
from splitc.compiler.planning.plan import Plan
from splitc.runtime import Session
from splitc.runtime.errors import EngineError
from tests.conftest import assert_close, decoder_feeds, run_whole
from tests.helpers.greedy import plain_loop
from tests.helpers.mixtures import ROWS, mixture_feeds


def assert_same(
    model: Path, plan: Plan, package: Path, sizes: Iterable[tuple[int, int]], ranks: str = "threads"
) -> None:
    """A stream of requests of these lengths and rows must give the mixture's outputs."""
    compile_model(plan, package, verify=False)
    with Session(package, threads=1, in_flight=3, ranks=ranks) as session:
        given = [mixture_feeds(length, rows) for length, rows in sizes]
        for feeds, outputs in zip(given, session.map(given), strict=True):
            assert_close(outputs, run_whole(model, feeds), 2e-5)


def assert_failures_are_alone(session: Session, model: Path, requests: int) -> None:
    """Of this many requests each third must fail, and the others give the mixture's outputs."""
    given = [mixture_feeds(200 + length, last=ROWS if length % 3 == 2 else 1) for length in range(1, requests + 1)]
    futures = [session.submit(feeds) for feeds in given]
    for length, (feeds, future) in enumerate(zip(given, futures, strict=True), 1):
        if length % 3 == 2:
            with pytest.raises(EngineError, match="Gather"):
                future.result(20)
        else:
            assert_close(future.result(20), run_whole(model, feeds), 2e-5)


def assert_layer_has_its_cache(decoder: Path, plan: Plan, rank: int, package: Path) -> None:
    """Only the rank with the decoder's layer 2 may hold that layer's cache, and no other. Tokens are the decoder's."""
    past = {value.name for value in plan.ranks[rank].stage.feeds if "past" in (value.name or "")}
    assert past >= {"past_key_values.2.key", "past_key_values.2.value"}
    assert not past & {f"past_key_values.{layer}.key" for layer in (0, 1, 3)}
    compile_model(plan, package, verify=False)
    with Session(package, threads=1) as session:
        feeds = decoder_feeds(layers=4)
        assert_close(session.run(feeds), run_whole(decoder, feeds))
        assert list(session.generate([5, 9, 2], max_new_tokens=5)) == plain_loop(decoder, [5, 9, 2], 5)
