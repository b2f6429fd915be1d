"""Parts of an attention, for graphs of tests."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tests.helpers.blocks import Block

HIDDEN, HEADS, HEAD = 24, 8, 4
WIDTH = HEADS * HEAD
PROJECTIONS = {"q", "k", "v", "o"}


def normed(b: Block) -> ir.Value:
    return b.op("Softmax", b.data("x", (2, 5, HIDDEN), ["n", "t", HIDDEN]))


def project(b: Block, x: ir.Value, name: str, heads: int = HEADS, size: int = HEAD) -> ir.Value:
    """[n, t, hidden] -> [n, heads, t, size]"""
    split = b.op("Reshape", b.op("MatMul", x, b.w(name, HIDDEN, heads * size)), b.ints(0, 0, heads, size))
    return b.op("Transpose", split, perm=[0, 2, 1, 3])


def attend(b: Block, q: ir.Value, k: ir.Value, v: ir.Value, bias: ir.Value | None = None) -> ir.Value:
    scores = b.op("Mul", b.op("MatMul", q, b.op("Transpose", k, perm=[0, 1, 3, 2])), b.constant(0.5, np.float32))
    scores = scores if bias is None else b.op("Add", scores, bias)
    return b.op("MatMul", b.op("Softmax", scores, axis=-1), v)


def finish(b: Block, attended: ir.Value, width: int = WIDTH) -> None:
    """[n, heads, t, size] -> [n, t, hidden], projected"""
    joined = b.op("Reshape", b.op("Transpose", attended, perm=[0, 2, 1, 3]), b.ints(0, 0, width))
    b.give(b.op("Softmax", b.op("MatMul", joined, b.w("o", width, HIDDEN))))


def project_back(b: Block, attended: ir.Value, width: int = WIDTH) -> None:
    """[n, t, heads x size] -> [n, t, hidden]"""
    b.give(b.op("Softmax", b.op("MatMul", attended, b.w("o", width, HIDDEN))))
