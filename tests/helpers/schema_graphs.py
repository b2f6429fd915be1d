"""Random graphs of any operators, made from the operators' schemas and from what ONNX Runtime accepts.

This module uses none of splitc's knowledge about operators. It guesses nodes: inputs and attributes of types that the
schema allows, numbers by the names that schemas use. Nodes that ONNX Runtime runs are kept, others are dropped.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import defs, helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

Array = npt.NDArray[Any]
# Left out: control flow, sequences, strings, operators that need subgraphs or files, and generators of numbers.
LEFT_OUT = frozenset(
    {"Constant", "ConstantOfShape", "EyeLike", "If", "Loop", "Scan", "StringNormalizer", "TfIdfVectorizer"}
)
RANDOM = ("Random", "Multinomial", "Bernoulli", "Dropout", "Sequence", "Optional", "String", "Image")
TYPES = {
    "tensor(float)": np.float32,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
    "tensor(uint8)": np.uint8,
    "tensor(int8)": np.int8,
}
LARGEST, MOST_ELEMENTS = 1e4, 4096
HIDDEN, WIDE = 8, 24


@dataclass
class RandomGraph:
    """A graph that grows by one node at a time. `values` has all arrays by name, as ONNX Runtime computes them."""

    seed: int
    opset: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)
    feeds: dict[str, Array] = field(default_factory=dict)
    values: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.numbers = np.random.default_rng(self.seed)
        self.fresh = 0

    def name(self, kind: str) -> str:
        self.fresh += 1
        return f"{kind}{self.fresh}"

    def weight(self, array: Array) -> str:
        name = self.name("w")
        self.weights[name] = array
        return name

    def made(self, shape: Sequence[int], dtype: Any) -> Array:
        """Random numbers of this shape and type."""
        if np.issubdtype(dtype, np.floating):
            fan = shape[-2] if len(shape) > 1 else 1
            return (self.numbers.standard_normal(shape) / math.sqrt(max(1, fan))).astype(dtype)
        high = 2 if dtype == np.bool_ else 4
        return self.numbers.integers(0, high, shape).astype(dtype)

    def try_node(self, node: onnx.NodeProto) -> bool:
        """Add the node if ONNX Runtime runs it, and its results are few and finite."""
        taken = {name: self.values.get(name, self.weights.get(name)) for name in node.input if name}
        results = run_node(node, {name: array for name, array in taken.items() if array is not None}, self.opset)
        if results is None or not any(_is_fine(each) for each in results):
            return False
        self.nodes.append(node)
        self.values.update({n: a for n, a in zip(node.output, results, strict=True) if n and _is_fine(a)})
        return True

    def linear(self, name: str, width: int) -> str | None:
        """Add a product with a new matrix, and sometimes a bias."""
        depth = self.values[name].shape[-1]
        if len(self.values[name].shape) < 2 or self.values[name].dtype != np.float32:
            return None
        out = self.name("v")
        matrix = self.weight(self.made((depth, width), np.float32))
        if not self.try_node(helper.make_node("MatMul", [name, matrix], [out], name=out)):
            return None
        if self.random.random() < 0.3:
            biased = self.name("v")
            bias = self.weight(self.made((width,), np.float32))
            if self.try_node(helper.make_node("Add", [out, bias], [biased], name=biased)):
                return biased
        return out

    def pick(self, dtype: Any, like: Array | None) -> str:
        """A value or a new weight of this type, sometimes with a shape that fits another array's."""
        known = [name for name, array in self.values.items() if array.dtype == dtype]
        recent = known[-4:]
        same = [name for name in known if like is not None and self.values[name].shape == like.shape]
        choice = self.random.random()
        if like is None or (choice < 0.35 and recent):
            return self.random.choice(recent or known or [self.weight(self.made((HIDDEN,), dtype))])
        if choice < 0.55 and same:
            return self.random.choice(same)
        shape = like.shape
        last = shape[-1:] or (1,)
        shapes: list[Sequence[int]] = [
            shape,
            last,
            (),
            (1,),
            (*last, HIDDEN),
            (HIDDEN, *last),
            shape[1:2] or (1,),
            shape[1:],
        ]
        return self.weight(self.made(self.random.choice(shapes), dtype))

    def grow(self, schema: defs.OpSchema) -> bool:
        """Try to add a node of an operator."""
        bound: dict[str, Any] = {}
        inputs: list[str] = []
        like: Array | None = None
        for number, formal in enumerate(schema.inputs):
            option = formal.option
            if option == defs.OpSchema.FormalParameterOption.Optional and self.random.random() < 0.5:
                inputs.append("")
                continue
            for _ in range(self.random.randint(1, 3) if option == defs.OpSchema.FormalParameterOption.Variadic else 1):
                dtype = self._type(schema, formal.type_str, bound)
                if dtype is None:
                    return False
                listed = self._list(formal.name, like, number) if dtype in (np.int64, np.int32) and number else None
                inputs.append(self.pick(dtype, like) if listed is None else self.weight(listed.astype(dtype)))
                if like is None:
                    like = self.values.get(inputs[-1], self.weights.get(inputs[-1]))
        while inputs and not inputs[-1]:
            inputs.pop()
        count = max(schema.min_output, 1)
        if schema.max_output > count and self.random.random() < 0.3:
            count = min(schema.max_output, count + 1, 3)
        outputs = [self.name("v") for _ in range(count)]
        node = helper.make_node(schema.name, inputs, outputs, name=outputs[0], domain=schema.domain)
        for name, attribute in schema.attributes.items():
            value = self._attribute(name, attribute, like)
            if value is not None and value != []:
                node.attribute.append(helper.make_attribute(name, value))
        return self.try_node(node)

    def _type(self, schema: defs.OpSchema, type_str: str, bound: dict[str, Any]) -> Any:
        if type_str in TYPES:
            return TYPES[type_str]
        if type_str not in bound:
            allowed = next((c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == type_str), [])
            known = [TYPES[each] for each in allowed if each in TYPES]
            if not known:
                return None
            floats = [each for each in known if each == np.float32]
            bound[type_str] = floats[0] if floats and self.random.random() < 0.85 else self.random.choice(known)
        return bound[type_str]

    def _list(self, name: str, like: Array | None, number: int) -> Array | None:
        """Numbers for an input with a known name in the schemas; None for data."""
        shape = like.shape if like is not None else (HIDDEN,)
        rank, pick = len(shape), self.random
        axis = pick.randrange(rank) if rank else 0
        if name == "shape":
            return np.array(pick.choice([self._reshaped(shape), list(shape), [1, *shape], [2, *shape]]))
        lists: dict[str, Any] = {
            "axes": sorted(pick.sample(range(rank), pick.randint(1, rank))) if rank else [0],
            "axis": np.array(axis),
            "k": [pick.randint(1, 3)],
            "K": [pick.randint(1, 3)],
            "repeats": [pick.randint(1, 2) for _ in shape],
            "starts": [pick.randint(0, 2)],
            "ends": [pick.choice([3, 100, -1, 2**40])],
            "steps": [pick.choice([1, 1, 2])],
            "split": self._parts(shape[axis] if rank else 1),
            "pads": [pick.choice([0, 0, 1]) for _ in range(2 * rank)],
            "depth": np.array(pick.randint(3, 6)),
            "sizes": [size * pick.choice([1, 1, 2]) for size in shape],
            "indices": self.numbers.integers(0, min([2, *shape]), pick.choice([(), (2,), (3,), shape, (2, 1)])),
        }
        return np.asarray(lists[name]) if name in lists else None

    def _parts(self, size: int) -> list[int]:
        first = self.random.randint(1, max(1, size - 1))
        return [first, size - first] if size > first else [size]

    def _reshaped(self, shape: Sequence[int]) -> list[int]:
        """The shape with two axes merged, or one divided, or one as -1."""
        sizes = list(shape)
        if len(sizes) > 1 and self.random.random() < 0.4:
            place = self.random.randrange(len(sizes) - 1)
            sizes[place : place + 2] = [sizes[place] * sizes[place + 1]]
        elif sizes:
            place = self.random.randrange(len(sizes))
            divisors = [n for n in range(1, sizes[place] + 1) if sizes[place] % n == 0]
            first = self.random.choice(divisors)
            sizes[place : place + 1] = [first, sizes[place] // first]
        if sizes and self.random.random() < 0.4:
            sizes[self.random.randrange(len(sizes))] = -1
        return sizes

    def _attribute(self, name: str, attribute: defs.OpSchema.Attribute, like: Array | None) -> Any:
        """A value for an attribute: its default, or one that suits its type and its name in the schemas."""
        pick, rank = self.random, like.ndim if like is not None else 1
        kinds = defs.OpSchema.AttrType
        if not attribute.required and pick.random() < 0.6:
            return None
        numbers = {
            "axis": pick.randrange(-rank, rank) if rank else 0,
            "to": int(
                helper.np_dtype_to_tensor_dtype(np.dtype(pick.choice([np.float32, np.int64, np.bool_, np.int32])))
            ),
            "group": pick.choice([1, 1, 2, 4]),
            "num_outputs": pick.choice([2, 2, 3]),
            "blocksize": 2,
            "num_groups": pick.choice([1, 2, 4]),
        }
        lists = {
            "perm": pick.sample(range(rank), rank),
            "axes": sorted(pick.sample(range(rank), pick.randint(1, rank))) if rank else [0],
            "kernel_shape": [pick.choice([1, 2, 3])] * max(1, rank - 2),
            "pads": [pick.choice([0, 1])] * 2 * max(1, rank - 2),
            "strides": [pick.choice([1, 2])] * max(1, rank - 2),
            "dilations": [1] * max(1, rank - 2),
            "split": self._parts(like.shape[-1] if like is not None and like.ndim else 1),
        }
        letters = "ij" if rank == 2 else "bij"
        texts = {
            "equation": pick.choice(
                [f"{letters},jk->{letters[:-1]}k", f"{letters}->{letters[::-1]}", f"{letters}->{letters[0]}"]
            )
        }
        by_type: Mapping[Any, Any] = {
            kinds.INT: numbers.get(name, pick.choice([0, 1])),
            kinds.INTS: lists.get(name),
            kinds.FLOAT: pick.choice([0.5, 1.0, 2.0]),
            kinds.STRING: texts.get(name) if attribute.required or name in texts else None,
        }
        return by_type.get(attribute.type)


def _is_fine(array: Any) -> bool:
    if (
        not isinstance(array, np.ndarray)
        or array.dtype.type not in TYPES.values()
        or not 0 < array.size <= MOST_ELEMENTS
    ):
        return False
    return array.dtype.kind != "f" or bool(np.isfinite(array).all() and np.abs(array).max() < LARGEST)


def run_node(node: onnx.NodeProto, taken: Mapping[str, Array], opset: int) -> list[Any] | None:
    """ONNX Runtime's results of a node; None if it refuses it."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in taken.items()
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], "node", inputs, outputs)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    try:
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph.output
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        results = list(session.run(None, dict(taken)))
        return results if all(map(_agrees, inferred, results)) else None
    except (ort_errors.Fail, ort_errors.InvalidArgument, ort_errors.InvalidGraph, ort_errors.NotImplemented):
        return None
    except (ort_errors.RuntimeException, ort_errors.EPFail, RuntimeError, ValueError, TypeError):
        return None
    except onnx.shape_inference.InferenceError:
        return None


def _agrees(inferred: onnx.ValueInfoProto, result: Any) -> bool:
    """Whether a result has the shape that ONNX infers: ONNX Runtime runs more than ONNX allows."""
    if not inferred.type.tensor_type.HasField("shape") or not isinstance(result, np.ndarray):
        return True
    sizes = inferred.type.tensor_type.shape.dim
    pairs = zip(sizes, result.shape, strict=False)
    return len(sizes) == result.ndim and all(not d.HasField("dim_value") or d.dim_value == n for d, n in pairs)


def schemas_of(opset: int) -> list[defs.OpSchema]:
    """The schemas of ONNX's own operators at an opset, except those left out."""
    found: dict[str, defs.OpSchema] = {}
    for schema in defs.get_all_schemas_with_history():
        known = found.get(schema.name)
        is_there = schema.domain == "" and schema.since_version <= opset and not schema.deprecated
        if is_there and (known is None or schema.since_version > known.since_version):
            found[schema.name] = schema
    return [s for name, s in sorted(found.items()) if name not in LEFT_OUT and not name.startswith(RANDOM)]


def random_graph(seed: int, steps: int = 10) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A model with a few products and random operators between and beside them, and its feeds."""
    pick = random.Random(seed)
    graph = RandomGraph(seed, pick.choice([13, 17, 18, 21]))
    schemas = schemas_of(graph.opset)
    graph.feeds["x"] = graph.values["x"] = graph.made((2, 3, HIDDEN), np.float32)
    current = "x"
    for _ in range(steps):
        if pick.random() < 0.45:
            width = pick.choice([WIDE, WIDE, HIDDEN])
            current = graph.linear(current, width) or current
        else:
            for _ in range(60):
                if graph.grow(pick.choice(schemas)):
                    break
        floats = [n for n, a in graph.values.items() if a.dtype == np.float32 and a.ndim >= 2 and n != "x"]
        current = pick.choice([current, *floats[-2:]]) if floats else current
    last = graph.linear(current, HIDDEN) or current
    read = {name for node in graph.nodes for name in node.input}
    ends = [name for name in graph.values if name not in read and name != "x"]
    outputs = list(dict.fromkeys([last, *ends[-3:]])) if last != "x" else ends[-3:]
    return _model(graph, outputs, pick.random() < 0.5), graph.feeds


def _model(graph: RandomGraph, outputs: Sequence[str], symbols: bool) -> onnx.ModelProto:
    """The graph as a model, without nodes that its outputs do not need."""
    needed, nodes = set(outputs), []
    for node in reversed(graph.nodes):
        if needed.intersection(node.output):
            nodes.append(node)
            needed.update(node.input)
    tensors = [numpy_helper.from_array(array, name) for name, array in graph.weights.items() if name in needed]
    types = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in graph.values.items()}
    inputs = [
        helper.make_tensor_value_info(name, types[name], ["n", *array.shape[1:]] if symbols else array.shape)
        for name, array in graph.feeds.items()
        if name in needed
    ]
    results = [helper.make_tensor_value_info(name, types[name], None) for name in outputs]
    made = helper.make_graph(nodes[::-1], "random", inputs, results, tensors)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", graph.opset)], ir_version=10)
