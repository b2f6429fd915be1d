"""The number types that values on their way between caller, engines and devices may have, and what ONNX calls them."""

from __future__ import annotations

# ONNX's codes (TensorProto.DataType) of those that numpy lacks and ml_dtypes has, by ml_dtypes' names.
CODES = {
    "bfloat16": 16,
    "float8_e4m3fn": 17,
    "float8_e4m3fnuz": 18,
    "float8_e5m2": 19,
    "float8_e5m2fnuz": 20,
    "float8_e8m0fnu": 24,
}
# The names of these by ONNX's codes.
NAMES = {code: name for name, code in CODES.items()}
# All that ONNX Runtime's Python interface can be given and asked for, by numpy's and ml_dtypes' names. It makes no
# OrtValue of strings and none of numbers of which a byte holds several, and has no complex numbers.
KNOWN = (
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64"),
    *CODES,
)
# ONNX Runtime's own names, where these are neither numpy's nor ml_dtypes'.
_OTHERS = {
    "float": "float32",
    "double": "float64",
    **{name.replace("_", ""): name for name in CODES},
    "float8e8m0": "float8_e8m0fnu",
}


def read_type(text: str) -> str:
    """`tensor(float16)`, as ONNX Runtime writes it, by the name that numpy or ml_dtypes has for it."""
    name = text[text.index("(") + 1 : -1]
    return _OTHERS.get(name, name)
