"""ONNX Runtime's engines on GPUs, as far as it can be tested without one."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from splitc.runtime.engines import LoadOptions, onnxruntime_gpu
from splitc.runtime.engines.kind import BackendOptions
from splitc.runtime.engines.kinds import find_kind
from splitc.runtime.engines.onnx_session import open_onnx
from splitc.runtime.engines.onnxruntime_gpu import OnnxRuntimeGpuBackend, OnnxRuntimeGpuEngine
from splitc.runtime.errors import EngineError, PackageError
from splitc.runtime.gpu.array import Use
from splitc.runtime.gpu.weight_places import SwapBuffer
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import BuildOptions, EngineFile, Weight
from tests.helpers.needs import needs_dlpack


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Fake libraries that take time to load; the times at which loading began."""
    begun: list[float] = []

    def preload() -> None:
        begun.append(time.monotonic())
        time.sleep(0.02 * len(begun))  # the first to begin is the first to end
        print("loading")

    monkeypatch.setattr(ort, "preload_dlls", preload, raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    onnxruntime_gpu._load_libraries_once.cache_clear()
    yield begun
    onnxruntime_gpu._load_libraries_once.cache_clear()


def test_libraries_are_loaded_once_for_all_threads(libraries: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank's thread asks for it: two at once would leave standard output redirected."""
    before = sys.stdout
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: onnxruntime_gpu._load_libraries(), range(8)))
    assert sys.stdout is before
    assert len(libraries) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "loading\n")


@pytest.mark.parametrize(("graphs", "shares"), [(True, True), (True, False), (False, False)])
def test_what_can_not_be_captured_is_loaded_without_graphs(graphs: bool, shares: bool) -> None:
    asked: list[bool] = []

    def open_session(captured: bool, known_shapes: bool) -> Any:
        asked.append(captured)
        if captured:
            raise PackageError("can't load it") from RuntimeError("in whatever words")
        return "session"

    backend = OnnxRuntimeGpuBackend.__new__(OnnxRuntimeGpuBackend)
    backend._cuda_graphs = graphs
    sessions, why = backend._open_sessions("stage0.onnx", open_session, shares, LoadOptions())
    assert sessions == ["session"]
    assert asked == ([True, False] if graphs else [False])
    assert why == ("stage0.onnx can't be loaded with CUDA graphs (in whatever words)" if graphs else None)


def test_runs_that_are_never_captured_are_waited_for() -> None:
    """Where no other rank is waited for: what kernels leave is freed then, not in a callback at the end."""
    backend = OnnxRuntimeGpuBackend.__new__(OnnxRuntimeGpuBackend)
    backend._launching, backend._waiting = (onnxruntime_gpu._run_options(0, waits) for waits in (False, True))
    chosen = {
        (is_captured, is_alone): {
            options.get_run_config_entry("disable_synchronize_execution_providers")
            for options in backend._run_options_for(is_captured, is_alone)
        }
        for is_captured in (True, False)
        for is_alone in (True, False)
    }
    assert chosen == {(True, True): {"1"}, (True, False): {"1"}, (False, True): {"0"}, (False, False): {"1"}}


def test_what_can_not_be_loaded_at_all_says_why() -> None:
    def open_session(captured: bool, known_shapes: bool) -> Any:
        raise PackageError(f"captured: {captured}")

    backend = OnnxRuntimeGpuBackend.__new__(OnnxRuntimeGpuBackend)
    backend._cuda_graphs = True
    with pytest.raises(PackageError, match=r"^captured: False$"):
        backend._open_sessions("stage0.onnx", open_session, True, LoadOptions())


@pytest.mark.parametrize(("shares", "expected"), [(True, [(False, False), (True, True)]), (False, [(True, False)])])
def test_shapes_that_come_again_have_a_session_of_their_own(shares: bool, expected: list[tuple[bool, bool]]) -> None:
    """The last session, which is captured. If weights can't be shared, one session serves all shapes."""
    backend = OnnxRuntimeGpuBackend.__new__(OnnxRuntimeGpuBackend)
    backend._cuda_graphs = True
    for branches, option in ((False, True), (True, False)):  # of branches that sizes decide, it is not asked
        how = LoadOptions(EngineFile("", [], [], branches_by_sizes=branches))
        sessions, why = backend._open_sessions("stage0.onnx", lambda *asked: asked, shares, how)  # type: ignore[arg-type,return-value]
        assert (sessions, why) == ([*expected[:-1], (option, shares)], None)


class Bound:
    """A session and its binding: fails as a convolution without a plan does, or computes nothing."""

    def __init__(self, has_plan: bool) -> None:
        self.has_plan = has_plan

    def run(self, *_: Any) -> dict[str, Any]:
        if not self.has_plan:
            raise RuntimeError("Conv: CUDNN_FE failure 8: HEURISTIC_QUERY_FAILED")
        return {}


