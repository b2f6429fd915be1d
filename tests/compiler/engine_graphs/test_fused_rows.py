"""Operators that compute row by row are one kernel in engines for GPUs, with the numbers of the model."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.engine_graphs import fused_rows
from splitc.runtime.arrays.ort_values import host_array, host_value
from splitc.runtime.engines.fused_kernels import FusedOperators
from splitc.runtime.engines.fused_source import launch_of, source_of
from splitc.runtime.engines.onnxruntime_cpu import register_operators
from splitc.runtime.engines.operator_library import is_built
from splitc.runtime.package.fused import Fused
from splitc.runtime.package.manifest_file import read_manifest
from tests.helpers.cuda_on_host import COMPILER, compile_on_host
from tests.helpers.needs import needs_later_operators

SCALARS = {"low": -1, "high": 1.5, "half": 0.5, "one": 1, "root": 1.4142, "two": 2, "three": 3}
TYPES: dict[str, Any] = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
HEADS, HEAD, BATCH, LENGTH = 3, 32, 2, 5
WIDE = HEADS * HEAD
# Bodies by the steps that they become. Values are `x` and `y`, both [batch, length, WIDE].
BODIES = {
    "a bias, a norm of heads and a rotary embedding of neighbors": (
        """biased = Add (x, bias)  heads = Reshape (biased, by_heads)
        normal = RMSNormalization <epsilon = 1e-6> (heads, head_scale)  rows = Reshape (normal, by_rows)
        z = com.microsoft.RotaryEmbedding <num_heads = 3, interleaved = 1> (rows, first, cosines, sines)""",
        ["Add", "RMSNormalization", "RotaryEmbedding"],
    ),
    "a rotary embedding of halves, with a position for each token": (
        "z = com.microsoft.RotaryEmbedding <num_heads = 3> (x, positions, cosines, sines)",
        ["RotaryEmbedding"],
    ),
    "a norm that images scale and shift": (
        "z = LayerNormalization <axis = -1> (x, scale_by_image, shift_by_image)",
        ["LayerNormalization"],
    ),
    "a gate and a residual": (
        """biased = Add (bias, x)  gated = Mul (gate, biased)  sum = Add (y, gated)  z = Clip (sum, low, high)""",
        ["Add", "Mul", "Add", "Clip"],
    ),
    "a Gelu of halves of a product": (
        """gelu = Gelu (x)  up = Sub (y, by_token)  z = Mul (gelu, up)""",
        ["Gelu", "Sub", "Mul"],
    ),
    "approximations of Gelu": (
        """a = Gelu <approximate = "tanh"> (x)  b = com.microsoft.QuickGelu <alpha = 1.5> (y)  z = Div (a, two)
        w = Add (z, b)""",
        ["GeluTanh", "Div", "QuickGelu", "Add"],
    ),
    "Gelus written out": (
        """a = Add (x, bias)  b = Div (a, root)  c = Erf (b)  d = Add (c, one)  e = Mul (a, d)  f = Mul (e, half)
        g = Pow (f, three)  h = Mul (g, half)  i = Add (f, h)  j = Tanh (i)  k = Add (j, one)  z = Mul (f, k)""",
        ["Add", "Div", "Erf", "Add", "Mul", "Mul", "Pow", "Mul", "Add", "Tanh", "Add", "Mul"],
    ),
    "bounds written out": (
        """sum = Add (x, y)  above = Max (sum, low)  z = Min (high, above)""",
        ["Add", "Max", "Min"],
    ),
    "other activations": (
        """a = Sigmoid (x)  b = Tanh (y)  c = Neg (a)  d = Relu (x)  e = Mul (b, c)  z = Add (e, d)""",
        ["Sigmoid", "Tanh", "Neg", "Relu", "Mul", "Add"],
    ),
}


def weights(columns: int = WIDE) -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = {
        "bias": (columns,),
        "head_scale": (HEAD,),
        "cosines": (7, HEAD // 2),
        "sines": (7, HEAD // 2),
        "scale_by_image": (BATCH, 1, columns),
        "shift_by_image": (BATCH, 1, columns),
        "gate": (BATCH, 1, columns),
        "by_token": (LENGTH, 1),
    }
    return {
        **{name: random.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()},
        "by_heads": np.array([0, 0, HEADS, HEAD]),
        "by_rows": np.array([0, 0, WIDE]),
        "first": np.array([2]),
        "zero": np.array([0]),
        "second": np.array([1]),
        "positions": random.integers(0, 7, (BATCH, LENGTH)),
        **{name: np.float16(number) for name, number in SCALARS.items()},
    }


def engine(body: str, folder: Path, patch: pytest.MonkeyPatch, columns: int = WIDE, dtype: str = "float16") -> Path:
    """The package for one GPU. Groups of any size are fused."""
    patch.setattr(fused_rows, "LEAST", 0)
    model = write_model(body, folder, columns, dtype)
    compile_model(plan_model(model, ["cuda0"], Request(split_mode="layer")), folder / "package", verify=False)
    return folder / "package"


def write_model(body: str, folder: Path, columns: int = WIDE, dtype: str = "float16") -> Path:
    results = [name for name in ("z", "w") if f"{name} =" in body]
    outputs = ", ".join(f"{dtype}[{BATCH}, {LENGTH}, {columns}] {name}" for name in results[-1:])
    inputs = f"{dtype}[{BATCH}, {LENGTH}, {columns}] x, {dtype}[{BATCH}, {LENGTH}, {columns}] y"
    head = f'<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]> m ({inputs}) => ({outputs})'
    model = onnx.parser.parse_model(f"{head} {{ {body} }}")
    read = {name for node in model.graph.node for name in node.input}
    for name, array in weights(columns).items():
        if name in read:
            kind = array.dtype if array.dtype == np.int64 else TYPES[dtype]
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(array, kind), name))
    for value in [value for value in model.graph.input if value.name not in read]:
        model.graph.input.remove(value)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


# The packages of BODIES in half precision, for all tests.
_halves: dict[str, Path] = {}


def halves(form: str, folder: Path, patch: pytest.MonkeyPatch) -> Path:
    if form not in _halves:
        _halves[form] = engine(BODIES[form][0], folder, patch)
    return _halves[form]


def kernels_of(package: Path) -> list[Fused]:
    return read_manifest(package).ranks[0].engines[0].fused


def steps_of(package: Path) -> list[list[str]]:
    return [[step.operator for step in kernel.steps] for kernel in kernels_of(package)]


def feeds_of(path: Path) -> dict[str, Any]:
    """Numbers that all types hold, in the type of the inputs."""
    random = np.random.default_rng(1)
    feeds = {}
    for value in onnx.load(path, load_external_data=False).graph.input:
        kind = value.type.tensor_type
        numbers = random.standard_normal([size.dim_value for size in kind.shape.dim]).astype(ml_dtypes.bfloat16)
        feeds[value.name] = numbers.astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return feeds


def run(path: Path, operators: FusedOperators | None = None) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    register_operators(options, operators)
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    values = {name: host_value(array) for name, array in feeds_of(path).items()}
    return host_array(session.run_with_ort_values(None, values)[0]).astype(np.float32)


def operators_on_host(kernels: list[Fused], folder: Path) -> FusedOperators:
    """The operators, whose kernels the host runs."""
    library = compile_on_host(source_of(kernels), folder)

    def address(name: str) -> int:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0

    return FusedOperators(kernels, [address(kernel.name) for kernel in kernels], address("launch"), on_gpu=False)


@pytest.mark.parametrize("form", BODIES)
def test_each_group_is_one_operator_with_the_models_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    _, steps = BODIES[form]
    package = halves(form, tmp_path, monkeypatch)
    assert [sorted(own) for own in steps_of(package)] == [sorted(steps)]
    expected = run(package.with_name("model.onnx"))
    np.testing.assert_allclose(run(package / "rank0/stage0.onnx"), expected, atol=4e-3, rtol=4e-3)


@pytest.mark.skipif(COMPILER is None or not is_built(), reason="needs a C++ compiler")
def test_kernels_compute_what_their_functions_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all bodies, and for rows that fill a part of a vector of threads, several vectors, and a block."""
    norm, gate = (BODIES[name][0] for name in ("a norm that images scale and shift", "a gate and a residual"))
    sized = [*((norm, columns) for columns in (24, 264, 2056)), (gate, 2056)]
    folders = [tmp_path / str(number) for number in range(len(BODIES) + len(sized))]
    for folder in folders:
        folder.mkdir()
    packages = [halves(form, folder, monkeypatch) for form, folder in zip(BODIES, folders)]
    packages += [
        engine(body, folder, monkeypatch, columns) for (body, columns), folder in zip(sized, folders[len(BODIES) :])
    ]
    kernels = [kernel for package in packages for kernel in kernels_of(package)]
    operators = operators_on_host(list({kernel.name: kernel for kernel in kernels}.values()), tmp_path)
    for package in packages:
        path = package / "rank0/stage0.onnx"
        np.testing.assert_allclose(run(path, operators), run(path), atol=2e-3, rtol=2e-3)
    operators.release()


