"""Attention as exporters write it, in many forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

# Masks of booleans, which are true for what is kept.
TRUTHS = ("where", "kept")


@dataclass(frozen=True)
class Form:
    """How attention is written.

    - `scale`: `after` the product; `before` it, on queries; `split` over queries and keys; `late`, after the bias; or a
      `computed` number after the product, or one for each of the `heads`.
    - `bias`: what is added to the scores: `none`; a `mask` [batch, 1, length, all]; one `row` [batch, 1, 1, all]; a
      `learned` one [heads, length, all]; `both` a mask and a learned one. `where` and `kept` are boolean masks, by a
      Where, or by products of the scores and of a low number with the mask and its opposite.
    - `keys`: transposed `once`; twice; `around` the transpose views merge batch and heads; from a `cache`; or one head
      that is `shared` by all queries.
    - `layout`: batch and `heads` are two axes; they are `merged`, heads before lengths; merged in `rows`, lengths
      first; or stay as projected, in an `einsum`.
    - `softmax`: `one` operator; after a small number was added to all scores (`shifted`), or an array that is
      `filled` with zeros; after the highest score was subtracted; or `written` out.
    - `zeroed`: weights of hidden scores become zero by the same mask after the Softmax.
    - `keys_first`: scores are the transposed product of keys and queries.
    - `fused_product`: the scores come from ONNX Runtime's FusedMatMul, which scales and transposes.
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
    layout: str = "heads"
    softmax: str = "one"
    value_size: int | None = None
    turned: bool = False
    reads_sizes: bool = False
    sinks: bool = False
    widened: bool = False
    fused_product: bool = False
    zeroed: bool = False
    keys_first: bool = False


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
        self.value_size = form.value_size or size.size
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._count = 0
        self.masks: list[str] = []

    def model(self, blocks: int) -> onnx.ModelProto:
        size, dtype = self.size, self.form.dtype
        value = "x"
        for _ in range(blocks):
            value = self._block(value)
        self._nodes[-1].output[0] = "y"
        # A bias that was learned for some lengths fits only these.
        length, all_keys = (size.length, size.all) if self.form.bias in ("learned", "both") else ("length", "all")
        inputs: list[tuple[str, Any]] = [
            ("x", ["batch", length, size.width]),
            ("memory", ["batch", all_keys, size.width]),
        ]
        values = [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs]
        if (mask := _mask_shape(self.form, ("batch", length, all_keys))) is not None:
            mask_type = TensorProto.BOOL if self.form.bias in TRUTHS else dtype
            values.append(helper.make_tensor_value_info("mask", mask_type, mask))
        outputs = [helper.make_tensor_value_info("y", dtype, ["batch", length, size.width])]
        graph = helper.make_graph(self._nodes, "attention", values, outputs, self._weights)
        opsets = [helper.make_opsetid("", self.form.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)

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

    def _projected(self, value: str, heads: int, width: int) -> str:
        """A projection to [batch, length, heads, width], in the form's layout."""
        size, layout = self.size, self.form.layout
        weight = self._random.standard_normal((size.width, heads * width)) / np.sqrt(size.width)
        rows = self._add("MatMul", value, self._weight(weight))
        if layout == "rows":
            first = self._add("Transpose", rows, perm=[1, 0, 2])
            return self._add("Transpose", self._reshaped(first, 0, -1, width), perm=[1, 0, 2])
        divided = self._reshaped(rows, 0, 0, heads, width)
        return divided if layout == "einsum" else self._add("Transpose", divided, perm=[0, 2, 1, 3])

    def _reshaped(self, value: str, *shape: int | str) -> str:
        """A Reshape. A name in the shape is that of a list of one size."""
        if all(isinstance(size, int) for size in shape):
            return self._add("Reshape", value, self._weight(np.array(shape), integer=True))
        parts = [size if isinstance(size, str) else self._weight(np.array([size]), integer=True) for size in shape]
        return self._add("Reshape", value, self._add("Concat", *parts, axis=0))

    def _size_of(self, value: str, axis: int) -> str:
        return self._add("Gather", self._add("Shape", value), self._weight(np.array([axis]), integer=True))

    def _scaled(self, value: str, number: float) -> str:
        if self.form.flipped:
            return self._add("Mul", self._weight(np.array(number)), value)
        return self._add("Div", value, self._weight(np.array(1 / number)))

    def _block(self, value: str) -> str:
        form, size = self.form, self.size
        number = size.size**-0.5
        query, keys, values = self._factors(value)
        if form.scale == "before":
            query = self._scaled(query, number)
        if form.scale == "split":
            query, keys = self._scaled(query, number**0.5), self._scaled(keys, number**0.5)
        if form.widened:
            query, keys = (self._add("Cast", factor, to=TensorProto.FLOAT) for factor in (query, keys))
        if form.layout == "einsum":
            scores = self._add("Einsum", query, keys, equation="blhd,bahd->bhla")
        elif form.fused_product:
            turned = self._add("Transpose", keys, perm=[0, 1, 3, 2])
            scores = self._add("FusedMatMul", query, turned, domain="com.microsoft", transB=1, alpha=number)
        elif form.keys_first:
            factors = [self._add("Transpose", factor, perm=[0, 1, 3, 2]) for factor in (keys, query)]
            scores = self._add("Transpose", self._add("MatMul", *factors), perm=[0, 1, 3, 2])
        else:
            scores = self._add("MatMul", query, keys)
        if form.scale == "after" and not form.fused_product:
            scores = self._scaled(scores, number)
        if form.scale in ("computed", "heads"):
            computed = self._weight(self._random.random((size.heads, 1, 1) if form.scale == "heads" else 1) - 1)
            computed = self._add("Exp", computed)
            scores = self._add(*("Div", scores, computed) if form.flipped else ("Mul", computed, scores))
        by_heads = form.layout in ("merged", "rows") and form.bias != "none"
        if by_heads:
            ends = self._size_of("x", 0), self._size_of(scores, 1), self._size_of(scores, 2)
            scores = self._reshaped(scores, ends[0], size.heads, *ends[1:])
        scores = self._biased(scores)
        if form.scale == "late":
            scores = self._scaled(scores, number)
        if by_heads:
            scores = self._reshaped(scores, -1, *ends[1:])
        weights = self._softmax(scores)
        if form.guard:
            weights = self._add("Where", self._add("IsNaN", weights), self._weight(np.array(0.0)), weights)
        result = self._weighed(weights, values)
        if form.reads_sizes:
            keys_read = self._add("Cast", self._add("Shape", weights, start=-1), to=form.dtype)
            result = self._add("Div", result, keys_read)
        return result

    def _factors(self, value: str) -> tuple[str, str, str]:
        """Queries, keys (transposed for the product) and values."""
        form, size = self.form, self.size
        heads = size.heads // form.groups if form.keys != "shared" else 1
        query = self._projected(value, size.heads, size.size)
        keys = self._projected("memory", heads, size.size)
        keys_at = len(self._nodes) - 1
        values = self._projected("memory", heads, self.value_size)
        if form.layout == "einsum":
            return query, keys, values
        if form.layout == "rows":
            return query, self._add("Transpose", keys, perm=[0, 2, 1]), values
        if form.groups > 1:
            keys, values = self._repeated(keys, size.size), self._repeated(values, self.value_size)
        if form.keys == "cache":
            keys, values = self._add("Identity", keys), self._add("Identity", values)
        if form.layout == "merged":
            made = []
            for each, width in ((query, size.size), (keys, size.size), (values, self.value_size)):
                made.append(self._reshaped(each, -1, self._size_of(each, 2), width))
            return made[0], self._add("Transpose", made[1], perm=[0, 2, 1]), made[2]
        if form.keys == "once" and form.groups == 1:  # both transposes of the keys in one
            self._nodes[keys_at].attribute[0].CopyFrom(helper.make_attribute("perm", [0, 2, 3, 1]))
            return query, keys, values
        if form.keys == "around":
            rows = self._size_of(keys, 2)
            turned = self._add("Transpose", self._reshaped(keys, -1, rows, size.size), perm=[0, 2, 1])
            return query, self._reshaped(turned, self._size_of("x", 0), size.heads, size.size, rows), values
        return query, self._add("Transpose", keys, perm=[0, 1, 3, 2]), values

    def _biased(self, scores: str) -> str:
        form = self.form
        if form.bias in TRUTHS:
            low = self._weight(np.array(-np.inf if form.guard and form.bias == "where" else -3e4))
            if form.bias == "where":
                zero = (low, scores) if form.flipped else (scores, low)
                self.masks.append(self._add("Not", "mask") if form.flipped else "mask")
                return self._add("Where", self.masks[-1], *zero)
            kept = self._add("Mul", self._add("Cast", "mask", to=form.dtype), scores)
            hidden = self._add("Mul", low, self._add("Cast", self._add("Not", "mask"), to=form.dtype))
            return self._add("Add", kept, hidden)
        for bias in self._biases():
            scores = self._add("Add", *((bias, scores) if form.flipped else (scores, bias)))
        return scores

    def _softmax(self, scores: str) -> str:
        form = self.form
        if form.tanh:
            scores = self._add("Tanh", scores)
        if form.sinks:
            scores = self._add("Concat", scores, scores, axis=-1)
        if form.wide_softmax:
            scores = self._add("Cast", scores, to=TensorProto.FLOAT)
        if form.softmax == "shifted":
            shift = self._weight(np.array(1e-3))
            scores = self._add("Add", *((shift, scores) if form.flipped else (scores, shift)))
        elif form.softmax == "filled":
            empty = self._add("ConstantOfShape", self._add("Shape", scores))
            typed = self._add("Cast", empty, to=form.dtype) if form.dtype != TensorProto.FLOAT else empty
            zeros = self._add("Mul", typed, self._weight(np.array(0.0)))
            scores = self._add("Add", *((zeros, scores) if form.flipped else (scores, zeros)))
        elif form.softmax != "one":
            scores = self._add("Sub", scores, self._add("ReduceMax", scores, axes=[-1], keepdims=1))
        if form.softmax == "written":
            powers = self._add("Exp", scores)
            axes = self._weight(np.array([-1]), integer=True)
            weights = self._add("Div", powers, self._add("ReduceSum", powers, axes, keepdims=1))
        else:
            weights = self._add("Softmax", scores, axis=form.softmax_axis)
        if form.zeroed:
            mask, zero = self.masks[-1], self._weight(np.array(0.0))
            weights = self._add("Where", mask, *((zero, weights) if form.flipped else (weights, zero)))
        if form.wide_softmax or form.widened:
            weights = self._add("Cast", weights, to=form.dtype)
        if form.sinks:
            numbers = [self._weight(np.array([number]), integer=True) for number in (0, self.size.all, -1)]
            weights = self._add("Slice", weights, *numbers)
        return weights

    def _weighed(self, weights: str, values: str) -> str:
        """The weighted values of all heads, projected to the model's width."""
        form, size = self.form, self.size
        width = size.heads * self.value_size
        if form.layout == "einsum":
            made = self._add("Einsum", weights, values, equation="...hla,...ahd->...lhd")  # as Flax writes it
        elif form.turned:
            order = [0, 2, 1] if form.layout in ("merged", "rows") else [0, 1, 3, 2]
            turned = [self._add("Transpose", each, perm=order) for each in (values, weights)]
            made = self._add("Transpose", self._add("MatMul", *turned), perm=order)
        else:
            made = self._add("MatMul", weights, values)
        if form.layout == "rows":
            made = self._reshaped(self._add("Transpose", made, perm=[1, 0, 2]), 0, -1, width)
            made = self._add("Transpose", made, perm=[1, 0, 2])
        else:
            if form.layout == "merged":
                made = self._reshaped(made, -1, size.heads, self._size_of(made, 1), self.value_size)
            if form.layout != "einsum":
                made = self._add("Transpose", made, perm=[0, 2, 1, 3])
            made = self._reshaped(made, 0, 0, width)
        if width == size.width:
            return made
        weight = self._random.standard_normal((width, size.width)) / np.sqrt(width)
        return self._add("MatMul", made, self._weight(weight))

    def _biases(self) -> list[str]:
        size, kind = self.size, self.form.bias
        biases = ["mask"] if kind in ("mask", "row", "both") else []
        if kind in ("learned", "both"):
            biases.append(self._weight(self._random.standard_normal((size.heads, size.length, size.all))))
        return biases

    def _repeated(self, value: str, width: int) -> str:
        """Key heads, repeated for the query heads of their group."""
        groups, size = self.form.groups, self.size
        one = self._add("Unsqueeze", value, self._weight(np.array([2]), integer=True))
        shape = self._weight(np.array([1, 1, groups, 1, 1]), integer=True)
        many = self._add("Expand", one, shape)
        return self._reshaped(many, self._size_of(value, 0), size.heads, self._size_of(value, 2), width)


def _mask_shape(form: Form, sizes: tuple[Any, Any, Any]) -> tuple[Any, ...] | None:
    """The shape of a form's mask, for the batch and the lengths of queries and keys."""
    batch, length, all_keys = sizes
    if form.bias in ("mask", "both", *TRUTHS):
        return batch, 1, length, all_keys
    return (batch, 1, 1, all_keys) if form.bias == "row" else None


def feeds(form: Form, size: Size, seed: int = 1) -> dict[str, np.ndarray]:
    """Random inputs. A mask hides some keys, but not the first, or (`zeroed`) all keys of a row."""
    random, dtype = np.random.default_rng(seed), helper.tensor_dtype_to_np_dtype(form.dtype)
    made: dict[str, np.ndarray] = {
        "x": random.standard_normal((size.batch, size.length, size.width)).astype(dtype),
        "memory": random.standard_normal((size.batch, size.all, size.width)).astype(dtype),
    }
    shape = _mask_shape(form, (size.batch, size.length, size.all))
    if shape is not None:
        hidden = random.random(shape) < 0.4
        hidden[..., 0] = False
        if form.zeroed:
            hidden[0, :, 0] = True  # a row
        made["mask"] = np.where(hidden, np.finfo(dtype).min / 2, 0.0).astype(dtype)
        if form.bias in TRUTHS:
            made["mask"] = ~hidden
    return made


def operators(graph: ir.Graph) -> list[str]:
    """The operators of a graph, by their full names if they are not ONNX's own."""
    return [f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in graph]
