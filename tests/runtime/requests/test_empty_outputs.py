"""Requests without rows or tokens, on which GPU and recurrent kernels divide by zero and crash."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from models import llama_fused
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.errors import FeedError
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.requests.empty_outputs import EmptyOutputs
from tests.compiler.caches.test_caches import OPTIMUM
from tests.compiler.caches.test_preamble import HALF, compiled
from tests.conftest import DECODER, LAYER, assert_close, decoder_feeds, run_whole
from tests.helpers.blocks import Block
from tests.helpers.needs import needs_caches
from tests.helpers.written_decoder import feeds

GPU, CPU = Device("cuda", 0), Device("cpu", 0)


@needs_caches
@pytest.mark.usefixtures("gpus")
def test_gpus_get_rows_and_tokens(tmp_path: Path) -> None:
    style = replace(OPTIMUM, dtype=HALF)
    manifest = read_manifest(compiled(style, tmp_path, "layer", ["cuda0"]))
    whole = feeds(style, 2, 4, 3)
    no_rows = {name: array[:0] for name, array in whole.items()}
    no_tokens = {**whole, "input_ids": whole["input_ids"][:, :0]}
    on_gpu = EmptyOutputs(manifest, [GPU])
    on_gpu.check(feeds(style, 2, 4, 0))
    on_cpu = EmptyOutputs(manifest, [CPU])
    on_cpu.check(no_tokens)
    with pytest.raises(
        FeedError, match="'batch' is 0 in the input 'input_ids', and ONNX Runtime would end the process"
    ):
        on_cpu.check(no_rows)
    for request in (no_rows, no_tokens):
        with pytest.raises(FeedError, match="is 0 in the input 'input_ids', and GPUs run no requests without"):
            on_gpu.check(request)


@pytest.mark.parametrize(("operator", "gates", "sizes"), [("LSTM", 4, ["n"]), ("GRU", 3, ["n", "t"])])
def test_recurrent_layers_get_rows(operator: str, gates: int, sizes: list[str], tmp_path: Path) -> None:
    """ONNX Runtime's LSTM and GRU crash without rows: the request is refused, and the next one runs."""
    block = Block()
    x = block.data("x", (3, 2, 6), ["t", "n", 6])
    recurrent, hidden = (block.w(name, 1, gates * 5, size) for name, size in (("W", 6), ("R", 5)))
    block.give(block.op(operator, x, recurrent, hidden, hidden_size=5), shape=["t", 1, "n", 5])
    save(block.model(), tmp_path / "model.onnx")
    compile_model(
        plan_model(tmp_path / "model.onnx", "2xcpu", Request(split_mode="batch")), tmp_path / "package", verify=False
    )
    with Session(tmp_path / "package") as session:
        assert session.manifest.filled_sizes == sizes
        for feeds in ({"x": block.feeds["x"][:, :0]}, {"x": block.feeds["x"][:0]})[: len(sizes)]:
            with pytest.raises(FeedError, match=r"is 0 in the input 'x', and ONNX Runtime would end the process"):
                session.run(feeds)
        assert_close(session.run(block.feeds), run_whole(tmp_path / "model.onnx", block.feeds))


def test_grouped_attention_gets_rows(tmp_path: Path) -> None:
    """ONNX Runtime divides by the number of rows: SIGFPE would end the caller's process."""
    save(llama_fused.build(DECODER), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", "2xcpu", LAYER), tmp_path / "package", verify=False)
    whole = decoder_feeds(batch=1)
    feeds = {name: array for name, array in whole.items() if name != "position_ids"}
    with Session(tmp_path / "package") as session:
        with pytest.raises(FeedError, match=r"'batch' is 0 in the input 'input_ids', and ONNX Runtime would end"):
            session.run({name: array[:0] for name, array in feeds.items()})
        assert_close(session.run(feeds), run_whole(tmp_path / "model.onnx", feeds))
