"""Attention as exporters write it, in many forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper


@dataclass(frozen=True)
class Form:
    """How attention is written.

    `scale`: after the product, before it on queries, split over queries and keys, late, after the bias, or none.
    `bias`: what is added to the scores: nothing, a mask [batch, 1, length, all], one row [batch, 1, 1, all], a
    learned one [heads, length, all], or both of the first and the last. `keys`: transposed as one order, as two, or
    from a cache [batch, heads, all, size].
    """

    scale: str = "after"
    bias: str = "none"
    keys: str = "once"
    groups: int = 1
    guard: bool = False
    flipped: bool = False
    dtype: int = TensorProto.FLOAT
    wide_softmax: bool = False
    tanh: bool = False
    softmax_axis: int = -1
    opset: int = 17


@dataclass(frozen=True)
class Size:
    """Batch, lengths of queries and of keys, heads and their size."""

    batch: int = 2
    length: int = 5
    all: int = 7
    heads: int = 4
    size: int = 8

    @property
    def width(self) -> int:
        return self.heads * self.size


def write(form: Form, size: Size, blocks: int = 1, seed: int = 0) -> onnx.ModelProto:
    """A model of so many attentions, one after the other, with projections. Batch and lengths are symbols.

    Inputs: x [batch, length, width], memory [batch, all, width] and, with a mask, mask [batch, 1, length or 1, all].
    """
    return _Writer(form, size, seed).model(blocks)


class _Writer:
    def __init__(self, form: Form, size: Size, seed: int) -> None:
        self.form, self.size = form, size
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._count = 0

    def model(self, blocks: int) -> onnx.ModelProto:
        size, dtype = self.size, self.form.dtype
        value = "x"
        for _ in range(blocks):
            value = self._block(value)
        self._nodes[-1].output[0] = "y"
        inputs: list[tuple[str, list[str | int | None]]] = [
            ("x", ["batch", "length", size.width]),
            ("memory", ["batch", "all", size.width]),
        ]
        if self.form.bias in ("mask", "both"):
            inputs.append(("mask", ["batch", 1, "length", "all"]))
        if self.form.bias == "row":
            inputs.append(("mask", ["batch", 1, 1, "all"]))
        values = [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs]
        outputs = [helper.make_tensor_value_info("y", dtype, ["batch", "length", size.width])]
        graph = helper.make_graph(self._nodes, "attention", values, outputs, self._weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.form.opset)], ir_version=8)

    def _add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        self._count += 1
        name = f"{operator.lower()}_{self._count}"
        self._nodes.append(helper.make_node(operator, list(inputs), [name], name=f"node_{name}", **attributes))
        return name

    def _weight(self, array: np.ndarray, integer: bool = False) -> str:
        self._count += 1
        dtype = np.int64 if integer else helper.tensor_dtype_to_np_dtype(self.form.dtype)
        self._weights.append(numpy_helper.from_array(np.asarray(array, dtype), f"weight_{self._count}"))
        return f"weight_{self._count}"

    def _projected(self, value: str, heads: int) -> str:
        """[batch, length, heads, size]."""
        size = self.size
        weight = self._random.standard_normal((size.width, heads * size.size)) / np.sqrt(size.width)
        shape = self._weight(np.array([0, 0, heads, size.size]), integer=True)
        return self._add("Reshape", self._add("MatMul", value, self._weight(weight)), shape)

    def _scaled(self, value: str, number: float) -> str:
        if self.form.flipped:
            return self._add("Mul", self._weight(np.array(number)), value)
        return self._add("Div", value, self._weight(np.array(1 / number)))

    def _block(self, value: str) -> str:
        form, size = self.form, self.size
        number = size.size**-0.5
        query = self._add("Transpose", self._projected(value, size.heads), perm=[0, 2, 1, 3])
        heads = size.heads // form.groups
        keys, values = self._projected("memory", heads), self._projected("memory", heads)
        values = self._repeated(self._add("Transpose", values, perm=[0, 2, 1, 3]))
        if form.keys == "once" and form.groups == 1:
            keys = self._add("Transpose", keys, perm=[0, 2, 3, 1])
        else:
            keys = self._repeated(self._add("Transpose", keys, perm=[0, 2, 1, 3]))
            if form.keys == "cache":
                keys, values = self._add("Identity", keys), self._add("Identity", values)
            keys = self._add("Transpose", keys, perm=[0, 1, 3, 2])
        if form.scale == "before":
            query = self._scaled(query, number)
        if form.scale == "split":
            query, keys = self._scaled(query, number**0.5), self._scaled(keys, number**0.5)
        scores = self._add("MatMul", query, keys)
        if form.scale == "after":
            scores = self._scaled(scores, number)
        for bias in self._biases():
            scores = self._add("Add", *((bias, scores) if form.flipped else (scores, bias)))
        if form.scale == "late":
            scores = self._scaled(scores, number)
        if form.tanh:
            scores = self._add("Tanh", scores)
        if form.wide_softmax:
            scores = self._add("Cast", scores, to=TensorProto.FLOAT)
        weights = self._add("Softmax", scores, axis=form.softmax_axis)
        if form.wide_softmax:
            weights = self._add("Cast", weights, to=form.dtype)
        if form.guard:
            weights = self._add("Where", self._add("IsNaN", weights), self._weight(np.array(0.0)), weights)
        made = self._add("Transpose", self._add("MatMul", weights, values), perm=[0, 2, 1, 3])
        return self._add("Reshape", made, self._weight(np.array([0, 0, size.width]), integer=True))

    def _biases(self) -> list[str]:
        size, kind = self.size, self.form.bias
        biases = ["mask"] if kind in ("mask", "row", "both") else []
        if kind in ("learned", "both"):
            biases.append(self._weight(self._random.standard_normal((size.heads, size.length, size.all))))
        return biases

    def _repeated(self, value: str) -> str:
        """Key heads, repeated for the query heads of their group."""
        groups, size = self.form.groups, self.size
        if groups == 1:
            return value
        one = self._add("Unsqueeze", value, self._weight(np.array([2]), integer=True))
        shape = self._weight(np.array([1, 1, groups, 1, 1]), integer=True)
        many = self._add("Expand", one, shape)
        sizes = self._add("Shape", value)
        ends = [self._add("Gather", sizes, self._weight(np.array([axis]), integer=True)) for axis in (0, 2)]
        heads, width = (self._weight(np.array([number]), integer=True) for number in (size.heads, size.size))
        return self._add("Reshape", many, self._add("Concat", ends[0], heads, ends[1], width, axis=0))


def feeds(form: Form, size: Size, seed: int = 1) -> dict[str, np.ndarray]:
    """Random inputs; a mask hides some keys, and not the first."""
    random, dtype = np.random.default_rng(seed), helper.tensor_dtype_to_np_dtype(form.dtype)
    made = {
        "x": random.standard_normal((size.batch, size.length, size.width)),
        "memory": random.standard_normal((size.batch, size.all, size.width)),
    }
    if form.bias in ("mask", "row", "both"):
        rows = 1 if form.bias == "row" else size.length
        hidden = random.random((size.batch, 1, rows, size.all)) < 0.4
        hidden[..., 0] = False
        made["mask"] = np.where(hidden, np.finfo(dtype).min / 2, 0.0)
    return {name: array.astype(dtype) for name, array in made.items()}


def operators(graph: ir.Graph) -> list[str]:
    """The operators of a graph, with those of other domains by their whole names."""
    return [f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in graph]
