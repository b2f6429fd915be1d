"""Classical machine learning: features are needed together, and rows are independent (`modes/test_rows.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.helpers.blocks import SHARES, Block
from tests.helpers.operators import INNER, Middle, Tiny, as_float, check_operator, sandwich, through

ML = "ai.onnx.ml"
TREE = {
    "nodes_treeids": [0, 0, 0],
    "nodes_nodeids": [0, 1, 2],
    "nodes_featureids": [1, 0, 0],
    "nodes_values": [0.1, 0.0, 0.0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_truenodeids": [1, 0, 0],
    "nodes_falsenodeids": [2, 0, 0],
}
LEAVES = {"treeids": [0, 0], "nodeids": [1, 2], "ids": [0, 1], "weights": [1.0, 2.0]}
CLASSES = {"classlabels_ints": [4, 7]}
SVM = {"kernel_type": "LINEAR", "kernel_params": [1.0, 0.0, 3.0]}


def tree(prefix: str) -> dict[str, Any]:
    return {**TREE, **{f"{prefix}_{name}": values for name, values in LEAVES.items()}}


def new_tree() -> dict[str, Any]:
    """As of ai.onnx.ml 5: a node is in the interior, and says whether its two children are leaves."""
    numbers = {"tree_roots": [0], "nodes_featureids": [1], "nodes_truenodeids": [0], "nodes_falsenodeids": [1]}
    leaves = {"nodes_trueleafs": [1], "nodes_falseleafs": [1], "leaf_targetids": [0, 1], "n_targets": 2}
    tensors = {
        "nodes_modes": ir.tensor(np.zeros(1, np.uint8)),
        "nodes_splits": ir.tensor(np.full(1, 0.1, np.float32)),
        "leaf_weights": ir.tensor(np.array([1, 2], np.float32)),
    }
    return {**numbers, **leaves, **tensors}


def first_place(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Squeeze", b.op("Slice", v, b.ints(0), b.ints(1), b.ints(1)), b.ints(1))


def of_features(name: str, **attributes: Any) -> Middle:
    """What an operator makes of the features of the first place, its mean added to those of all places."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        b.uses(ML, 5 if name == "TreeEnsemble" else 1)
        table = first_place(b, v)
        made = b.ops(f"{ML}.{name}", table, outputs=2 if name.endswith("Classifier") else 1, **attributes)[-1]
        return b.op("Add", v, b.op("Unsqueeze", b.op("ReduceMean", made, axes=[1], keepdims=1), b.ints(1)))

    return middle


def joined(b: Block, v: ir.Value) -> ir.Value:
    table = first_place(b, v)
    twice = b.op(f"{ML}.FeatureVectorizer", table, table, inputdimensions=[INNER, INNER])
    half = b.op("Slice", twice, b.ints(0), b.ints(INNER), b.ints(1))
    return b.op("Add", v, b.op("Unsqueeze", half, b.ints(1)))


def turned_around(b: Block, v: ir.Value) -> ir.Value:
    """With the numbers of each row in reverse added, picked by two rows of indices."""
    backwards = b.constant(np.arange(INNER)[::-1].reshape(2, -1), np.int64)
    return b.op("Add", v, b.op(f"{ML}.ArrayFeatureExtractor", v, backwards))


def in_categories(b: Block, v: ir.Value) -> ir.Value:
    """How many of two categories each number is in, which is sharded as it is."""
    number = b.op("Cast", b.op("Round", v), to=ir.DataType.INT64)
    return b.op("ReduceSum", b.op(f"{ML}.OneHotEncoder", number, cats_int64s=[0, 1]), b.ints(-1), keepdims=0)


def renamed(b: Block, v: ir.Value) -> ir.Value:
    number = b.op("Cast", b.op("Round", v), to=ir.DataType.INT64)
    b.uses(ML, 2)
    how = {"keys_int64s": [0, 1], "values_int64s": [5, 3], "default_int64": -2}
    return as_float(b, b.op(f"{ML}.LabelEncoder", number, **how))


def need(name: str, **attributes: Any) -> Tiny:
    """An operator that needs the features together."""
    return sandwich(through("Identity"), needs=of_features(name, **attributes))


def linear(count: int) -> dict[str, Any]:
    return {"coefficients": [0.1 * (n % 5) for n in range(count * INNER)], "intercepts": [0.5] * count}


GRAPHS: dict[str, Tiny] = {
    f"{ML}.{name}": tiny
    for name, tiny in {
        "Binarizer": sandwich(through(f"{ML}.Binarizer", threshold=0.1), shares=SHARES),
        "LabelEncoder": sandwich(renamed, shares=SHARES),
        "Imputer": need("Imputer", imputed_value_floats=[0.0] * INNER, replaced_value_float=1.0),
        "Normalizer": need("Normalizer", norm="L2"),
        "Scaler": need("Scaler", offset=[0.1 * n for n in range(INNER)], scale=[1.0 + n for n in range(INNER)]),
        "ArrayFeatureExtractor": sandwich(through("Identity"), needs=turned_around),
        "OneHotEncoder": sandwich(in_categories, shares=SHARES),
        "FeatureVectorizer": sandwich(through("Identity"), needs=joined),
        "TreeEnsemble": need("TreeEnsemble", **new_tree()),
        "LinearRegressor": need("LinearRegressor", targets=2, **linear(2)),
        "SVMRegressor": need(
            "SVMRegressor", coefficients=[0.5], support_vectors=[0.1] * INNER, n_supports=1, rho=[0.2], **SVM
        ),
        "TreeEnsembleRegressor": need("TreeEnsembleRegressor", n_targets=2, **tree("target")),
        "LinearClassifier": need("LinearClassifier", **CLASSES, **linear(2)),
        "SVMClassifier": need("SVMClassifier", **CLASSES, **SVM, coefficients=[0.1] * 2 * INNER, rho=[0.2, 0.1]),
        "TreeEnsembleClassifier": need("TreeEnsembleClassifier", classlabels_int64s=[4, 7], **tree("class")),
    }.items()
}


@pytest.mark.parametrize("name", GRAPHS)
def test_operator_is_sharded(name: str, tmp_path: Path) -> None:
    check_operator(GRAPHS, name, tmp_path)
