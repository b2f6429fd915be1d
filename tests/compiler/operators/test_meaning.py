"""What an entry says of its operator's meaning, tested by the roles of a model's inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.sizes.roles import find_roles
from tests.helpers.blocks import FLOAT, INT, Block
from tests.helpers.operators import having, softmax

# The names of each operator's inputs in its specification, in order.
INPUTS: dict[str, str] = {
    **{
        name: " ".join(parameter.name for parameter in onnx.defs.get_schema(name).inputs)
        for name in ("Gather", "GatherElements", "RotaryEmbedding", "ScatterElements", "ScatterND", "TensorScatter")
    },
    "Attention": "Q K V attn_mask past_key past_value",
    "com.microsoft.Attention": "input weights bias mask_index past attention_bias",
    "com.microsoft.DecoderMaskedMultiHeadAttention": "query key value mask_index attention_bias past_key past_value",
    "com.microsoft.EmbedLayerNormalization": "input_ids segment_ids word_embedding "
    "position_embedding segment_embedding gamma beta mask position_ids",
    "com.microsoft.GatherBlockQuantized": "data indices scales zero_points",
    "com.microsoft.GroupQueryAttention": "query key value past_key past_value seqlens_k total_sequence_length "
    "cos_cache sin_cache position_ids attention_bias",
    "com.microsoft.MRotaryEmbedding": "input position_ids cos_cache sin_cache",
    "com.microsoft.MultiHeadAttention": "query key value bias key_padding_mask attention_bias past_key past_value",
    "com.microsoft.QAttention": "input weight bias input_scale weight_scale mask_index input_zero_point",
    "com.microsoft.QEmbedLayerNormalization": "input_ids segment_ids word_embedding "
    "position_embedding segment_embedding gamma beta mask",
    "com.microsoft.RotaryEmbedding": "input position_ids cos_cache sin_cache",
    "splitc.compiler.LatentAttention": "query key latent past_key past_latent seqlens_k total_sequence_length "
    "key_query - - attention_bias",
}
ROLES = {
    **dict.fromkeys(("attn_mask", "attention_bias"), "bias"),
    **dict.fromkeys(("mask", "mask_index", "key_padding_mask", "seqlens_k", "total_sequence_length"), "mask"),
    **dict.fromkeys(("position_ids", "write_indices"), "positions"),
    **dict.fromkeys(("input_ids", "segment_ids", "indices"), "indices"),
}


def roles_of(block: Block) -> dict[str, str]:
    """The role of each input that has one."""
    model = block.model()
    reads = {node: tuple(value for value in node.inputs if value is not None) for node in model.graph}
    graph = Graph(Path("model.onnx"), model, reads, {}, ())
    return {value.name or "": role.kind for value, role in find_roles(graph).items()}


def test_roles_of_each_operator_whose_inputs_have_some_are_tried() -> None:
    assert INPUTS.keys() == {*having("lookups"), *having("positions"), *having("masks")}


@pytest.mark.parametrize("name", INPUTS)
def test_roles_of_inputs(name: str) -> None:
    b = Block()
    expected, inputs = {}, []
    for place, called in enumerate(INPUTS[name].split()):
        kind = ROLES.get(called)
        if kind == "indices" and name.startswith("Scatter"):
            kind = "positions"
        shape = [2, 50] if called == "segment_embedding" else [40, 50]  # the kinds of tokens are few
        inputs.append(b.input(f"x{place}", FLOAT if kind in (None, "bias") else INT, shape))
        expected.update({f"x{place}": kind} if kind is not None else {})
    b.give(b.op(name, *inputs))
    assert roles_of(b) == expected


@pytest.mark.parametrize("name", [*having("is_product"), *having("is_norm"), "Relu"])
def test_what_is_added_to_a_product_or_a_norm_before_a_softmax_masks(name: str) -> None:
    b = Block()
    product = b.op(name, b.input("x", FLOAT, [4, 4]), b.w("w", 4, 4))
    b.give(softmax(b, b.op("Add", product, b.input("m", FLOAT, [4, 4]))))
    assert roles_of(b) == ({"m": "bias"} if name != "Relu" else {})


@pytest.mark.parametrize("name", [*having("may_precede_softmax"), "Exp"])
def test_scores_may_be_scaled_on_their_way_to_a_softmax(name: str) -> None:
    b = Block()
    product = b.op("MatMul", b.input("x", FLOAT, [4, 4]), b.w("w", 4, 4))
    masked = b.op("Add", product, b.input("m", FLOAT, [4, 4]))
    condition = [b.weight("where", ir.tensor(np.eye(4, dtype=np.bool_)))] if name == "Where" else []
    b.give(softmax(b, b.op(name, *condition, masked, b.w("scale", 4))))
    assert roles_of(b) == ({"m": "bias"} if name != "Exp" else {})


@pytest.mark.parametrize("name", [*having("may_make_angles"), *having("rearranges"), "Relu"])
def test_positions_may_be_turned_into_angles(name: str) -> None:
    b = Block()
    b.give(b.op("Cos", b.op(name, b.input("p", INT, [4, 4]), b.w("turns", 4))))
    assert roles_of(b) == ({"p": "positions"} if name != "Relu" else {})