@needs_later_operators
@pytest.mark.skipif(COMPILER is None or not is_built(), reason="needs a C++ compiler")
def test_kernels_of_bfloat16_compute_what_the_model_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime has no operators of bfloat16 on CPUs, so the model in float32 is the reference."""
    packages, references = list[Path](), list[Path]()
    for number, (body, steps) in enumerate(BODIES.values()):
        for dtype in ("bfloat16", "float"):
            (tmp_path / f"{dtype}{number}").mkdir()
        packages.append(engine(body, tmp_path / f"bfloat16{number}", monkeypatch, dtype="bfloat16"))
        references.append(write_model(body, tmp_path / f"float{number}", dtype="float"))
        assert [sorted(own) for own in steps_of(packages[-1])] == [sorted(steps)]
    kernels = {kernel.name: kernel for package in packages for kernel in kernels_of(package)}
    operators = operators_on_host(list(kernels.values()), tmp_path)
    for package, reference in zip(packages, references, strict=True):
        got, expected = run(package / "rank0/stage0.onnx", operators), run(reference)
        assert np.abs(got - expected).max() < 2e-2 * np.abs(expected).max()
    operators.release()


@pytest.mark.parametrize(
    ("body", "steps"),
    [
        ("s = Add (x, y)  a = Tanh (s)  z = Mul (a, s)", [["Add", "Tanh", "Mul"]]),
        ("z = Add (x, y)", []),
        ("a = ReduceMax (x, second)  b = ReduceMax (x, zero)  t = Mul (a, b)  z = Tanh (t)", []),
        ("s = Add (x, bias)  t = Softmax (s)  z = Mul (t, s)", []),
    ],
    ids=["a value with two readers inside", "one step", "no data in a step", "a value with a reader outside"],
)
def test_what_is_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, steps: list[list[str]]) -> None:
    package = engine(body, tmp_path, monkeypatch)
    assert steps_of(package) == steps
    np.testing.assert_allclose(run(package / "rank0/stage0.onnx"), run(tmp_path / "model.onnx"), atol=4e-3, rtol=4e-3)


def test_models_of_old_opsets_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of these opsets can't have all that fused operators stand for."""
    body = "s = Sigmoid (x)  z = Mul (x, s)"
    assert steps_of(engine(body, tmp_path, monkeypatch)) == [["Sigmoid", "Mul"]]
    (old := tmp_path / "old").mkdir()
    model = onnx.load(tmp_path / "model.onnx")
    model.opset_import[0].version = 12
    onnx.save(model, old / "model.onnx")
    compile_model(plan_model(old / "model.onnx", ["cuda0"], Request(split_mode="layer")), old / "package", verify=False)
    assert steps_of(old / "package") == []


