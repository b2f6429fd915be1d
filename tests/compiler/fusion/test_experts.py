"""Mixtures of experts become one operator on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Plan, Request, compile_model, plan_model
from splitc.compiler.engine_graphs.few_rows import inside_copied
from splitc.compiler.fusion import experts
from splitc.compiler.fusion.experts import experts_before
from splitc.compiler.operators.row_groups import EXPERTS, find_row_groups, grouped_scratch
from splitc.runtime import Session
from splitc.runtime.package.manifest_file import read_manifest
from tests.conftest import assert_close, run_whole
from tests.helpers.grouped_rows import Grouped, write
from tests.helpers.needs import needs_gated_experts

HALF = ir.DataType.FLOAT16
GATES = ("first", "last", "even", "odd", "clamped")
FORMS = {
    **{name: Grouped(activation=name, inner=48, normed=True, dtype=HALF) for name in (*GATES, "relu", "silu", "gelu")},
    "biased": Grouped(activation="first", biased=True, inner=48, normed=True, dtype=HALF),
    "looked up": Grouped(
        activation="clamped", looked_up="right", inner=48, normed=True, experts=5, chosen=4, dtype=HALF
    ),
    "precise": Grouped(activation="first", precise=True, inner=48, normed=True, dtype=HALF),
    "of seven": Grouped(activation="last", experts=7, chosen=3, inner=48, normed=True, dtype=HALF),
}
# Those that also run whole. The others only in shards, which differ more from what was exported.
WHOLE = ("first", "gelu", "looked up", "precise", "of seven")
# Why others stay as they are.
OTHERS = {
    "FLOAT": Grouped(activation="first"),
    "none of the operator's activations": Grouped(dtype=HALF),
    "those of other experts": Grouped(activation="first", looked_up="wrong", dtype=HALF),
    "multiples of 8": Grouped(activation="first", inner=20, dtype=HALF),
    "from 16 on": Grouped(activation="first", inner=8, dtype=HALF),
}

pytestmark = needs_gated_experts


def planned(how: Grouped, folder: Path, devices: Sequence[str] = ("cuda0",)) -> Plan:
    save(write(how).model(), folder / "model.onnx")
    mode = "tensor" if len(devices) > 1 else "layer"
    return plan_model(folder / "model.onnx", devices, Request(split_mode=mode, spread=True, memory=["1GiB"]))


@pytest.mark.parametrize(
    ("name", "devices"), [*((name, ["cuda0", "cuda1"]) for name in FORMS), *((name, ["cuda0"]) for name in WHOLE)]
)
def test_experts_are_right_as_one_operator(tmp_path: Path, name: str, devices: list[str]) -> None:
    """On CPU devices, which run packages for GPUs too, with as many rows as an expert gets: none, one, and more."""
    plan = planned(FORMS[name], tmp_path, devices)
    (outcome,) = [outcome for outcome in plan.analysis.outcomes if outcome.kind == "experts"]
    assert (outcome.operator, outcome.why) == ("MoE", None)
    assert not any("depend on data" in warning for warning in plan.warnings)
    compile_model(plan, tmp_path / "package", verify=False)
    for rank in read_manifest(tmp_path / "package").ranks:
        nodes = [node.op_type for node in onnx.load(tmp_path / "package" / rank.engines[0].path).graph.node]
        assert nodes.count("MoE") == 1 and "If" not in nodes
        assert nodes.count("TopK") == 1 and not {"ScatterElements", "CumSum"}.intersection(nodes), "it sorts by itself"
        (engine,) = rank.engines
        assert engine.experts and not (engine.data_sizes or engine.not_captured or engine.branches_by_sizes)
    with Session(tmp_path / "package", devices=[f"cpu{number}" for number in range(len(devices))]) as session:
        for rows, tokens in ((1, 1), (2, 1), (1, 7), (3, 20)):
            given = {"ids": np.random.default_rng(tokens).integers(0, 40, (rows, tokens))}
            assert_close(session.run(given), run_whole(tmp_path / "model.onnx", given), 4e-3)


@pytest.mark.parametrize("devices", [["cuda0"], ["cuda0", "cuda1"]], ids=len)
def test_rows_in_another_order_stay_sorted(tmp_path: Path, devices: list[str]) -> None:
    how = Grouped(activation="first", odd="back", inner=48, normed=True, dtype=HALF)
    compile_model(planned(how, tmp_path, devices), tmp_path / "package", verify=False)
    nodes = [node.op_type for node in onnx.load(tmp_path / "package/rank0/stage0.onnx").graph.node]
    assert nodes.count("MoE") == 1 and nodes.count("TopK") == 2
    with Session(tmp_path / "package", devices=[f"cpu{number}" for number in range(len(devices))]) as session:
        given = {"ids": np.array([[3, 1, 4, 1, 5]])}
        assert_close(session.run(given), run_whole(tmp_path / "model.onnx", given), 4e-3)


def test_shards_that_the_operator_does_not_take_are_right(tmp_path: Path) -> None:
    compile_model(
        planned(Grouped(activation="first", normed=True, dtype=HALF), tmp_path, ["cuda0", "cuda1"]),
        tmp_path / "package",
    )
    nodes = [node.op_type for node in onnx.load(tmp_path / "package/rank0/stage0.onnx").graph.node]
    assert nodes.count("If") == 2 and "MoE" not in nodes, "12 of 24 columns on each"


@pytest.mark.parametrize("why", OTHERS)
def test_other_experts_stay_and_say_why(tmp_path: Path, why: str) -> None:
    plan = planned(OTHERS[why], tmp_path)
    (outcome,) = [outcome for outcome in plan.analysis.outcomes if outcome.kind == "experts"]
    assert outcome.operator is None and outcome.why is not None and why in outcome.why
    assert not any(EXPERTS in node.meta for node in plan.analysis.graph.graph)


def test_more_experts_than_the_operator_is_used_for_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "MOST_EXPERTS", 3)
    plan = planned(Grouped(activation="first", dtype=HALF), tmp_path)
    (outcome,) = [outcome for outcome in plan.analysis.outcomes if outcome.kind == "experts"]
    assert outcome.why == "it has 4 experts, and the operator is used for 3 at most"
    assert not any(EXPERTS in node.meta for node in plan.analysis.graph.graph)


@pytest.mark.parametrize(("limit", "is_fused"), [(40.0, True), (150.0, False)])
def test_limits_are_tried_with_numbers_beyond_them(tmp_path: Path, limit: float, is_fused: bool) -> None:
    """Unless those are so large that products are infinite."""
    graph = planned(Grouped(activation="clamped", limit=limit, dtype=HALF), tmp_path).analysis.graph.graph
    marks = [node.meta[EXPERTS].attributes["swiglu_limit"] for node in graph if EXPERTS in node.meta]
    assert marks == ([limit] * 2 if is_fused else [])


def test_large_experts_are_multiplied_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "MOST_FLOPS", experts.LEAST_ROWS * 6 * 16 * 24 / 4 - 1)
    plan = planned(Grouped(activation="first", dtype=HALF), tmp_path)
    (outcome,) = [outcome for outcome in plan.analysis.outcomes if outcome.kind == "experts"]
    assert outcome.why == f"from {experts.LEAST_ROWS - 1} rows on, a product for each of its large experts is faster"


def test_what_is_read_elsewhere_stays(tmp_path: Path) -> None:
    graph = planned(Grouped(activation="first", dtype=HALF), tmp_path, ["cpu0"]).analysis.graph.graph
    first, second = [node for node in graph if find_row_groups(node) is not None]
    assert experts_before(first) is None and experts_before(second) is not None
    graph.append(ir.node("Identity", [first.outputs[0]]))
    assert experts_before(second) is None


def test_memory_has_sorted_rows_in_place_of_copied_matrices(tmp_path: Path) -> None:
    graph = planned(Grouped(activation="first", dtype=HALF), tmp_path).analysis.graph.graph
    first, second = [node for node in graph if find_row_groups(node) is not None]
    assert grouped_scratch(first, [], [(10, 48)]) == (10 * 16,)
    assert grouped_scratch(second, [], [(10, 16)]) == (10 * 24,)
    insides = {value for node in (first, second) for value in node.inputs}
    assert insides <= inside_copied(graph)


def test_devices_without_the_kernel_keep_products(tmp_path: Path) -> None:
    plan = planned(Grouped(activation="first", dtype=HALF), tmp_path, ["cpu0"])
    assert not any(outcome.kind == "experts" for outcome in plan.analysis.outcomes)
