"""Measured memory, compared with the prediction."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path

import onnx_ir as ir
import pytest

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.cli import terminal
from splitc.runtime.cli.run_options import measure_ranks
from splitc.runtime.cli.run_tables import print_memory
from splitc.runtime.feeds.fills import make_inputs
from splitc.runtime.hardware import memory_use
from splitc.runtime.hardware.memory_use import RankMemory, process_memory
from splitc.runtime.package.manifest_file import read_manifest
from tests.conftest import decoder_feeds
from tests.helpers.adapters import random_pairs, write_peft
from tests.helpers.blocks import Block
from tests.helpers.measured import measured
from tests.helpers.needs import needs_parts_freed
from tests.helpers.packages import compile_mode

# What an ONNX Runtime session takes for itself, about 12 MiB, and as much again for how the system counts.
ENGINE = 32 << 20


def test_peak_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_use, "_status", dict)
    use = process_memory()
    assert use.peak >= use.now // 2


def test_ranks_hold_what_was_predicted(tmp_path: Path) -> None:
    size = Size(layers=2, hidden=1024, heads=8, kv_heads=8, feed_forward=4608, vocabulary=1000)
    save(build(size), tmp_path / "model.onnx")
    request = Request(split_mode="layer", shapes={"input_ids": (1, 16)}, tensor_split=[1, 1])
    compile_model(plan_model(tmp_path / "model.onnx", ["cpu0", "cpu1"], request), tmp_path / "package", verify=False)
    feeds = make_inputs(read_manifest(tmp_path / "package").inputs)
    for rank in measured(tmp_path / "package", feeds):
        assert abs(rank.loaded - rank.predicted_weights) < ENGINE
        assert abs(rank.peak - rank.predicted_total) < ENGINE
        assert rank.predicted_weights > 64 << 20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says what of files is in memory")
def test_weights_that_requests_read_from_their_files_count_as_loaded(tmp_path: Path) -> None:
    """No kernel packs a stack of matrices."""
    b = Block()
    b.give(b.op("MatMul", b.data("x", (8, 1, 1024), [8, "n", 1024]), b.w("stack", 8, 1024, 1024)), "y")
    save(b.model(), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", "1xcpu", Request()), tmp_path / "package", verify=False)
    (rank,) = measured(tmp_path / "package", b.feeds)
    assert 32 << 20 < rank.loaded < (32 << 20) + ENGINE
    assert rank.peak - rank.loaded < 16 << 20


def test_what_is_fed_is_part_of_the_peak(tmp_path: Path) -> None:
    b = Block()
    b.give(b.op("ReduceMax", b.data("x", (8, 1 << 20), [8, "n"]), keepdims=0), "y")
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", "1xcpu", Request(shapes={"x": (8, 1 << 20)}))
    compile_model(plan, tmp_path / "package", verify=False)
    (rank,) = measured(tmp_path / "package", b.feeds)
    assert rank.peak > 32 << 20
    assert rank.loaded < ENGINE


@pytest.mark.parametrize("mode", ["tensor", "row"])
def test_requests_with_adapters_hold_what_was_predicted(mode: str, tmp_path: Path) -> None:
    """A second engine with its own weights and values, and A and B. Without an adapter, none of these."""
    size = Size(layers=2, hidden=512, heads=8, kv_heads=8, feed_forward=4096, vocabulary=1000)
    save(build(size), tmp_path / "model.onnx")
    request = Request(split_mode=mode, lora_slots=128, shapes={"input_ids": (1, 16)}, tensor_split=[1, 1])
    plan = plan_model(tmp_path / "model.onnx", "2xcpu", request)
    slotted = [rank.memory.sums > 4 << 20 and rank.memory.adapters > 32 << 20 for rank in plan.ranks]
    assert slotted == [True, mode != "row"]  # there slots are on the main rank
    compile_model(plan, tmp_path / "package", verify=False)
    sizes = {slot.names[0]: (slot.inputs, slot.outputs) for slot in plan.analysis.slots}
    file = write_peft(tmp_path / "style", random_pairs(sizes, 128, size=0.02))
    feeds, peaks = make_inputs(read_manifest(tmp_path / "package").inputs), []
    for adapters in ([], [(str(file), 1.0)]):
        ranks = measured(tmp_path / "package", feeds, adapters)
        assert all(abs(rank.peak - rank.predicted_total) < 16 << 20 for rank in ranks)
        peaks.append([rank.peak for rank in ranks])
    assert [more - plain > 32 << 20 for plain, more in zip(*peaks, strict=True)] == slotted


@needs_parts_freed
@pytest.mark.parametrize(("steps", "mode"), [(1, "tensor"), (2, "layer")])
def test_weights_that_are_made_of_others_while_loading(steps: int, mode: str, tmp_path: Path) -> None:
    """Matrices that are split off stacks, as exporters write experts: all are folded before the first is packed.

    With a second step each is in memory twice then.
    """
    b, wide = Block(), 1024
    x = b.data("x", (2, wide), ["n", wide])

    def parts(name: str) -> list[ir.Value]:
        if steps == 1:
            return list(b.ops("Split", b.w(name, 6 * wide, wide), b.ints(*[wide] * 6), axis=0, outputs=6))
        stacked = b.ops("Split", b.w(name, 6, wide, wide), b.ints(*[1] * 6), axis=0, outputs=6)
        return [b.op("Squeeze", part, b.ints(0)) for part in stacked]

    for number in range(3):
        for up, down in zip(parts(f"up{number}"), parts(f"down{number}"), strict=True):
            x = b.op("Softmax", b.op("MatMul", b.op("Tanh", b.op("MatMul", x, up)), down))
    b.give(x, "y")
    save(b.model(), tmp_path / "model.onnx")
    asked = Request(split_mode=mode, tensor_split=[1, 1], shapes={"x": (2, wide)})
    plan = plan_model(tmp_path / "model.onnx", "2xcpu", asked)
    compile_model(plan, tmp_path / "package", verify=False)
    for rank in measured(tmp_path / "package", b.feeds):
        assert rank.predicted_weights > 64 << 20
        assert abs(rank.peak / rank.predicted_total - 1) < 0.1


def test_what_is_unaccounted_for_is_shown_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a tiny model it may be several times the peak."""
    shown = io.StringIO()
    monkeypatch.setattr(terminal.out, "_file", shown)
    print_memory([RankMemory("cpu0", 1 << 20, 2 << 20, 1 << 10, 13 << 20, 14 << 20)])
    assert "-12.0 MiB" in shown.getvalue()
    assert "%" not in shown.getvalue()


def test_ranks_as_processes_are_measured_where_they_run(package: Path) -> None:
    load = partial(Session, package, threads=1, ranks="processes")
    with load() as session:
        session.run(decoder_feeds())
        assert [rank.peak > rank.loaded > 0 for rank in measure_ranks(load, session, decoder_feeds())] == [True] * 3
        session.run(decoder_feeds())


def test_groups_of_ranks_are_all_measured(decoder: Path) -> None:
    load = partial(Session, compile_mode(decoder, "batch"), threads=1)
    with load() as session:
        names = [rank.device for rank in measure_ranks(load, session, decoder_feeds())]
    assert names == ["cpu0", "cpu1"]