def engine(searches: Sequence[bool], monkeypatch: pytest.MonkeyPatch) -> OnnxRuntimeGpuEngine:
    """An engine of which each of these searches finds plans for all convolutions, or not."""
    monkeypatch.setattr(onnxruntime_gpu, "KeptBinding", lambda session, device: session)
    made = OnnxRuntimeGpuEngine.__new__(OnnxRuntimeGpuEngine)
    made._gpu = SimpleNamespace(  # type: ignore[assignment]
        name="cuda0", index=0, use=Use.USUAL, tape=None, download=lambda values: {}
    )
    made._name, made._limit, made._options, made._seen = "stage0.onnx", None, (None, None), OrderedDict()  # type: ignore[assignment]
    made._on_host, made._sizes_on_host, made._former = set(), set(), []
    made.inputs, made.optional, made.outputs = [], frozenset(), ["y"]
    first, *others = ([Bound(has_plan)] for has_plan in searches)
    made._others = iter(others)  # type: ignore[arg-type]
    made._bind(first)  # type: ignore[arg-type]
    return made


def test_a_request_without_a_plan_runs_with_the_next_search(monkeypatch: pytest.MonkeyPatch) -> None:
    into = {"y": SimpleNamespace(shape=(1,))}
    found = engine([False, False, True], monkeypatch)
    assert found.run({}, into) == into
    assert found.run({}, into) == into and not found._former
    none = engine([False, False], monkeypatch)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"^stage0.onnx on cuda0 failed: .* --split-mode .*HEURISTIC_QUERY"):
            none.run({}, into)


class Opened:
    """A session without inputs and outputs."""

    def __init__(self, path: Path, options: ort.SessionOptions, providers: Sequence[Any], *_: Any, **__: Any) -> None:
        self.settings = dict(providers[0][1])

    def get_providers(self) -> list[str]:
        return [onnxruntime_gpu.PROVIDER]

    def nothing(self) -> list[Any]:
        return []

    get_inputs = get_outputs = get_input_memory_infos = get_overridable_initializers = nothing


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("waits_for_others", [False, True])
def test_searches_are_opened_one_after_another(waits_for_others: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime_gpu, "_load_libraries", lambda: None)
    monkeypatch.setattr(onnxruntime_gpu, "open_onnx", Opened)
    monkeypatch.setattr(onnxruntime_gpu, "KeptBinding", lambda session, device: session)
    monkeypatch.setattr(onnxruntime_gpu, "register_operators", lambda *_: None)
    backend = OnnxRuntimeGpuBackend(Device("cuda", 0), cuda_graphs=False)
    backend.attach()
    communicator: Any = SimpleNamespace(capturable=False) if waits_for_others else None
    made = backend.load(Path("stage0.onnx"), LoadOptions(communicator=communicator))
    used = []
    while True:
        (session,) = made._bindings
        used.append([session.settings.get(f"cudnn_conv{name}") for name in ("_algo_search", "1d_pad_to_nc1d")])  # type: ignore[attr-defined]
        if not made._search_on():
            break
    assert used == [["HEURISTIC", None], ["HEURISTIC", "1"], ["EXHAUSTIVE", None]][: 1 if waits_for_others else 3]


def test_what_was_captured_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that other shapes ask for must not free what replays of earlier shapes use."""
    found = engine([True, True], monkeypatch)
    first = found._bindings
    found._gpu.use = Use.CAPTURED
    found.run({}, {"y": SimpleNamespace(shape=(1,))})
    first[0].has_plan = False  # type: ignore[attr-defined]
    found.run({}, {"y": SimpleNamespace(shape=(1,))})
    assert found._former == [first] and found._bindings is not first


@pytest.mark.usefixtures("gpus")
@needs_dlpack
def test_weights_that_can_be_moved_take_turns(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(np.arange(8, dtype=np.float32).tobytes())
    weights = [Weight("w", "float32", [8], "file", 0)]
    backends = [OnnxRuntimeGpuBackend(Device("cuda", 0)) for _ in range(3)]
    values = []
    for number, backend in enumerate(backends):
        backend.attach()
        backend.swap_weights(SwapBuffer(-2, 512))
        values.append(backend._place(tmp_path / "engine.onnx", LoadOptions(weights=None if number == 2 else weights)))
    one, other, none = values
    assert one is not None and other is not None and none is None
    assert one["w"].data_ptr() == other["w"].data_ptr()
    assert [backend.swapped is not None and backend.swapped.is_in for backend in backends] == [False, True, False]
    backends[0].bring_in()
    np.testing.assert_array_equal(one["w"].numpy(), np.arange(8, dtype=np.float32))
    assert [backend.notes for backend in backends] == [
        [],
        [],
        ["engine.onnx: its weights stay on cuda0 while other modules work"],
    ]


@pytest.mark.usefixtures("gpus")
@needs_dlpack
@pytest.mark.parametrize("swaps", [False, True])
def test_an_engine_with_slots_has_the_weights_of_the_one_without(swaps: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(np.arange(8, dtype=np.float32).tobytes())
    weights = [Weight("w", "float32", [8], "file", 0)]
    backend = OnnxRuntimeGpuBackend(Device("cuda", 0), cuda_graphs=False)
    backend.attach()
    if swaps:
        backend.swap_weights(SwapBuffer(-3, 512))
    names = ("stage0.onnx", "stage0.adapted.onnx")
    plain, adapted = (backend._place(tmp_path / name, LoadOptions(weights=weights)) for name in names)
    assert plain is not None and plain is adapted
    if swaps:
        backend.bring_in()
    np.testing.assert_array_equal(plain["w"].numpy(), np.arange(8, dtype=np.float32))


def test_onnxruntime_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.10 gets ONNX Runtime 1.23, which is sufficient for CPUs."""
    monkeypatch.delattr(ort.OrtValue, "from_dlpack", raising=False)
    options = BackendOptions(find_kind("onnxruntime"), Device("cuda", 0), 1, BuildOptions(), True)
    with pytest.raises(PackageError, match=r"too old for GPUs: pip install 'onnxruntime-gpu>=1.26'"):
        OnnxRuntimeGpuBackend.create(options)


