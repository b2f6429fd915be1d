"""ONNX Runtime's CUDA kernels: which inputs they read in host memory, and which operators and types have none.

From the kernels' definitions in core/providers/cuda and contrib_ops/cuda of ONNX Runtime 1.31: InputMemoryType, the
type constraints, and the operators without a definition. An operator that is not listed here is assumed to have a
kernel that reads nothing in host memory. `tests/gpu/test_gpu_kernels.py` tries 110 operators with 11 types on a GPU.
"""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.nodes import operator_name

# Attention with a cache, and the indices of its inputs for a bias and for sinks.
GROUPED, SINKS_AND_BIAS = "com.microsoft.GroupQueryAttention", (10, 11)
# Attention on latents with its caches, an operator of the compiler alone: engines have its decomposition.
LATENT = "splitc.compiler.LatentAttention"
# By operator, the indices of the inputs that are read in host memory: sizes, axes, bounds.
HOST_INPUTS: dict[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "Dropout": (1, 2),
    "Expand": (1,),
    "If": (0,),
    "Loop": (0, 1),
    "NonMaxSuppression": (2, 3, 4),
    "OneHot": (1, 2),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "ReduceL1": (1,),
    "ReduceL2": (1,),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceProd": (1,),
    "ReduceSum": (1,),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
    GROUPED: (6,),
}
# By operator, the indices of weights of which the kernel makes a copy in its own layout when a session is opened. ONNX
# Runtime frees the session's own weight then, but not a shared one.
REPACKED = {"com.microsoft.QMoE": (2, 5, 8)}
FLOATS = frozenset({ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE})
HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
# Operators without a CUDA kernel. ONNX Runtime runs them on the CPU, also those that ONNX defines as functions.
MISSING = frozenset(
    {
        *("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "Sinh", "Tan", "DFT", "STFT", "MelWeightMatrix"),
        *("BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Hardmax", "Multinomial", "Unique"),
        *("AffineGrid", "Col2Im", "Det", "GlobalLpPool", "LpPool", "MaxRoiPool"),
        *("Celu", "Mean", "MeanVarianceNormalization"),
        *("ConvInteger", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", LATENT),
    }
)
# The same, of operators whose names begin so.
MISSING_FROM = ("ai.onnx.ml.", "com.microsoft.QLinear")
# Operators that count on the GPU how many elements they return, and wait until the CPU knows it.
COUNTING = frozenset({"Compress", "NonMaxSuppression", "NonZero"})
# For operators with kernels for few types: these types, of the first input.
TYPES: dict[str, frozenset[ir.DataType]] = {
    "ArgMax": FLOATS,
    "ArgMin": FLOATS,
    "DequantizeLinear": frozenset({ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT4, ir.DataType.UINT4}),
    "GridSample": frozenset({ir.DataType.FLOAT}),
    "MatMulInteger": frozenset({ir.DataType.INT8}),
    "com.microsoft.DequantizeLinear": frozenset({ir.DataType.INT8, ir.DataType.UINT8}),
    GROUPED: HALVES,
}

_BYTES = frozenset({ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16})
_WHOLE = frozenset({*_BYTES, ir.DataType.INT32, ir.DataType.UINT32, ir.DataType.INT64})
_LARGE = frozenset({ir.DataType.INT64, ir.DataType.UINT32})
# For operators with kernels for most types: those without, of the first input (of Where, of the second).
WITHOUT: dict[str, frozenset[ir.DataType]] = {
    **dict.fromkeys(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod"), _BYTES),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _WHOLE | {ir.DataType.BOOL}),
    "PRelu": frozenset({ir.DataType.UINT32}),
    **dict.fromkeys(("CenterCropPad", "Pad", "Relu"), _WHOLE),
    **dict.fromkeys(("Gemm", "MatMul"), _LARGE | {ir.DataType.INT32}),
    **dict.fromkeys(("ReduceL1", "ReduceMean", "ReduceProd"), _LARGE),
    **dict.fromkeys(("ReduceMax", "ReduceMin"), frozenset({ir.DataType.BOOL, ir.DataType.UINT32})),
    "Clip": frozenset({ir.DataType.INT32, ir.DataType.UINT32}),
    "GatherND": _WHOLE - {ir.DataType.INT64},
    "NonZero": (_WHOLE - {ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8}) | {ir.DataType.DOUBLE},
    "LpNormalization": frozenset({ir.DataType.DOUBLE}),
    "ReduceLogSum": frozenset({ir.DataType.INT32, ir.DataType.INT64}),
    "ReduceSum": frozenset({ir.DataType.UINT32}),
    "ReduceSumSquare": _LARGE | {ir.DataType.INT32},
    "Tile": _BYTES | {ir.DataType.BOOL, ir.DataType.UINT32},
    "Where": frozenset({ir.DataType.BOOL, ir.DataType.INT8, ir.DataType.INT16, ir.DataType.UINT32}),
}

# ONNX's operators with kernels for bfloat16, in the opsets that allow this type.
BFLOAT16 = frozenset(
    {
        *("Abs", "Add", "Clip", "Cos", "Div", "Erf", "Exp", "Max", "Min", "Mod", "Mul", "Neg", "Pow", "Sign", "Sin"),
        *("Sqrt", "Sub", "Sum", "Gelu", "HardSigmoid", "HardSwish", "Mish", "Relu", "Sigmoid", "Softmax", "Softplus"),
        *("Softsign", "Swish", "Tanh", "Cast", "CastLike", "Identity", "IsInf", "IsNaN", "Shape", "Size"),
        *("Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Reshape", "ScatterElements"),
        *("ScatterND", "Slice", "Split", "Squeeze", "TensorScatter", "Tile", "TopK", "Transpose", "Trilu"),
        *("Unsqueeze", "Where"),
        *("ReduceL1", "ReduceMean", "ReduceSum", "ReduceSumSquare", "AveragePool", "Conv", "Gemm", "MatMul"),
        *("Attention", "GroupNormalization", "LayerNormalization", "LpNormalization", "RMSNormalization"),
        *("RotaryEmbedding", "SimplifiedLayerNormalization", "Dropout", "RandomNormalLike", "Scan"),
    }
)

# The activations that cuDNN's recurrent networks have, attributes that they lack, and the input for peepholes.
RECURRENT = {"GRU": ("sigmoid", "tanh"), "LSTM": ("sigmoid", "tanh", "tanh"), "RNN": ("tanh",)}
UNKNOWN_TO_CUDNN = frozenset({"activation_alpha", "activation_beta", "clip"})
PEEPHOLES = 7
# Operators whose versions after this opset have no kernels.
LAST_OPSET = 21
ENDED = frozenset({"Dropout", "Elu", "EyeLike", "InstanceNormalization", "MaxPool", "Selu", "ThresholdedRelu"})


def is_too_new(node: ir.Node) -> bool:
    """Whether only older versions of the node's operator have CUDA kernels."""
    opset = 1 if node.graph is None else node.graph.opset_imports.get("", 1)
    return opset > LAST_OPSET and operator_name(node) in ENDED


def typed_input(node: ir.Node) -> int:
    """The index of the input whose type chooses a node's kernel."""
    return 1 if operator_name(node) == "Where" else 0


def host_inputs(node: ir.Node) -> tuple[int, ...]:
    """The indices of the inputs that the node's CUDA kernel reads in host memory."""
    return HOST_INPUTS.get(operator_name(node), ())


def _is_left_to_the_cpu(node: ir.Node) -> bool:
    """Whether ONNX Runtime gives a node to its CPU provider for its attributes, though its operator has a CUDA kernel.

    From GetCapability in cuda_execution_provider.cc, and seen on an H200 with ONNX Runtime 1.31.
    """
    name, given = operator_name(node), node.attributes
    if name in ("ArgMax", "ArgMin"):
        return given.get_int("select_last_index", 0) != 0
    if name == "ConvTranspose":
        pads = list(given.get_ints("pads", ()))
        return pads[: len(pads) // 2] != pads[len(pads) // 2 :]
    if (usual := RECURRENT.get(name)) is None:
        return False
    activations = [activation.lower() for activation in given.get_strings("activations", ())]
    if activations != [*usual, *usual][: len(activations)] or not given.keys().isdisjoint(UNKNOWN_TO_CUDNN):
        return True
    if name == "GRU":
        return not given.get_int("linear_before_reset", 0)
    return given.get_int("input_forget", 0) != 0 or any(node.inputs[PEEPHOLES : PEEPHOLES + 1])


def has_gpu_kernel(node: ir.Node, dtype: ir.DataType | None) -> bool:
    """Whether ONNX Runtime has a CUDA kernel for the node. `dtype` is the type of its `typed_input`, if known."""
    name = operator_name(node)
    if name in MISSING or name.startswith(MISSING_FROM) or is_too_new(node):
        return False
    if _is_left_to_the_cpu(node):
        return False
    if name == GROUPED and all(any(node.inputs[place : place + 1]) for place in SINKS_AND_BIAS):
        return False  # kernels that support sinks take no bias
    if dtype == ir.DataType.BFLOAT16 and not node.domain:
        return name in BFLOAT16
    types = TYPES.get(name)
    return dtype is None or (dtype not in WITHOUT.get(name, ()) and (types is None or dtype in types))
