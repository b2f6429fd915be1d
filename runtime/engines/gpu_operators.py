"""Operators that ONNX Runtime has on GPUs only, in an engine's file.

There each is a function of other operators, in the domain `FUNCTIONS`. A session on the CPU runs these functions. A
session on a GPU calls the operators of the same names in the domain `OPERATORS`, which go before functions.
"""

from __future__ import annotations

# Equally long, so that one can take the other's place in a file: protobuf writes strings with their lengths.
FUNCTIONS, OPERATORS = "splitc.on.gpu", "com.microsoft"


def call_operators(content: bytes) -> bytes | None:
    """An ONNX file's content that calls operators in place of these functions; None if it has none of them."""
    functions, operators = FUNCTIONS.encode(), OPERATORS.encode()
    return content.replace(functions, operators) if functions in content else None
