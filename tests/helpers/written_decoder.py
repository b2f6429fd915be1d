"""Decoders with concatenated caches, as exporters write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Arrays = dict[str, np.ndarray]
_KINDS = ("key", "value")
MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Style:
    """How a decoder is written.

    - `masked`: it has an input attention_mask [batch, all]. If not, its mask follows from the lengths alone.
    - `one`: it reads one token at a time. `groups`: the query heads of each key head.
    - `mask`: booleans in a Where (`where`), whose rows of NaN become zeros; or times a low number, after a Cast.
    - `scale`: a constant `after` the product; constants on `both` factors; or `computed` from the head size, on both.
    - `turned`: keys are transposed as a batch of matrices. `tiled`: key heads are repeated by Tile.
    - `reads`: the value from whose shape the number of earlier tokens comes, or that of new ones (`hidden`).
    - `window`: how many last tokens every other layer sees, beginning with the first layer.
    - `operator`: attention is ONNX's operator. It reads `concatenated` caches, or takes the `past` itself, with four
      axes or three (`flat`). It has these `attributes`; if it is causal, there is no other mask. Or it is ONNX
      Runtime's MultiHeadAttention, which reads concatenated caches (`fused`), or takes the past itself (`fused past`),
      or its GroupQueryAttention (`fused grouped`), which takes the length from the shape of a past.
    - `sinks`: a learned number for each head is joined to the scores.
    - `blanks`: rows that are masked entirely become zeros after the attention.
    - `zeroed`: a mask sets rows of padding to zero, and its length has a symbol of its own, as in hybrids.
    - `picked`: the mask is picked by numbers of rows and tokens, and its sizes have symbols of their own, as torch's
      newer exporter writes it.
    - `odd`: see `write`.
    """

    masked: bool = True
    one: bool = False
    groups: int = 2
    mask: str = "where"
    scale: str = "after"
    turned: bool = False
    reads: str = "past"
    heads: int = 4
    size: int = 8
    layers: int = 2
    vocabulary: int = 40
    opset: int = 18
    dtype: int = TensorProto.FLOAT
    odd: str = ""
    window: int = 0
    operator: str = ""
    attributes: tuple[tuple[str, int | float], ...] = ()
    sinks: bool = False
    blanks: bool = False
    tiled: bool = False
    zeroed: bool = False
    picked: bool = False

    @property
    def is_causal(self) -> bool:
        return ("is_causal", 1) in self.attributes

    @property
    def is_fused(self) -> bool:
        return self.operator.startswith("fused")

    @property
    def kv_heads(self) -> int:
        return self.heads // self.groups

    @property
    def width(self) -> int:
        return self.heads * self.size


def write(style: Style, seed: int = 0) -> onnx.ModelProto:
    """The model: input_ids, position_ids, perhaps attention_mask, and for each layer past_key.N and past_value.N.

    If `odd` is set, its caches can't be in place: `beams` picks rows of the past, `shared` has one cache for two
    layers, `values` also returns the values in another form, `sinks` joins other values to the scores, `parts` computes
    keys and values from the cache, `scores` returns the scores, `summed` weighs rows by their scores. `tanh` is a
    softcap, which only GPUs have in place.
    """
    return _Writer(style, seed).model()


class _Writer:
    def __init__(self, style: Style, seed: int) -> None:
        self.style = style
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._more: list[onnx.ValueInfoProto] = []
        self._count = 0

    def model(self) -> onnx.ModelProto:
        style = self.style
        length: Any = 1 if style.one else "sequence"
        total = "past + 1" if style.one else "past + sequence"
        state: list[Any] = ["batch", style.kv_heads, "past", style.size]
        inputs: list[tuple[str, int, list[Any]]] = [
            (name, TensorProto.INT64, ["batch", length]) for name in ("input_ids", "position_ids")
        ]
        if style.masked or style.zeroed:
            own = style.zeroed or style.picked
            sizes = ["masks" if style.picked else "batch", "tokens" if own else total]
            inputs.append(("attention_mask", TensorProto.INT64, sizes))
        kinds = [f"{kind}.{n}" for n in range(style.layers) for kind in ("key", "value")]
        inputs += [(f"past_{kind}", style.dtype, state) for kind in kinds]
        outputs: list[tuple[str, int, list[Any]]] = [("logits", style.dtype, ["batch", length, style.vocabulary])]
        outputs += [(f"present_{kind}", style.dtype, [*state[:2], total, style.size]) for kind in kinds]
        self._write()
        graph = helper.make_graph(
            self._nodes,
            "decoder",
            [helper.make_tensor_value_info(*value) for value in inputs],
            [*(helper.make_tensor_value_info(*value) for value in outputs), *self._more],
            self._weights,
        )
        version = 10 if style.operator else 8
        opsets = [
            helper.make_opsetid("", style.opset),
            *([helper.make_opsetid(MICROSOFT, 1)] if style.is_fused else []),
        ]
        return helper.make_model(graph, opset_imports=opsets, ir_version=version)

    def _write(self) -> None:
        style = self.style
        rows = self.add("Gather", self.normal(style.vocabulary, style.width), "input_ids")
        value = self.add("Add", rows, self.add("Gather", self.normal(64, style.width), "position_ids"))
        mask = "" if style.is_causal else self._mask("input_ids" if style.reads != "hidden" else rows)
        if style.zeroed:
            first = self.add("Neg", self.add("Unsqueeze", self.size_of("input_ids", 1), self.number([0])))
            kept = self.add("Slice", "attention_mask", first, self.number([1 << 62]), self.number([1]))
            kept = self.add("Cast", self.add("Unsqueeze", kept, self.number([2])), to=style.dtype)
            value = self.add("Mul", value, kept)
        masks = [self._near(mask), mask] if style.window else [mask]
        for number in range(style.layers):
            value = self.add("Add", value, self._attention(number, value, masks[number % len(masks)]))
        self.add("MatMul", value, self.normal(style.width, style.vocabulary), name="logits")

    def add(self, operator: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        self._count += 1
        made = name or f"{operator.lower()}_{self._count}"
        self._nodes.append(helper.make_node(operator, list(inputs), [made], name=f"node_{made}", **attributes))
        return made

    def number(self, value: Any, dtype: Any = np.int64) -> str:
        self._count += 1
        self._weights.append(numpy_helper.from_array(np.asarray(value, dtype), f"weight_{self._count}"))
        return f"weight_{self._count}"

    def float(self, value: Any) -> str:
        return self.number(value, helper.tensor_dtype_to_np_dtype(self.style.dtype))

    def normal(self, *shape: int) -> str:
        return self.float(self._random.standard_normal(shape) / np.sqrt(shape[-1]))

    def size_of(self, value: str, axis: int) -> str:
        """One size of a value, as a scalar."""
        return self.add("Gather", self.add("Shape", value), self.number(axis))

    def listed(self, *sizes: int | str) -> str:
        """A list of numbers, and of scalars by name."""
        parts = [
            self.number([size]) if isinstance(size, int) else self.add("Unsqueeze", size, self.number([0]))
            for size in sizes
        ]
        return self.add("Concat", *parts, axis=0)

    def _mask(self, tokens: str) -> str:
        """Booleans: what each query may see, [batch or 1, 1, sequence, all]."""
        one, zero = self.number(1), self.number(0)
        if self.style.reads == "mask":
            self._all = self.size_of("attention_mask", 1)
            self._before = self.add("Sub", self._all, self.size_of(tokens, 1))
        else:
            self._before = self.size_of("past_value.0", 2)
            self._all = self.add("Add", self._before, self.size_of(tokens, 1))
        self._keys = self.add("Unsqueeze", self.add("Range", zero, self._all, one), self.number([0]))
        self._queries = self.add("Unsqueeze", self.add("Range", self._before, self._all, one), self.number([1]))
        causal = self.add("Unsqueeze", self.add("LessOrEqual", self._keys, self._queries), self.number([0, 1]))
        if not self.style.masked:
            return causal
        kept = self.add("Cast", "attention_mask", to=TensorProto.BOOL)
        if self.style.picked:
            return self.add("And", causal, self._picked(kept, tokens))
        return self.add("And", causal, self.add("Unsqueeze", kept, self.number([1, 2])))

    def _picked(self, kept: str, tokens: str) -> str:
        """The mask's entries, picked by the numbers of rows and of tokens."""
        counts = (self.size_of(tokens, 0), [1, 2, 3]), (self._all, [0, 1, 2])
        numbers = [
            self.add("Unsqueeze", self.add("Range", self.number(0), count, self.number(1)), self.number(axes))
            for count, axes in counts
        ]
        shape = self.add("Shape", self.add("Add", *numbers))
        parts = [self.add("Unsqueeze", self.add("Expand", one, shape), self.number([-1])) for one in numbers]
        return self.add("GatherND", kept, self.add("Concat", *parts, axis=-1))

    def _near(self, mask: str) -> str:
        """Those of the booleans that are true within the window."""
        edge = self.add("Sub", self._queries, self.number(self.style.window))
        near = self.add("Unsqueeze", self.add("Greater", self._keys, edge), self.number([0, 1]))
        return self.add("And", mask, near)

    def _attention(self, number: int, value: str, mask: str) -> str:
        style = self.style
        if style.is_fused:
            return self._multi_head(number, value, mask)
        if style.operator:
            return self._operator(number, value, mask)
        query = self._by_heads(value, style.heads)
        keys, values = (self._cache(kind, number, value) for kind in ("key", "value"))
        keys, values = self._repeated(keys), self._repeated(values)
        if style.odd == "parts":
            keys, values = (self.add("MatMul", part, self.normal(style.size, style.size)) for part in (keys, values))
        scale = style.size**-0.5
        if style.turned:
            rows = self.listed(-1, self.size_of(keys, 2), style.size)
            turned = self.add("Transpose", self.add("Reshape", keys, rows), perm=[0, 2, 1])
            back = self.listed(self.size_of(keys, 0), style.heads, style.size, self.size_of(keys, 2))
            keys = self.add("Reshape", turned, back)
        else:
            keys = self.add("Transpose", keys, perm=[0, 1, 3, 2])
        if style.scale == "both":
            query, keys = (self.add("Mul", factor, self.float(scale**0.5)) for factor in (query, keys))
        if style.scale == "computed":
            size = self.add("Cast", self.size_of(query, 3), to=style.dtype)
            root = self.add("Sqrt", self.add("Div", self.float(1), self.add("Sqrt", size)))
            query, keys = (self.add("Mul", factor, root) for factor in (query, keys))
        scores = self.add("MatMul", query, keys)
        if style.scale == "after":
            scores = self.add("Div", scores, self.float(1 / scale))
        if style.odd == "tanh":
            scores = self.add("Mul", self.add("Tanh", self.add("Mul", scores, self.float(0.5))), self.float(2))
        scores = self._masked(scores, mask)
        if style.odd == "sinks":
            scores = self.add("Concat", scores, scores, axis=-1)
        if style.sinks:
            scores = self._with_sinks(scores)
        weights = self.add("Softmax", scores, axis=-1)
        if style.sinks:
            weights = self.add("Slice", weights, *(self.number([number]) for number in (0, -1, -1, 1)))
        if style.odd == "sinks":
            ends = self.add("Unsqueeze", self._all, self.number([0]))
            weights = self.add("Slice", weights, self.number([0]), ends, self.number([-1]))
        if style.mask == "where":
            weights = self.add("Where", self.add("IsNaN", weights), self.float(0), weights)
        made = self.add("MatMul", weights, values)
        if style.odd == "summed":
            rows = self.add("ReduceLogSumExp", scores, self.number([-1]), keepdims=1)
            made = self.add("Mul", made, self.add("Sigmoid", rows))
        if style.blanks:
            made = self._blanked(made, mask)
        made = self.add("Transpose", made, perm=[0, 2, 1, 3])
        made = self.add("Reshape", made, self.number([0, 0, style.width]))
        return self.add("MatMul", made, self.normal(style.width, style.width))

    def _blanked(self, made: str, mask: str) -> str:
        """Rows of nothing but padding become zeros, as transformers' exporter writes it."""
        count = self.add("ReduceSum", self.add("Cast", mask, to=TensorProto.FLOAT), self.number([-1]))
        one = numpy_helper.from_array(np.array(1, np.float32), f"one_{self._count}")
        self._weights.append(one)
        return self.add("Where", self.add("Less", count, one.name), self.float(0), made)

    def _with_sinks(self, scores: str) -> str:
        """A softmax with sinks, as in GPT-OSS, after subtracting each row's maximum."""
        sinks = self.add("Reshape", self.normal(1, self.style.heads), self.number([1, -1, 1, 1]))
        sizes = self.listed(self.size_of(scores, 0), 1, self.size_of(scores, 2), 1)
        joined = self.add("Concat", scores, self.add("Expand", sinks, sizes), axis=-1)
        return self.add("Sub", joined, self.add("ReduceMax", joined, self.number([-1])))

    def _operator(self, number: int, value: str, mask: str) -> str:
        style, presents = self.style, [f"present_{kind}.{number}" for kind in ("key", "value")]
        attributes: dict[str, Any] = dict(style.attributes)
        if style.operator == "concatenated":
            inputs = [self._by_heads(value, style.heads), *(self._cache(kind, number, value) for kind in _KINDS), mask]
            made = self.add("Attention", *inputs, **attributes)
        else:
            heads = (style.heads, style.kv_heads, style.kv_heads)
            if style.operator == "flat":
                attributes |= {"q_num_heads": style.heads, "kv_num_heads": style.kv_heads}
                new = [self.add("MatMul", value, self.normal(style.width, count * style.size)) for count in heads]
            else:
                new = [self._by_heads(value, count) for count in heads]
            made = f"attended_{number}"
            inputs = [*new, mask, *(f"past_{kind}.{number}" for kind in _KINDS)]
            outputs = [made, *presents, *([f"scores_{number}"] if style.odd == "scores" else [])]
            self._nodes.append(helper.make_node("Attention", inputs, outputs, name=f"node_{made}", **attributes))
        if style.odd == "scores":
            shape: list[Any] = ["batch", style.heads, "new", "all"]
            self._more.append(helper.make_tensor_value_info(f"scores_{number}", style.dtype, shape))
        if style.operator != "flat":
            made = self.add("Transpose", made, perm=[0, 2, 1, 3])
            made = self.add("Reshape", made, self.number([0, 0, style.width]))
        return self.add("MatMul", made, self.normal(style.width, style.width))

    def _multi_head(self, number: int, value: str, mask: str) -> str:
        """MultiHeadAttention. Without a past of its own, it reads caches with repeated heads, as rows."""
        style, outputs, pasts = self.style, [f"attended_{number}"], list[str]()
        inputs = [self.add("MatMul", value, self.normal(style.width, style.width))]
        if style.operator != "fused":
            width = style.kv_heads * style.size
            inputs += [self.add("MatMul", value, self.normal(style.width, width)) for _ in _KINDS]
            pasts = [f"past_{kind}.{number}" for kind in _KINDS]
            outputs += [f"present_{kind}.{number}" for kind in _KINDS]
        else:
            for cache in [self._repeated(self._cache(kind, number, value)) for kind in _KINDS]:
                rows = self.add("Transpose", cache, perm=[0, 2, 1, 3])
                inputs.append(self.add("Reshape", rows, self.number([0, 0, -1])))
        bias = self.add("Where", mask, self.float(0), self.float(-3e4))
        attributes: dict[str, Any] = {"num_heads": style.heads, **dict(style.attributes)}
        if style.operator == "fused grouped":
            operator, inputs = "GroupQueryAttention", [*inputs, *pasts, *self._lengths(), "", "", "", bias]
            attributes |= {"kv_num_heads": style.kv_heads, "causal": 0}
        else:
            operator, inputs = "MultiHeadAttention", [*inputs, "", "", bias, *pasts]
        node = helper.make_node(operator, inputs, outputs, f"node_{outputs[0]}", domain=MICROSOFT, **attributes)
        self._nodes.append(node)
        return self.add("MatMul", outputs[0], self.normal(style.width, style.width))

    def _lengths(self) -> list[str]:
        """Both lengths of GroupQueryAttention."""
        total = self.add("Cast", self._all, to=TensorProto.INT32)
        batch = self.add("Unsqueeze", self.size_of("position_ids", 0), self.number([0]))
        return [self.add("Expand", self.add("Sub", total, self.number(1, np.int32)), batch), total]

    def _masked(self, scores: str, mask: str) -> str:
        """Masked scores: as sdpa writes it, where hidden rows become NaN; or by a low number, which averages them."""
        if self.style.mask == "where":
            return self.add("Add", scores, self.add("Where", mask, self.float(0), self.float(-np.inf)))
        hidden = self.add("Cast", self.add("Not", mask), to=self.style.dtype)
        return self.add("Add", scores, self.add("Mul", hidden, self.float(-3e4)))

    def _by_heads(self, value: str, heads: int) -> str:
        rows = self.add("MatMul", value, self.normal(self.style.width, heads * self.style.size))
        return self.add("Transpose", self.add("Reshape", rows, self.number([0, 0, heads, -1])), perm=[0, 2, 1, 3])

    def _cache(self, kind: str, number: int, value: str) -> str:
        style = self.style
        past = f"past_{kind}.{number}"
        if style.odd == "beams":
            past = self.add("Gather", past, self.add("Range", self.number(0), self.size_of(past, 0), self.number(1)))
        made = self.add("Concat", past, self._by_heads(value, style.kv_heads), name=f"present_{kind}.{number}", axis=2)
        if style.odd == "shared" and number == 1:
            return f"present_{kind}.0"
        if style.odd == "values" and kind == "value" and number == 0:
            self.add("Transpose", made, name="turned", perm=[0, 1, 3, 2])
            shape: list[Any] = ["batch", style.kv_heads, style.size, "all"]
            self._more.append(helper.make_tensor_value_info("turned", style.dtype, shape))
        return made

    def _repeated(self, value: str) -> str:
        """A cache's heads, repeated for the queries of their group."""
        style = self.style
        if style.groups == 1:
            return value
        shape = self.listed(self.size_of(value, 0), style.kv_heads, style.groups, self._all, style.size)
        if style.tiled:
            shape = self.number([1, 1, style.groups, 1, 1])
        thin = self.add("Unsqueeze", value, self.number([2]))
        many = self.add("Tile" if style.tiled else "Expand", thin, shape)
        back = self.listed(self.size_of(value, 0), style.heads, self.size_of(value, 2), style.size)
        return self.add("Reshape", many, back)


