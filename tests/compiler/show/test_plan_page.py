"""A plan's page: its times, and its advice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from splitc.compiler import Request, plan_model
from splitc.compiler.planning.plan import Alternative, Plan
from splitc.compiler.show.plan_verdict import plan_verdict
from splitc.compiler.show.times_section import EVERYWHERE, find_costs, times_sections


@pytest.fixture(scope="module")
def staged(decoder: Path) -> Plan:
    return plan_model(decoder, "3xcpu", Request(split_mode="layer", memory=["40MiB"]))


def said(plan: Plan) -> str:
    return "\n".join(plan_verdict(plan))


def test_nodes_share_the_time_of_their_rank(staged: Plan, decoder: Path) -> None:
    costs = find_costs(staged)
    for number, rank in enumerate(staged.ranks):
        own = [cost for cost in costs if cost.ranks == f"{number}"]
        assert sum(cost.seconds for cost in own) == pytest.approx(rank.seconds)
        assert {cost.block for cost in own} - {EVERYWHERE} <= {block.name for block in rank.stage.blocks}
    tensor = plan_model(decoder, "2xcpu", Request(split_mode="tensor"))
    together = find_costs(tensor)
    assert {cost.ranks for cost in together} == {"0-1"}
    assert sum(cost.seconds for cost in together) == pytest.approx(max(rank.seconds for rank in tensor.ranks))


def test_tables_have_the_slowest_first_and_all_bytes(staged: Plan) -> None:
    sections = times_sections(staged)
    assert sections is not None
    times, find = sections
    operators = next(table for table in times.tables if table.title == "Slowest operators")
    assert operators.rows[0][0] == "MatMul"
    assert find.search is not None and len(find.search.rows) == len(find_costs(staged))


def test_verdict_names_the_slowest_stage(staged: Plan) -> None:
    slower = replace(staged.ranks[1], seconds=3 * staged.ranks[0].seconds)
    others = [replace(rank, seconds=staged.ranks[0].seconds) for rank in staged.ranks]
    uneven = replace(staged, ranks=(others[0], slower, others[2]))
    assert "Rank 1 (cpu1) takes" in said(uneven) and "up to 80% more requests" in said(uneven)
    assert "moving blocks gains little" in said(replace(staged, ranks=tuple(others)))


def test_verdict_has_what_is_left_of_the_fullest_budget(staged: Plan) -> None:
    full = replace(staged.ranks[2], budget=staged.ranks[2].memory.total * 20 // 19)
    assert "cpu2 is 95% full" in said(replace(staged, ranks=(*staged.ranks[:2], full)))
    short = replace(full, budget=staged.ranks[2].memory.total - (1 << 20))
    assert "cpu2 lacks 1.00 MiB" in said(replace(staged, ranks=(*staged.ranks[:2], short)))
    assert "is the fullest device" in said(staged)


def test_verdict_has_candidates_that_are_better_for_something_else(staged: Plan) -> None:
    mine = Alternative("layer on 3", "layer", 3, latency=3.0, interval=1.0, peaks=(100,))
    quick = Alternative("tensor on 2", "tensor", 2, latency=1.5, interval=1.5, peaks=(100,))
    small = Alternative("row on 3", "row", 3, latency=4.0, interval=4.0, peaks=(50,))
    auto = replace(staged, choice="layer on 3: for a reason", objective="throughput")
    compared = said(replace(auto, alternatives=(mine, quick, small)))
    assert "tensor on 2 would take 1.5 s for a request rather than 3 s: --objective latency" in compared
    assert "row on 3 would need 50 B on the fullest device rather than 100 B: --split-mode row" in compared
    assert "Nothing else of the 2 that were compared is better" in said(
        replace(auto, alternatives=(mine, replace(quick, latency=3.0)))
    )
    assert "Only this mode was planned" in said(staged)


def test_verdict_has_weights_that_stay_whole(decoder: Path) -> None:
    plan = plan_model(decoder, "3xcpu", Request(split_mode="tensor", tensor_split=[1, 1, 1]))
    whole = [replace(weight, split=0, reason="it is one") for weight in plan.weights]
    assert "whole on each rank. Split, they would save up to" in said(replace(plan, weights=tuple(whole)))
    assert "the reason is: it is one" in said(replace(plan, weights=tuple(whole)))
