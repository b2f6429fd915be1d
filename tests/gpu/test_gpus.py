"""Sessions on real GPUs, as many as there are up to four, with ONNX Runtime's CUDA provider."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from models.llama import Size, build
from models.llama_fused import build as build_fused
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.errors import EngineError
from splitc.runtime.gpu.array import Tape
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.hardware.devices import Device
from splitc.runtime.hardware.gpus import list_gpus
from splitc.runtime.ranks.recording import capture
from splitc.runtime.tools.compare import compare
from splitc.runtime.tools.unsplit import CPU, open_unsplit
from tests.compiler.caches.test_caches import OPTIMUM
from tests.helpers.adapters import random_pairs, write_peft
from tests.helpers.workers import workers_of
from tests.helpers.written_decoder import feeds as decoder_feeds
from tests.helpers.written_decoder import following, without_states, write

GPUS = min(4, len(list_gpus()))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]
several = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")

SIZE = Size(
    layers=max(3, GPUS), hidden=512, heads=8, kv_heads=4, feed_forward=1024, vocabulary=1000, dtype=ir.DataType.FLOAT16
)
ROOM = 64
MODES = ["layer", "row", "tensor"]


@pytest.fixture(scope="module", params=MODES)
def package(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp(request.param)
    save(build_fused(SIZE), folder / "model.onnx")
    asked = Request(split_mode=request.param, engine="onnxruntime", spread=True)
    compile_model(plan_model(folder / "model.onnx", [f"{GPUS}xcuda"], asked), folder / "package", verify=False)
    yield folder / "model.onnx", folder / "package"


def feeds(tokens: int, past: int, seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    caches = {
        f"past_key_values.{layer}.{part}": generator.standard_normal((1, SIZE.kv_heads, past, SIZE.head)).astype("f2")
        for layer in range(SIZE.layers)
        for part in ("key", "value")
    }
    ids = generator.integers(0, SIZE.vocabulary, (1, tokens))
    return {"input_ids": ids, "attention_mask": np.ones((1, tokens + past), np.int64), **caches}


def agree(expected: dict[str, Any], outputs: dict[str, Any]) -> None:
    assert all(each.passed for each in compare(expected, outputs, number_type="float16"))


@several
def test_outputs_are_the_models(package: tuple[Path, Path]) -> None:
    with open_unsplit(package[0], CPU, 4) as whole, Session(package[1], in_flight=4) as session:
        many = [feeds(*sizes, seed) for seed in range(4) for sizes in ((1, 8), (5, 3), (1, 20), (1, 8))]
        for given, outputs in zip(many, session.map(many)):
            agree(whole(given), outputs)
        for given in many:  # by now all shapes were seen before
            agree(whole(given), session.run(given))
        assert session.notes == []


@several
def test_states_are_where_the_graph_left_them(package: tuple[Path, Path]) -> None:
    with ExitStack() as stack:
        whole = stack.enter_context(open_unsplit(package[0], CPU, 4))
        session = stack.enter_context(Session(package[1]))
        one, other = (stack.enter_context(session.start(capacity=ROOM)) for _ in range(2))
        for first, sequence in ((1, one), (500, other)):
            states = {
                state.input: np.zeros((1, SIZE.kv_heads, ROOM, SIZE.head), "f2") for state in session.manifest.states
            }
            for step in range(12):
                given = {
                    "input_ids": np.array([[first + step]]),
                    "attention_mask": (np.arange(ROOM) <= step).astype(np.int64)[None],
                }
                expected = whole({**given, **states})
                states = {state.input: expected[state.output] for state in session.manifest.states}
                agree({"logits": expected["logits"]}, sequence.run(given))
        assert session.notes == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "devices", [["cuda0", "cpu0"], ["cpu0", "cuda0"], ["cuda0", "cuda0"], ["cuda0", "cuda1", "cpu0"]]
)
def test_devices_that_meet_on_the_host(mode: str, devices: list[str], tmp_path: Path) -> None:
    """A GPU with a CPU device, or two ranks on one GPU, exchange values inside their engines, and replay nothing."""
    if "cuda1" in devices and GPUS < 2:
        pytest.skip("needs two GPUs")
    save(build(replace(SIZE, dtype=ir.DataType.FLOAT)), tmp_path / "model.onnx")
    planned = devices if len({*devices}) == len(devices) else ["cuda0", "cuda1"]
    asked = Request(split_mode=mode, engine="onnxruntime", spread=True, memory=[f"{name}=8GiB" for name in planned])
    compile_model(plan_model(tmp_path / "model.onnx", planned, asked), tmp_path / "package", verify=False)
    package = Session(tmp_path / "package", devices=devices, in_flight=2)
    with open_unsplit(tmp_path / "model.onnx", CPU, 4) as whole, package as session:
        assert [len(rank.engines) for rank in session.manifest.ranks] == [1] * len(devices)
        sizes = ((1, 8), (5, 3), (1, 8), (1, 20), (1, 8), (1, 8))
        many = [in_single(feeds(*size, seed)) for seed, size in enumerate(sizes)]
        for given, outputs in zip(many, session.map(many)):
            agree(whole(given), outputs)
        assert [memory.peak > 0 for memory in session.device_memory()] == [True] * len(devices)


def in_single(given: dict[str, Any]) -> dict[str, Any]:
    """Feeds of a decoder in single precision, which also takes positions."""
    tokens, all_tokens = given["input_ids"].shape[1], given["attention_mask"].shape[1]
    single = {name: array.astype("f4") if array.dtype == "f2" else array for name, array in given.items()}
    return {**single, "position_ids": np.arange(all_tokens - tokens, all_tokens)[None]}


@pytest.mark.parametrize("graphs", [True, False])
def test_rank_that_fails_fails_one_request(tmp_path: Path, graphs: bool) -> None:
    given = feeds(3, 8, 0)
    save(build_fused(SIZE), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["cuda0"], Request()), tmp_path / "package")
    with Session(tmp_path / "package", cuda_graphs=graphs, in_flight=4) as session:
        right = session.run(given)
        engine = workers_of(session)[-1].computation._program.engines[-1]

        def fail(*_: Any) -> Any:
            raise EngineError("an engine failed on purpose")

        engine.run = fail  # type: ignore[method-assign, assignment]
        start = time.monotonic()
        with pytest.raises(EngineError, match="on purpose"):
            session.run(given)
        assert time.monotonic() - start < 10
        del engine.run  # and not its own method back, which would make it keep itself
        for future in [session.submit(given) for _ in range(8)]:
            agree(right, future.result(timeout=60))


@several
@pytest.mark.parametrize("mode", MODES)
def test_optional_inputs(mode: str, tmp_path: Path) -> None:
    """Requests that replace weights run eagerly, alternating with replayed ones."""
    save(build_fused(SIZE), tmp_path / "plain.onnx")
    model = ir.load(tmp_path / "plain.onnx")
    weights = {name: value for name, value in model.graph.initializers.items() if value.dtype == ir.DataType.FLOAT16}
    for value in weights.values():
        assert value.const_value is not None
        value.shape, value.type = ir.Shape(value.const_value.shape.numpy()), ir.TensorType(ir.DataType.FLOAT16)
        model.graph.inputs.append(value)
    ir.save(model, tmp_path / "model.onnx", external_data="weights")
    asked = Request(split_mode=mode, engine="onnxruntime", spread=True)
    compile_model(plan_model(tmp_path / "model.onnx", [f"{GPUS}xcuda"], asked), tmp_path / "package")
    others = {n: v.const_value.numpy() * np.float16(0.75) for n, v in weights.items() if v.const_value is not None}
    given = feeds(1, 8, 0)
    with open_unsplit(tmp_path / "model.onnx", CPU, 4) as whole, Session(tmp_path / "package") as session:
        for turn in range(6):
            fed = {**given, **others} if turn % 3 == 2 else given
            agree(whole(fed), session.run(fed))
        assert session.notes == []


@pytest.mark.parametrize("graphs", [True, False])
def test_engines_with_slots_share_weights(graphs: bool, tmp_path: Path) -> None:
    """An adapter takes memory for its values, A and B, but not for the model again, as predicted."""
    size = replace(SIZE, hidden=4096, heads=32, kv_heads=32, feed_forward=11008, layers=4)
    save(build_fused(size), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["cuda0"], Request(lora_slots=16))
    sizes = {slot.names[0]: (slot.inputs, slot.outputs) for slot in plan.analysis.slots}
    style = write_peft(tmp_path / "style", random_pairs(sizes, 16, size=0.02))
    compile_model(plan, tmp_path / "package", verify=False)
    request = Request(lora=[(str(style), 1.0)])
    compile_model(plan_model(tmp_path / "model.onnx", ["cuda0"], request), tmp_path / "merged", verify=False)
    given = {**feeds(5, 0, 0), **{name: array[:, :, :0] for name, array in caches_of(size).items()}}
    with Session(tmp_path / "merged") as session:
        expected = session.run(given)
    with Session(tmp_path / "package", cuda_graphs=graphs) as session:
        session.adapters.load("style", style)
        plain = [session.run(given) for _ in range(6)][-1]
        (before,) = session.device_memory()
        adapted = [session.run(given, adapters="style") for _ in range(6)][-1]
        (after,) = session.device_memory()
        agree(expected, adapted)
        for name, array in session.run(given).items():
            np.testing.assert_array_equal(array, plain[name])
    assert after.peak - before.peak < before.predicted_weights / 4
    assert 0.8 * after.peak < after.predicted_total < 1.5 * after.peak


def caches_of(size: Size) -> dict[str, Any]:
    """Caches of one token, all zeros."""
    shape = (1, size.kv_heads, 1, size.head)
    parts = [(layer, part) for layer in range(size.layers) for part in ("key", "value")]
    return {f"past_key_values.{layer}.{part}": np.zeros(shape, "f2") for layer, part in parts}


@several
def test_compile_compares_on_gpus_and_says_so(tmp_path: Path) -> None:
    save(build_fused(SIZE), tmp_path / "model.onnx")
    asked = Request(split_mode="tensor", engine="onnxruntime")
    said: list[str] = []
    plan = plan_model(tmp_path / "model.onnx", [f"{GPUS}xcuda"], asked)
    compile_model(plan, tmp_path / "package", say=said.append)
    assert any("outputs agree with the unsplit model on cuda0" in each for each in said)


@several
def test_caches_that_grow(tmp_path: Path) -> None:
    """Caches that grow with each token: the tokens are those of CPU devices."""
    save(build(replace(SIZE, dtype=ir.DataType.FLOAT)), tmp_path / "model.onnx")
    asked = Request(split_mode="tensor", engine="onnxruntime")
    compile_model(plan_model(tmp_path / "model.onnx", [f"{GPUS}xcuda"], asked), tmp_path / "package")
    with Session(tmp_path / "package", devices=[f"{GPUS}xcpu"]) as on_cpu, Session(tmp_path / "package") as session:
        assert list(session.generate([1, 2, 3], max_new_tokens=16)) == list(
            on_cpu.generate([1, 2, 3], max_new_tokens=16)
        )


@pytest.mark.parametrize("mode", [pytest.param("tensor", marks=several), "layer"])
def test_masks_of_padding_and_windows(tmp_path: Path, mode: str) -> None:
    """Exported decoders, whose attention hides later tokens by itself if there is no padding."""
    style = replace(OPTIMUM, dtype=onnx.TensorProto.FLOAT16, size=32, layers=4, window=5)
    onnx.save(write(style), tmp_path / "model.onnx")
    asked = Request(split_mode=mode, engine="onnxruntime", spread=True)
    devices = [f"{min(2, GPUS)}xcuda" if mode == "tensor" else "cuda0"]
    compile_model(plan_model(tmp_path / "model.onnx", devices, asked), tmp_path / "package", verify=False)
    with open_unsplit(tmp_path / "model.onnx", CPU, 4) as whole, Session(tmp_path / "package") as session:
        assert session.manifest.preamble is not None and set(session.manifest.preamble.windows.values()) == {5}
        for padded in (0, 0, 3, 0):
            with session.start(64) as sequence:
                request = decoder_feeds(style, 2, 9, 0, padded)
                for _ in range(8):
                    expected = whole(request)
                    agree({"logits": expected["logits"]}, sequence.run(without_states(request)))
                    request = following(style, expected, 2, 1, padded)
        assert session.metrics.replayed > 12


def test_a_mask_of_one_column_is_taken_for_all(tmp_path: Path) -> None:
    """Also where the model has one symbol for both sizes: ONNX Runtime's fused kernel would end the process."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float16[b, h, q, k] x, float16[b, 1, 1, k] mask) => (float16[b, h, q, k] y)
        { scores = Add(x, mask)  y = Softmax(scores) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["cuda0"], Request(engine="onnxruntime"))
    compile_model(plan, tmp_path / "package", verify=False)
    given = {"x": np.linspace(-2, 2, 32, dtype=np.float16).reshape(1, 2, 4, 4), "mask": np.ones((1,) * 4, np.float16)}
    with open_unsplit(tmp_path / "model.onnx", CPU, 4) as whole, Session(tmp_path / "package") as session:
        agree(whole(given), session.run(given))


