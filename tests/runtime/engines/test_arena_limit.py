"""Requests beyond a budget, or beyond what a container has free."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import Writer
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.engines import arena_limit
from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeBackend, OnnxRuntimeEngine
from splitc.runtime.errors import DoesNotFitError, EngineError
from tests.conftest import assert_close, decoder_feeds, until
from tests.helpers.adapters import random_pairs, write_peft
from tests.helpers.feeds import LAYERS
from tests.helpers.needs import needs_caches
from tests.helpers.packages import compile_mode

SMALL, LARGE = decoder_feeds(batch=1, new=2, past=4), decoder_feeds(batch=64, new=64, past=64)


@pytest.mark.parametrize(("mode", "ranks"), [("layer", "processes"), ("tensor", "threads")])
def test_request_beyond_the_budget_fails_alone(decoder: Path, tmp_path: Path, mode: str, ranks: str) -> None:
    shapes = {name: value.shape for name, value in SMALL.items()}
    plan = plan_model(decoder, ["2xcpu"], Request(split_mode=mode, memory=["20MiB"], shapes=shapes))
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package", ranks=ranks) as session:
        expected = session.run(SMALL)
        for _ in range(2):
            with pytest.raises(EngineError, match=r"more memory than the budget leaves: .* may take [78]\.\d+ MiB, "):
                session.run(LARGE)
            for name, value in session.run(SMALL).items():
                np.testing.assert_array_equal(value, expected[name])


@needs_caches
def test_sums_of_adapters_beyond_the_budget_are_refused(decoder: Path, tmp_path: Path) -> None:
    """Unused ones are dropped first. Engines with slots have the limit too."""
    shapes = {name: value.shape for name, value in SMALL.items()}
    request = Request(split_mode="tensor", memory=["16.4MiB"], shapes=shapes, lora_slots=16)
    most = compile_model(plan_model(decoder, ["2xcpu"], request), tmp_path / "package", verify=False).most_rank
    assert most is not None and 16 <= most < 32
    sizes = {f"model.layers.{layer}.self_attn.q_proj": (64, 64) for layer in range(LAYERS)}
    files = {rank: write_peft(tmp_path / f"{rank}", random_pairs(sizes, rank)) for rank in (16, 64)}
    with Session(tmp_path / "package", ranks="processes") as session:
        plain = session.run(SMALL)
        for rank, file in files.items():
            session.adapters.load(f"rank{rank}", file)
        expected = session.run(SMALL, adapters="rank16")
        for times in (0.5, 0.25, 2.0):
            session.run(SMALL, adapters={"rank16": times})
        with pytest.raises(DoesNotFitError, match=rf"leave room for adapters of rank {most} in all, .* takes 64, and"):
            session.run(SMALL, adapters="rank64")
        with pytest.raises(EngineError, match=r"more memory than the budget leaves: .* may take [78]\.\d+ MiB, "):
            session.run(LARGE, adapters="rank16")
        with session.start(adapters="rank16"), pytest.raises(DoesNotFitError, match=r"open sequences have 16\. End"):
            session.run(SMALL, adapters={"rank16": 0.5})
        assert_close(session.run(SMALL, adapters="rank16"), expected)
        assert_close(session.run(SMALL), plain)


def test_engines_of_a_rank_have_the_limit_together(tmp_path: Path) -> None:
    """Two products, each with weights and results of 1 MiB, within the bytes that one alone needs."""
    w = Writer()
    y = w.op("MatMul", w.input("x", ir.DataType.FLOAT, ["n", 512]), w.weight("w", ir.tensor(np.eye(512, dtype="f4"))))
    w.output(w.op("Relu", y), "y", ir.DataType.FLOAT, ["n", 512])
    ir.save(w.model(), tmp_path / "model.onnx", external_data="model.data", size_threshold_bytes=0)
    backend, array = OnnxRuntimeBackend(1), np.ones((512, 512), np.float32)

    def run(engines: Sequence[OnnxRuntimeEngine]) -> None:
        results = [engine.run({"x": backend.upload(array)}) for engine in engines]
        for made in results:
            np.testing.assert_array_equal(backend.download(made)["y"], array)

    def load() -> list[OnnxRuntimeEngine]:
        return [backend.load(tmp_path / "model.onnx") for _ in range(2)]

    backend.limit(4 << 20)
    run(load())
    with backend.loading():
        together = load()
    run(together[:1])
    with pytest.raises(EngineError, match="more memory than the budget leaves"):
        run(together)
    run(together[1:])
    backend.limit(8 << 20)
    with backend.loading():
        together = load()
    run(together)


def test_without_a_budget_there_is_no_limit(decoder: Path) -> None:
    with Session(compile_mode(decoder, "one device")) as session:
        assert session.manifest.ranks[0].limit_bytes is None
        assert session.run(LARGE)["logits"].shape[0] == 64


def test_containers_bound_engines(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those without a session, which divides what is free."""
    monkeypatch.setattr(arena_limit, "memory_limit", lambda: (1 << 30, 10 << 20))
    with Session(compile_mode(decoder, "one device")) as session:
        session.run(SMALL)
        with pytest.raises(EngineError, match=r"may take 10\.0 MiB"):
            session.run(LARGE)
        session.run(SMALL)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_copy_of_a_process_that_loads_an_engine_may_load_its_own() -> None:
    begun, forked = threading.Event(), threading.Event()

    def load() -> None:
        with arena_limit.limited_arena(1 << 30):
            begun.set()
            assert forked.wait(20)

    loading = threading.Thread(target=load)
    loading.start()
    assert begun.wait(20)
    child = os.fork()
    if child == 0:
        with arena_limit.limited_arena(1 << 30):
            os._exit(0)
    forked.set()
    loading.join()
    try:
        until(lambda: os.waitpid(child, os.WNOHANG) != (0, 0))
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
