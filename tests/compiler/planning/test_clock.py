"""Predicted times of a rank's nodes."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from models import llama_fused
from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, plan_model
from splitc.compiler.planning import clock
from splitc.compiler.planning.clock import Clock, rank_speed
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.hardware.machine import Machine, MeasuredSpeed
from splitc.runtime.hardware.profiles import CPU, HOPPER, HOST, Link
from tests.helpers.blocks import Block


def test_more_threads_take_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large operator is divided among threads, which takes time to start; a small one is not."""
    monkeypatch.setattr(clock, "cores", lambda: 16)
    save(build(Size(layers=1)), tmp_path / "model.onnx")
    request = Request(shapes={"input_ids": (8, 512)}, memory=("4GiB",))
    plan = plan_model(tmp_path / "model.onnx", ["cpu0"], request)
    rank, graph = plan.ranks[0], plan.analysis.graph
    spread = {}
    for node in graph.nodes:
        times = [Clock(plan.analysis, [rank], Machine(), threads).seconds(rank, [node], 1) for threads in (1, 2, 4, 16)]
        assert times == sorted(times, reverse=True)
        spread[node] = times[0] - times[-1]
        assert times[-1] >= HOST.spreading or not spread[node]
    assert any(spread.values())
    assert not all(spread.values())


@pytest.mark.parametrize(
    ("together", "four"), [(None, 10.0 * (1 + 3 * HOST.bandwidth_gain)), (25.0, 25.0), (90.0, 40.0)]
)
def test_cores_read_as_fast_as_was_measured(
    together: float | None, four: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One core reads 10 bytes a second: four cores read for one rank, or two for each of two ranks."""
    monkeypatch.setattr(clock, "cores", lambda: 4)
    (cpu,) = parse_devices(["cpu0"])
    machine = Machine(speeds={"cpu": MeasuredSpeed(bytes=10.0, together=together)})
    assert rank_speed(cpu, 4, 1, machine).bytes == pytest.approx(four)
    assert rank_speed(cpu, 2, 2, machine).bytes == pytest.approx(four / 2)
    assert rank_speed(cpu, 1, 1, machine).bytes == pytest.approx(10.0)


def test_requests_of_gpus_cross_from_the_host(tmp_path: Path) -> None:
    """One GPU's rank is a thread, several are processes. A middle stage gives only its outputs to the host.

    Unfused, since masks of caches in place cross too.
    """
    save(build(Size(layers=2)), tmp_path / "model.onnx")
    request = Request(shapes={"input_ids": (8, 512)}, memory=("8GiB",), engine="onnxruntime", spread=True, no_fuse=True)
    link = Link(5.0, 1e-9)
    machine = Machine({"cpu-cuda0": link, "cpu-cuda1": link})
    (alone,) = plan_model(tmp_path / "model.onnx", ["cuda0"], request).ranks
    plan = plan_model(tmp_path / "model.onnx", ["2xcuda"], request)
    ranks = plan.ranks
    ids, (logits,) = 8 * 512 * 8, [v for v in plan.analysis.graph.graph.outputs if v.name == "logits"]
    size = plan.analysis.costs.value_bytes(logits)
    first, last = (Clock(plan.analysis, ranks, machine, 1).feeding(rank) for rank in ranks)
    assert first > HOST.process_hop + ids * link.per_byte
    assert last == pytest.approx(HOST.process_hop + HOST.array + size * link.per_byte, rel=0.01)
    whole = Clock(plan.analysis, [alone], machine, 1).feeding(alone)
    assert whole > 2 * HOST.thread_hop + size * HOPPER.copy.per_byte
    assert whole < 2 * HOST.process_hop + size * link.per_byte


def test_attention_on_a_gpu_starts_as_slowly_for_half_of_its_heads(tmp_path: Path) -> None:
    """As does any kernel. Ranks on GPUs wait less for each other than ranks on CPU devices."""
    save(llama_fused.build(Size(layers=1, dtype=ir.DataType.FLOAT16)), tmp_path / "model.onnx")
    request = Request(shapes={"input_ids": (1, 64)}, memory=("8GiB",), split_mode="layer")
    meetings = {}
    for device, profile in (("cuda0", HOPPER), ("cpu0", CPU)):
        plan = plan_model(tmp_path / "model.onnx", [device], request)
        node = next(node for node in plan.analysis.graph.nodes if node.op_type == "GroupQueryAttention")
        times = Clock(plan.analysis, plan.ranks, Machine(), 1)
        whole = times.seconds(plan.ranks[0], [node], 1)
        half = times.seconds(plan.ranks[0], [node], 1, lambda _: 0.5)
        assert 2 * half - whole == pytest.approx(profile.launch + profile.attention_start, abs=1e-12)
        meetings[device] = times.meeting(1.0)
    assert 1 < meetings["cuda0"] < meetings["cpu0"]


def test_a_gpu_takes_the_steps_of_a_recurrent_network_one_after_another(tmp_path: Path) -> None:
    block, steps, wide = Block(), 200, 16
    weights = [block.w(name, 2, 4 * wide, wide) for name in "wr"]
    data = block.data("x", (steps, 2, wide))
    (made,) = block.ops("LSTM", data, *weights, outputs=1, hidden_size=wide, direction="bidirectional")
    block.give(made, shape=[steps, 2, 2, wide])
    save(block.model(), tmp_path / "model.onnx")
    for device, least, most in (("cuda0", 2 * steps * HOPPER.step, 3 * steps * HOPPER.step), ("cpu0", 0.0, 5e-4)):
        plan = plan_model(tmp_path / "model.onnx", [device], Request(memory=("8GiB",)))
        node = next(node for node in plan.analysis.graph.nodes if node.op_type == "LSTM")
        assert least <= Clock(plan.analysis, plan.ranks, Machine(), 1).seconds(plan.ranks[0], [node], 1) < most
