"""Ranks with placed weights in a session: threads and processes, streams, failing requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.request.places import ExpertsPlace, Place
from splitc.runtime import Session
from splitc.runtime.engines.operator_library import is_built
from splitc.runtime.package.manifest_file import read_manifest
from tests.conftest import assert_close, run_whole
from tests.helpers.mixtures import Mixtures, mixture_feeds
from tests.helpers.placed import assert_failures_are_alone

pytestmark = pytest.mark.skipif(not is_built(), reason="splitc was installed without a C compiler")


def make_package(model: Path, package: Path, table: str | None, experts: str) -> Path:
    places = () if table is None else (Place("^table$", table),)
    asked = Request(split_mode="layer", place=places, experts=ExpertsPlace(experts), spread=True)
    compile_model(plan_model(model, "3xcpu", asked), package, verify=False)
    return package


@pytest.mark.parametrize(("form", "ranks"), [("fused", "threads"), ("loop", "processes")])
def test_requests_of_a_stream(tmp_path: Path, mixtures: Mixtures, form: str, ranks: str) -> None:
    """Of all lengths: two rows of 2200 tokens exceed a channel's buffer."""
    model = mixtures(form)
    with Session(
        make_package(model, tmp_path / "package", "cpu2", "cpu1"), threads=1, in_flight=3, ranks=ranks
    ) as session:
        given = [mixture_feeds(length, 2) for length in (1, 5, 2200, 1, 2, 900, 4)]
        for feeds, outputs in zip(given, session.map(given), strict=True):
            assert_close(outputs, run_whole(model, feeds), 2e-5)


@pytest.mark.parametrize(("table", "ranks"), [("cpu1", "threads"), ("cpu2", "processes"), (None, "threads")])
def test_request_that_fails_fails_alone(tmp_path: Path, mixtures: Mixtures, table: str | None, ranks: str) -> None:
    """The rank with the table is ahead of the others, and meets what is wrong while they run the request before.

    Without a place of its own, it is in the first of two stages, both of which need the experts.
    """
    model = mixtures("loop")
    package = make_package(model, tmp_path / "package", table, "cpu1")
    groups = [tuple(engine.group) for rank in read_manifest(package).ranks for engine in rank.engines]
    assert groups == ([(0, 2), (), (0, 2)] if table == "cpu2" else [(0, 1, 2)] * 3)
    with Session(package, threads=1, in_flight=4, ranks=ranks) as session:
        assert_failures_are_alone(session, model, 12)