def test_masks_and_rotations_before_attention_with_a_cache(tmp_path: Path) -> None:
    """Rotation inside of attention would begin at position 0, whatever the mask: it must not be fused there."""
    names = {"q": "wide", "k": "narrow", "v": "narrow"}
    sizes = {"wide": (64, 32), "narrow": (64, 16)}
    cache = "float16[1, 2, past, 8]"
    given = f"float16[1, s, 64] x, float16[s, 4] c, float16[s, 4] d, float16[1, 1, s, all] mask, {cache} pk, {cache} pv"
    made = f"float16[1, s, 32] a, {cache.replace('past', 'all')} k2, {cache.replace('past', 'all')} v2"
    rotate = "com.microsoft.RotaryEmbedding"
    text = (
        '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> '
        f"g ({given}, int32[1] last, int32 total) => ({made}) <int64[1] zero = {{0}}> {{"
        + "".join(f" {name} = MatMul (x, {name}_{weight})" for name, weight in names.items())
        + f" qr = {rotate} <num_heads = 4> (q, zero, c, d)  kr = {rotate} <num_heads = 2> (k, zero, c, d)"
        " a, k2, v2 = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2, causal = 0>"
        " (qr, kr, v, pk, pv, last, total, , , , mask) }"
    )
    model, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    for name, weight in names.items():
        array = (random.standard_normal(sizes[weight]) / 8).astype("f2")
        model.graph.initializer.append(numpy_helper.from_array(array, f"{name}_{weight}"))
    onnx.save(model, tmp_path / "model.onnx")
    shapes = {"c": (1, 4), "d": (1, 4), "mask": (1, 1, 1, 10), "pk": (1, 2, 9, 8), "pv": (1, 2, 9, 8), "x": (1, 1, 64)}
    request = Request(split_mode="layer", engine="onnxruntime", no_fuse=True, shapes=shapes)
    package = tmp_path / "package"
    compile_model(plan_model(tmp_path / "model.onnx", ["cuda0"], request), package, verify=False)
    angles = np.arange(9, 10)[:, None] / np.array([1, 2, 4, 8])
    arrays = {name: random.standard_normal(shape).astype("f2") for name, shape in shapes.items()}
    arrays |= {"c": np.cos(angles).astype("f2"), "d": np.sin(angles).astype("f2")}
    arrays |= {"last": np.array([9], "i4"), "total": np.array(10, "i4")}
    arrays["mask"] = np.where(np.arange(10) % 3, 0, -6e4).astype("f2")[None, None, None]
    with open_unsplit(tmp_path / "model.onnx", CPU, 4) as whole, Session(package) as session:
        agree(whole(arrays), session.run(arrays))


def test_capture_of_nothing_leaves_streams_as_they_were() -> None:
    gpu = GpuDevice(Device("cuda", 0))
    gpu.attach()

    def fail() -> None:
        raise EngineError("nothing was given, on purpose")

    with pytest.raises(EngineError, match="on purpose"):
        capture(gpu, Tape(), fail)
    array = np.arange(10)
    np.testing.assert_array_equal(gpu.download({"": gpu.upload(array)})[""], array)


@several
def test_sums_by_kernels_are_those_of_the_parts() -> None:
    """Ranks are processes; see the program `sums`."""
    subprocess.run([sys.executable, "-m", "tests.gpu.sums", "--gpus", str(GPUS)], check=True)