def optimized(folder: Path, disabled: tuple[str, ...]) -> set[str]:
    """The operators that ONNX Runtime makes of a model without these optimizers."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    open_onnx(folder / "model.onnx", options, ["CPUExecutionProvider"], disabled_optimizers=disabled)
    return {node.op_type for node in ir.load(folder / "optimized.onnx").graph}


def test_biases_beside_quantized_weights_stay_as_they_are(tmp_path: Path) -> None:
    """ONNX Runtime would quantize them to int32, which no kernel on GPUs takes."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[n, 4] x) => (float[n, 4] y)
        <float scale = {0.1}, int8 zero = {0}, int8[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7},
         float[4] b = {0.1, 0.2, 0.3, 0.4}> {
            q = QuantizeLinear (x, scale, zero)  d = DequantizeLinear (q, scale, zero)
            m = DequantizeLinear (w, scale, zero)  g = Gemm (d, m, b)
            p = QuantizeLinear (g, scale, zero)  y = DequantizeLinear (p, scale, zero)
        }"""
    ir.save(ir.from_onnx_text(text), tmp_path / "model.onnx")

    def types(disabled: tuple[str, ...]) -> set[ir.DataType | None]:
        optimized(tmp_path, disabled)
        return {value.dtype for value in ir.load(tmp_path / "optimized.onnx").graph.initializers.values()}

    assert ir.DataType.INT32 in types(())
    assert ir.DataType.INT32 not in types(onnxruntime_gpu.NOT_ON_GPUS)


def test_slices_of_all_of_an_axis_stay_as_they_are(tmp_path: Path) -> None:
    """A Split into unequal parts takes three times as long on a GPU."""
    text = """<ir_version: 8, opset_import: ["" : 17]> rolled (float[n, 8, 4] x) => (float[n, 8, 4] y)
        <int64[1] zero = {0}, int64[1] cut = {3}, int64[1] end = {8}, int64[1] axis = {1}> {
            first = Slice (x, zero, cut, axis)  rest = Slice (x, cut, end, axis)
            y = Concat <axis = 1> (rest, first) }"""
    ir.save(ir.from_onnx_text(text), tmp_path / "model.onnx")
    assert "Split" in optimized(tmp_path, ())
    assert optimized(tmp_path, onnxruntime_gpu.NOT_ON_GPUS) == {"Slice", "Concat"}


def test_rows_that_are_counted_and_picked_stay_as_they_are(tmp_path: Path) -> None:
    """ONNX Runtime would make a Slice of them, whose Unsqueeze nodes prevent capture on a GPU."""

    count = ir.val("count", ir.DataType.INT64, [])
    numbers = {name: ir.val(name, const_value=ir.tensor(int(name), name=name)) for name in ("0", "1")}
    table = ir.val("table", const_value=ir.tensor(np.ones((64, 8), np.float32), name="table"))
    rows = ir.node("Range", [numbers["0"], count, numbers["1"]])
    taken = ir.node("Gather", [table, *rows.outputs])
    taken.outputs[0].name, taken.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [count], taken.outputs, nodes=[rows, taken], initializers=[table, *numbers.values()], opset_imports={"": 20}
    )
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "model.onnx")
    assert "Slice" in optimized(tmp_path, ())
    assert optimized(tmp_path, onnxruntime_gpu.NOT_ON_GPUS) == {"Range", "Gather"}
