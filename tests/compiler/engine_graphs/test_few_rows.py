"""Mixtures of experts have sizes that do not depend on data on GPUs, where a request has few rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.engine_graphs.few_rows import find_copied, inside_copied
from splitc.compiler.operators import row_groups
from splitc.compiler.operators.row_groups import find_row_groups, most_copied
from splitc.compiler.show.plan_tables import print_plan
from splitc.runtime import Session
from splitc.runtime.package.manifest_file import read_manifest
from tests.conftest import assert_close, run_whole
from tests.helpers.grouped_rows import Grouped, write

FORMS = {"plain": Grouped(), "biased": Grouped(biased=True), "apart": Grouped(apart=True, experts=7, chosen=3)}
ODD = ("gap", "order", "rows", "lengths")


def saved(how: Grouped, folder: Path) -> Path:
    save(write(how).model(), folder / "model.onnx")
    return folder / "model.onnx"


def ids(rows: int, tokens: int) -> dict[str, np.ndarray]:
    return {"ids": np.random.default_rng(tokens).integers(0, 40, (rows, tokens))}


@pytest.mark.parametrize("name", FORMS)
def test_groups_are_recognized(tmp_path: Path, name: str) -> None:
    how = FORMS[name]
    graph = plan_model(saved(how, tmp_path), ["cpu0"], Request()).analysis.graph.graph
    found = {node: groups for node in graph if (groups := find_row_groups(node)) is not None}
    assert [(groups.count, groups.biases is not None) for groups in found.values()] == [(how.experts, how.biased)] * 2
    assert {len(find_copied(graph)), len(found)} == {2}
    for node, groups in found.items():
        made = node.outputs[0]
        assert made.shape is not None and groups.rows.shape is not None
        assert made.shape[0] == groups.rows.shape[0], "there are as many rows as before"
        assert {value for inner in groups.nodes - {node} for value in inner.outputs} <= inside_copied(graph)


@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_product_of_grouped_rows(tmp_path: Path, odd: str) -> None:
    graph = plan_model(saved(Grouped(odd=odd), tmp_path), ["cpu0"], Request()).analysis.graph.graph
    assert not any(find_row_groups(node) for node in graph)


@pytest.mark.parametrize(
    ("name", "devices"), [*((name, ["cuda0", "cuda1"]) for name in FORMS), ([*FORMS][-1], ["cuda0"])]
)
def test_both_branches_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, devices: Sequence[str]
) -> None:
    """On CPU devices, which run packages for GPUs too: of few rows, of as many as are copied, and of more."""
    monkeypatch.setattr(row_groups, "MOST_ROWS", 12)
    path = saved(FORMS[name], tmp_path)
    mode = "tensor" if len(devices) > 1 else "layer"
    plan = plan_model(path, devices, Request(split_mode=mode, spread=True, memory=["1GiB"]))
    compile_model(plan, tmp_path / "package", verify=False)
    for rank in read_manifest(tmp_path / "package").ranks:
        (engine,) = rank.engines
        assert not engine.data_sizes and engine.branches_by_sizes and not engine.not_captured
        nodes = [node.op_type for node in onnx.load(tmp_path / "package" / engine.path).graph.node]
        assert nodes.count("If") == 2
        assert nodes.count("Range") == 1, "that of the rows' order"
    assert {"first.weight", "second.weight"} <= {weight.name.partition("/")[0] for weight in engine.weights or ()}
    with Session(tmp_path / "package", devices=[f"cpu{number}" for number in range(len(devices))]) as session:
        for rows, tokens in ((1, 1), (2, 1), (1, 4), (1, 6), (1, 7), (3, 20)):
            given = ids(rows, tokens)
            assert_close(session.run(given), run_whole(path, given), 2e-5)


def test_plan_says_that_requests_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(plan_model(saved(Grouped(), tmp_path), ["cuda0"], Request(memory=["1GiB"])))
    assert "CUDA graphs" in (said := capsys.readouterr().out) and "not replayed" not in said


def test_large_matrices_are_not_copied() -> None:
    assert most_copied(1 << 20, 16) == row_groups.MOST_ROWS
    assert most_copied(4096 * 28672, 16) == 2, "one token of Mixtral on one GPU"
    assert most_copied(1 << 29, 16) == 0