def test_other_types_and_few_numbers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, _ = BODIES["a gate and a residual"]
    assert steps_of(engine(body, tmp_path, monkeypatch, dtype="float")) == []
    (small := tmp_path / "small").mkdir()
    package = engine(body, small, monkeypatch)
    monkeypatch.undo()
    plan = plan_model(small / "model.onnx", ["cuda0"], Request(split_mode="layer"))
    compile_model(plan, package, force=True, verify=False)
    assert steps_of(package) == []


@pytest.mark.parametrize("columns", [16, 96, 264, 3072, 16384])
def test_threads_hold_all_columns(columns: int) -> None:
    launch = launch_of(columns)
    assert 8 * launch.threads * launch.vectors >= columns
    assert launch.threads * launch.rows <= 1024


@pytest.mark.skipif(COMPILER is None or not is_built(), reason="needs a C++ compiler")
def test_inputs_of_other_sizes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel would read memory behind them. The model's file says that sizes are equal, and requests may differ."""
    package = engine(BODIES["a gate and a residual"][0], tmp_path, monkeypatch)
    model = onnx.load(package / "rank0/stage0.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    onnx.save(model, tmp_path / "open.onnx")
    operators = operators_on_host(kernels_of(package), tmp_path)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    register_operators(options, operators)
    session = ort.InferenceSession(tmp_path / "open.onnx", options, providers=["CPUExecutionProvider"])
    x, y = (np.zeros((BATCH, length, WIDE), np.float16) for length in (LENGTH, LENGTH - 1))
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.Fail, match="have sizes that don't go together"):
        session.run(None, {"x": x, "y": y})
    assert session.run(None, {"x": x[:, :0], "y": y[:, :0]})[0].size == 0
    operators.release()


