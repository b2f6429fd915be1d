"""The number types of values between caller, engines and devices, and ONNX's names for them."""

from __future__ import annotations

# ONNX's codes (TensorProto.DataType) of types that ml_dtypes has and numpy lacks, by ml_dtypes' names.
CODES = {
    "bfloat16": 16,
    "float8_e4m3fn": 17,
    "float8_e4m3fnuz": 18,
    "float8_e5m2": 19,
    "float8_e5m2fnuz": 20,
    "float8_e8m0fnu": 24,
}
# ONNX's codes of all types that ONNX Runtime's Python interface supports, by numpy's and ml_dtypes' names: no strings,
# no complex numbers, none smaller than a byte.
KNOWN = {
    "bool": 9,
    **{"int8": 3, "int16": 5, "int32": 6, "int64": 7},
    **{"uint8": 2, "uint16": 4, "uint32": 12, "uint64": 13},
    **{"float16": 10, "float32": 1, "float64": 11},
    **CODES,
}
# The names of all these by ONNX's codes.
NAMES = {code: name for name, code in KNOWN.items()}

# ONNX Runtime's own names of types, if they differ from numpy's and ml_dtypes'.
_OTHERS = {
    "float": "float32",
    "double": "float64",
    **{name.replace("_", ""): name for name in CODES},
    "float8e8m0": "float8_e8m0fnu",
}


_WRITTEN = {name: other for other, name in _OTHERS.items()}


def write_type(name: str) -> str:
    """A type of numpy or ml_dtypes as ONNX Runtime writes it: `tensor(float16)`."""
    return f"tensor({_WRITTEN.get(name, name)})"


def read_type(text: str) -> str:
    """The name in numpy or ml_dtypes of a type that ONNX Runtime writes as `tensor(float16)`."""
    name = text[text.index("(") + 1 : -1]
    return _OTHERS.get(name, name)
