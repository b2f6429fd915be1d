"""Feeds and outputs in the memory of real GPUs, one or two, by CuPy and, where it is installed, PyTorch.

python -m pytest tests/gpu/test_gpu_feeds.py -m gpu -n 0
python -m tests.gpu.test_gpu_feeds  # what a large feed and a large output take, by the way that they go
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from models.llama import Size
from models.llama_fused import build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.hardware.gpus import list_gpus, need_cupy
from splitc.runtime.ranks.kept_recordings import NEW
from splitc.runtime.ranks.loop import Replay
from splitc.runtime.tools.compare import compare
from splitc.runtime.tools.unsplit import CPU, open_unsplit

GPUS = min(2, len(list_gpus()))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]

SIZE = Size(layers=4, hidden=512, heads=8, kv_heads=4, feed_forward=1024, vocabulary=1000, dtype=ir.DataType.FLOAT16)
# More runs than are needed until a request is replayed.
RUNS = NEW + 4
# A model with large data and little work: y = x + 1 for this many numbers.
MANY = 64 << 20
LARGE = """<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y) {
    c = Constant <value = float {1}> () y = Add (x, c)
}"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Session]]:
    folder = tmp_path_factory.mktemp("model")
    save(build(SIZE), folder / "model.onnx")
    asked = Request(engine="onnxruntime")
    compile_model(plan_model(folder / "model.onnx", ["cuda0"], asked), folder / "package", verify=False)
    with (
        open_unsplit(folder / "model.onnx", CPU, 4) as whole,
        Session(folder / "package") as session,
    ):
        yield whole, session


def feeds(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    caches = {
        f"past_key_values.{layer}.{part}": generator.standard_normal((1, SIZE.kv_heads, 16, SIZE.head)).astype("f2")
        for layer in range(SIZE.layers)
        for part in ("key", "value")
    }
    ids = generator.integers(0, SIZE.vocabulary, (1, 3))
    return {"input_ids": ids, "attention_mask": np.ones((1, 19), np.int64), **caches}


def agree(expected: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    cupy = need_cupy()
    plain = {name: cupy.asnumpy(array) for name, array in outputs.items()}
    assert all(each.passed for each in compare(expected, plain, number_type="float16"))


def late(given: Mapping[str, Any]) -> dict[str, Any]:
    """Feeds on the first GPU, which the caller's stream writes only after long work."""
    cupy = need_cupy()
    ready = {name: cupy.asarray(array) for name, array in given.items()}
    made = {name: cupy.zeros_like(array) for name, array in ready.items()}
    busy = cupy.ones((4096, 4096), "f4")
    for _ in range(20):
        busy = busy @ busy * 1e-4
    for name, array in ready.items():
        made[name] += array
    return made


@pytest.mark.parametrize("own", [False, True], ids=["default", "own"])
def test_feeds_wait_for_the_callers_stream(opened: tuple[Any, Session], own: bool) -> None:
    """On the default stream and on one of the caller's, eagerly and in replayed stages."""
    cupy = need_cupy()
    whole, session = opened
    stream = cupy.cuda.Stream(non_blocking=True) if own else cupy.cuda.Stream.null
    with cupy.cuda.Device(0), stream:
        for seed in range(RUNS):
            given = feeds(seed)
            expected = whole(given)
            outputs, served = session.run_timed(late(given), on_device=True)
            assert all(isinstance(array, cupy.ndarray) for array in outputs.values())
            agree(expected, outputs)
            agree(expected, session.run(late(given)))
            agree(expected, session.run(given, on_device=True))
    assert all([type(span.step) for span in each.spans] == [Replay] for each in served.values())
    assert session.notes == []


def test_outputs_are_the_callers_to_keep(opened: tuple[Any, Session]) -> None:
    whole, session = opened
    kept = []
    for seed in range(2 * RUNS):
        given = feeds(seed)
        kept.append((whole(given)["logits"], session.run(given, on_device=True)["logits"]))
    for expected, found in kept:
        agree({"logits": expected}, {"logits": found})


def test_submitted_feeds_may_be_changed(opened: tuple[Any, Session]) -> None:
    cupy = need_cupy()
    whole, session = opened
    futures = []
    with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
        for seed in range(RUNS):
            given = late(feeds(seed))
            futures.append(session.submit(given, on_device=True))
            for array in given.values():
                array.fill(0)
    for seed, future in enumerate(futures):
        agree(whole(feeds(seed)), future.result(60))


def test_pytorch_passes_its_tensors_on(opened: tuple[Any, Session]) -> None:
    torch = pytest.importorskip("torch")
    whole, session = opened
    with torch.cuda.stream(torch.cuda.Stream()):
        for seed in range(RUNS):
            given = feeds(seed)
            busy = torch.ones((4096, 4096), device="cuda")
            for _ in range(20):
                busy = busy @ busy * 1e-4
            tensors = {name: torch.from_numpy(array).to("cuda", non_blocking=True) for name, array in given.items()}
            found = session.run(tensors, on_device=True)
            back = {name: torch.from_dlpack(array).cpu().numpy() for name, array in found.items()}
            agree(whole(given), back)


def _median(work: Any) -> float:
    seconds = []
    for _ in range(15):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return 1e3 * float(np.median(seconds[5:]))


def main() -> None:
    """Print the milliseconds of requests of 256 MiB for each way of feeding."""
    cupy = need_cupy()
    with tempfile.TemporaryDirectory(prefix="splitc-feeds-") as place:
        ir.save(ir.from_onnx_text(LARGE), Path(place) / "model.onnx")
        plan = plan_model(Path(place) / "model.onnx", ["cuda0"], Request(split_mode="layer", engine="onnxruntime"))
        compile_model(plan, Path(place) / "package", verify=False)
        on_host = np.ones(MANY, np.float32)
        on_gpu = cupy.asarray(on_host)
        with Session(Path(place) / "package") as session:
            for name, feed in (("host", on_host), ("GPU", on_gpu)):
                for on_device in (False, True):
                    took = _median(lambda feed=feed, on=on_device: session.run({"x": feed}, on_device=on))
                    print(f"feed on {name}, output on {'GPU' if on_device else 'host'}: {took:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
