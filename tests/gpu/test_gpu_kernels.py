"""What the compiler knows of ONNX Runtime's kernels for GPUs is so in the ONNX Runtime at hand."""

from __future__ import annotations

import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from splitc.compiler.engine_graphs.cpu_values import runs_on_gpu
from splitc.runtime.engines.onnxruntime_gpu import PROVIDER
from splitc.runtime.hardware.gpus import list_gpus

pytestmark = pytest.mark.gpu
if not list_gpus():  # so that no process collects and reports its 3,000 tests
    pytest.skip("needs a GPU", allow_module_level=True)
# A type that the operator does not take, and one that ONNX Runtime has no kernel for.
NO_OPERATOR = (ort_errors.InvalidGraph, ort_errors.NotImplemented, ort_errors.Fail)
POOLED = "<kernel_shape = [2, 2]> (x)"
OF_ONE = """
    Abs Acos Acosh Asin Asinh Atan Atanh Ceil Celu Cos Cosh Det Dropout Elu Erf Exp Floor Gelu
    GlobalAveragePool GlobalLpPool GlobalMaxPool HardSigmoid HardSwish Hardmax IsInf IsNaN LeakyRelu Log
    LogSoftmax LpNormalization MeanVarianceNormalization Mish Neg Reciprocal Relu Round Selu Shrink Sigmoid
    Sign Sin Sinh Softmax Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu
    Clip Flatten Identity ReduceL1 ReduceLogSum ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
    Squeeze Transpose Trilu
"""
OF_TWO = "Add CastLike Div Equal Greater GreaterOrEqual Less LessOrEqual MatMul Max Min Mul Pow Sub Sum"
READS = (
    dict.fromkeys(OF_ONE.split(), "(x)")
    | dict.fromkeys(OF_TWO.split(), "(x, x)")
    | {
        "AffineGrid": "(theta, size)",
        "AveragePool": POOLED,
        "BatchNormalization": "(x, ones, ones, ones, ones)",
        "BitwiseNot": "(i)",
        "Cast": "<to = 1> (x)",
        "Col2Im": "(columns, image, block)",
        "Concat": "<axis = 1> (x, x)",
        "Conv": "(x, w)",
        "ConvTranspose": "(x, w)",
        "CumSum": "(x, axis)",
        "DepthToSpace": "<blocksize = 2> (x)",
        "Expand": "(x, size4)",
        "Gather": "(x, axis)",
        "GatherElements": "(x, places)",
        "GatherND": "(x, pairs)",
        "Gemm": "(row, row)",
        "GroupNormalization": "<num_groups = 2> (x, ones, ones)",
        "GridSample": "(x, grid)",
        "GRU": "<hidden_size = 4, linear_before_reset = 1> (steps, gates, gates)",
        "InstanceNormalization": "(x, ones, ones)",
        "LayerNormalization": "(x, row8, row8)",
        "LpPool": POOLED,
        "MaxPool": POOLED,
        "Mean": "(x, x)",
        "Mod": "<fmod = 1> (x, x)",
        "NonZero": "(x)",
        "PRelu": "(x, x)",
        "Pad": "(x, pads)",
        "Reshape": "(x, flat)",
        "Resize": "(x, nothing, factors)",
        "RMSNormalization": "(x, row8)",
        "ScatterElements": "(x, places, x)",
        "ScatterND": "(x, pairs, rows)",
        "Slice": "(x, axis, one, axis)",
        "Tile": "(x, size4)",
        "Unsqueeze": "(x, axis)",
        "Where": "(b, x, x)",
    }
)
# What ONNX Runtime expands in this opset alone, to operators with kernels.
EXPANDED = ("Relu", "int64", 18)
BOOLEAN = ("Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual")
NODES = [*READS.items(), ("GRU", "<hidden_size = 4> (steps, gates, gates)")]
MODEL = """<ir_version: 10, opset_import: ["" : {opset}]> g (
    {dtype}[1, 4, 8, 8] x, {dtype}[4, 4, 3, 3] w, {dtype}[1, 4, 4, 2] grid, {dtype}[4] ones, {dtype}[8] row8,
    {dtype}[8, 8] row, {dtype}[2, 8, 8] rows, bool[1, 4, 8, 8] b, int64[1, 4, 8, 8] places, int64[2, 2] pairs,
    {dtype}[1, 2, 3] theta, {dtype}[3, 2, 4] steps, {dtype}[1, 12, 4] gates, {dtype}[1, 4, 9] columns, int32[4] i
) => ({made} y) <
    int64[4] size = {{1, 1, 4, 4}}, int64[2] image = {{4, 4}}, int64[2] block = {{2, 2}},
    int64[4] size4 = {{1, 4, 1, 1}}, int64[1] axis = {{0}}, int64[1] one = {{1}}, int64[1] flat = {{-1}},
    int64[8] pads = {{0, 0, 1, 1, 0, 0, 1, 1}}, float[4] factors = {{1, 1, 2, 2}}, {dtype}[0] nothing = {{}}
> {{ y = {node} }}"""


FLOATS, WHOLE = (
    ("float", "float16", "bfloat16"),
    ("bool", "int8", "uint8", "int16", "int32", "uint32", "int64", "double"),
)
TYPES = [(dtype, opset) for dtype in FLOATS for opset in (18, 21, 22, 23, 24)]
TYPES += [(dtype, opset) for dtype in WHOLE for opset in (18, 24)]


@pytest.mark.parametrize(("dtype", "opset"), TYPES)
@pytest.mark.parametrize(("name", "reads"), NODES, ids=lambda one: one.replace(" ", ""))
def test_the_compiler_knows_which_have_kernels(name: str, reads: str, dtype: str, opset: int) -> None:
    """ONNX Runtime refuses to capture a graph with a node that has none."""
    if (name, dtype, opset) == EXPANDED:
        pytest.skip("ONNX Runtime expands it")
    made = {**dict.fromkeys(BOOLEAN, "bool"), "BitwiseNot": "int32", "Cast": "float", "NonZero": "int64"}.get(
        name, dtype
    )
    text = MODEL.format(opset=opset, dtype=dtype, made=made, node=f"{name} {reads}")
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    try:
        onnx.defs.get_schema(name, opset)
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except (onnx.defs.SchemaError, *NO_OPERATOR) as error:
        # The CPU provider has hardly any kernel for bfloat16.
        if dtype != "bfloat16" or not isinstance(error, ort_errors.NotImplemented):
            pytest.skip(f"not for this type and opset: {error}")
    (node,) = ir.from_proto(model).graph
    provider = (PROVIDER, {"enable_cuda_graph": "1"})
    try:
        ort.InferenceSession(model.SerializeToString(), providers=[provider, "CPUExecutionProvider"])
        has_kernel = True
    except (ort_errors.Fail, ort_errors.NotImplemented) as error:
        assert "graph capture" in str(error) or dtype == "bfloat16"
        has_kernel = False
    assert runs_on_gpu(node) == has_kernel
