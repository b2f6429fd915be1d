"""What a stage is predicted to hold, against sizes counted by hand and against the planner's bound."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from splitc.compiler import Request, plan_model
from splitc.compiler.analysis.facts import analyze
from splitc.compiler.analysis.memory import stage_memory
from splitc.compiler.analysis.range_memory import RangeMemory
from splitc.compiler.analysis.stages import divide_blocks
from splitc.compiler.frontend.asked_shapes import AskedShapes
from splitc.runtime.devices import parse_devices
from splitc.runtime.errors import DoesNotFitError


def test_sizes_are_those_counted_by_hand(write_model: Callable[[str], Path]) -> None:
    """x [4, 8] -> a [4, 16] -> b [4, 16] -> v, a view of b -> y [4, 2] and rest [4, 14], in float32.

    Most is alive while b is made of a: both, and x and y, which are there throughout.
    """
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 8] x) => (float[n, 2] y) <int64[2] sizes = {2, 14}, int64[1] zero = {0}>
        { a = Concat <axis = 1> (x, x)
          b = Softmax(a)
          u = Unsqueeze(b, zero)
          v = Squeeze(u, zero)
          y, rest = Split <axis = 1> (v, sizes) }"""
    )
    analysis = analyze(path, AskedShapes({"x": (4, 8)}), 1)
    (stage,) = divide_blocks(analysis.graph, analysis.partition, [len(analysis.partition.blocks)])
    memory = stage_memory(analysis.costs, analysis.states, stage)
    assert memory.weights == 3 * 8
    assert memory.cache == 0
    assert memory.activations == 4 * 8 * 4 + 4 * 2 * 4 + 2 * (4 * 16 * 4)


def test_largest_weight_is_held_twice_while_it_is_loaded(write_model: Callable[[str], Path]) -> None:
    ones = ",".join(["1"] * 64)
    path = write_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 8] x) => (float[n, 8] y) <float[8, 8] w = {{{ones}}}> {{ y = MatMul(x, w) }}"""
    )
    (rank,) = plan_model(path, ["cpu0"], Request(split_mode="layer", shapes={"x": (1, 8)})).ranks
    assert (rank.memory.weights, rank.memory.loading) == (256, 256)
    assert rank.memory.total == 512
    (rank,) = plan_model(path, ["cpu0"], Request(split_mode="layer", shapes={"x": (100, 8)})).ranks
    assert rank.memory.total == 256 + 2 * 100 * 8 * 4


def test_cache_is_both_past_and_present(decoder: Path) -> None:
    shapes = {"input_ids": (2, 3), "past_key_values.0.key": (2, 2, 5, 16)}
    plan = plan_model(decoder, parse_devices(["2xcpu"]), Request(split_mode="layer", shapes=shapes))
    one_layer = 2 * (2 * 2 * (5 + 8) * 16 * 4)
    assert [rank.memory.cache for rank in plan.ranks] == [2 * one_layer, 2 * one_layer]


def test_bound_for_the_planner_is_never_too_small(decoder: Path) -> None:
    analysis = analyze(decoder, AskedShapes({"input_ids": (2, 16)}), 12)
    quick = RangeMemory(analysis.costs, analysis.states, analysis.partition)
    count = len(analysis.partition.blocks)
    for start in range(count):
        for end in range(start + 1, count + 1):
            ends = sorted({start, end, count} - {0})
            stage = divide_blocks(analysis.graph, analysis.partition, ends)[ends.index(end)]
            exact = stage_memory(analysis.costs, analysis.states, stage)
            assert exact.weights == quick.weights(start, end)
            assert exact.total <= quick.total(start, end) <= 2 * exact.total + 4096


def test_longer_inputs_need_more_and_may_not_fit(decoder: Path) -> None:
    devices = parse_devices(["2xcpu"])
    assert plan_model(
        decoder, devices, Request(split_mode="layer", memory=["1MiB"], shapes={"input_ids": (1, 16)})
    ).ranks
    with pytest.raises(DoesNotFitError, match="The first block that does not fit"):
        plan_model(decoder, devices, Request(split_mode="layer", memory=["1MiB"], shapes={"input_ids": (8, 512)}))