@pytest.mark.parametrize(("dtype", "rows"), [("float16", [["Add", "Mul", "Add"]]), ("float", [])])
def test_what_follows_a_sum_over_ranks_is_one_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, rows: list[list[str]]
) -> None:
    """In half precision the sum does not wait for a bias and a gate, which one rank would add or all would multiply."""
    monkeypatch.setattr(fused_rows, "LEAST", 0)
    random = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 20]>
        model ({dtype}[batch, 5, 64] x, {dtype}[batch, 1, 64] gate) => ({dtype}[batch, 5, 64] z) {{
            s = Softmax (x)  wide = MatMul (s, up)  active = Relu (wide)  product = MatMul (active, down)
            biased = Add (product, bias)  kept = Identity (biased)  gated = Mul (gate, kept)  r = Add (s, gated)
            z = Softmax (r)
        }}"""
    )
    for name, shape in {"up": (64, 128), "down": (128, 64), "bias": (64,)}.items():
        numbers = (random.standard_normal(shape) / 8).astype(np.float16 if dtype == "float16" else np.float32)
        model.graph.initializer.append(numpy_helper.from_array(numbers, name))
    onnx.save(model, tmp_path / "model.onnx")
    request = Request(split_mode="tensor", shapes={"x": (2, 5, 64), "gate": (2, 1, 64)})
    compile_model(plan_model(tmp_path / "model.onnx", ["cuda0", "cuda1"], request), tmp_path / "package")
    assert steps_of(tmp_path / "package") == rows
    (engine,) = (tmp_path / "package/rank0").glob("*.onnx")
    nodes = onnx.load(engine).graph.node
    (total,) = [node for node in nodes if node.op_type.startswith("AllReduce")]
    before, after = ("MatMul", "Rows") if rows else ("Mul", "Add")
    assert any(total.input[0] in node.output and node.op_type.endswith(before) for node in nodes)
    assert [node.op_type.startswith(after) for node in nodes if total.output[0] in node.input] == [True]