def feeds(style: Style, batch: int, new: int, past: int, padded: int = 0, seed: int = 0) -> Arrays:
    """Feeds after `past` tokens. A mask hides the first `padded` tokens of the first row."""
    random = np.random.default_rng(seed)
    made: Arrays = {
        "input_ids": random.integers(0, style.vocabulary, (batch, new)),
        "position_ids": np.tile(np.arange(past, past + new), (batch, 1)),
    }
    if style.masked or style.zeroed:
        made["attention_mask"] = np.ones((batch, past + new), np.int64)
        made["attention_mask"][0, :padded] = 0
    dtype = helper.tensor_dtype_to_np_dtype(style.dtype)
    for number in range(style.layers):
        for kind in ("key", "value"):
            array = random.standard_normal((batch, style.kv_heads, past, style.size))
            made[f"past_{kind}.{number}"] = array.astype(dtype)
    return made


def following(style: Style, outputs: Mapping[str, np.ndarray], batch: int, new: int, padded: int = 0) -> Arrays:
    """Feeds of the request after one with these outputs."""
    past = outputs["present_key.0"].shape[2]
    made = feeds(style, batch, new, past, padded, seed=past)
    return {**made, **{f"past_{name[8:]}": array for name, array in outputs.items() if name.startswith("present_")}}


def without_states(request: Mapping[str, np.ndarray]) -> Arrays:
    """The feeds of a sequence: those without caches."""
    return {name: array for name, array in request.items() if not name.startswith("past_")}
