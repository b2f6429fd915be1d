"""Matching an adapter's modules to layers: the names of several programs, and unknown ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from splitc.runtime.adapters.adapter import Adapter, LowRank
from splitc.runtime.adapters.matching import Layer, match, need_matches
from splitc.runtime.errors import MisuseError


def adapter(*modules: str, inputs: int = 4, outputs: int = 4, kernel: tuple[int, ...] = ()) -> Adapter:
    return Adapter(
        "style",
        {
            name: LowRank(name, inputs, outputs, 2, kernel, 1.0, lambda: np.zeros(0), lambda: np.zeros(0))
            for name in modules
        },
    )


def layers(*names: str, kernel: tuple[int, ...] = ()) -> list[Layer]:
    return [Layer((name,), 4, 4, kernel) for name in names]


DECODER = layers(
    *(f"model.layers.{n}.{part}" for n in (0, 1, 10) for part in ("attn.q_proj", "mlp.up_proj")), "lm_head"
)
UNET = layers(
    *(f"/m/down_blocks.{n}/attentions.0/transformer_blocks.0/attn{k}/to_out.0" for n in (0, 1) for k in (1, 2))
)


@pytest.mark.parametrize(
    ("module", "known", "number"),
    [
        ("base_model.model.model.layers.1.self_attn.q_proj", DECODER, 2),
        ("model.layers.10.mlp.up_proj", DECODER, 5),
        ("lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_out_0", UNET, 3),
        ("unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0", UNET, 0),
        ("base_model.model.lm_head", DECODER, 6),
        ("text_encoder_2.layers.0.q", layers("layers.0.q", "layers.2.q"), 0),
    ],
)
def test_module_matches_the_layer_of_its_name(module: str, known: Sequence[Layer], number: int) -> None:
    found = match(adapter(module), known)
    assert (list(found.updates), found.unmatched) == ([number], {})


@pytest.mark.parametrize(
    ("module", "known", "why"),
    [
        ("model.layers.2.attn.q_proj", DECODER, "no layer has its name"),
        ("model.layers.3.lm_head", DECODER, "no layer has its name"),
        ("model.layers.1.attn.k_proj", DECODER, "no layer has its name"),
        (
            "layers.0.q",
            layers("a.layers.0.q", "b.layers.0.q"),
            "several layers may be meant: a.layers.0.q, b.layers.0.q",
        ),
        ("0.1", layers("x.0.1"), "no layer has its name"),
        ("layers.1.self_attn.q_proj", layers("layers.1.attn.proj"), "no layer has its name"),
        ("layers.1.self_attn.q_proj", layers("layers.1.attn.qkv_proj"), "no layer has its name"),
        ("lora_unet_blocks_1_attn_q_proj", layers("blocks.1.attn.proj"), "no layer has its name"),
    ],
)
def test_names_that_are_of_no_layer(module: str, known: Sequence[Layer], why: str) -> None:
    found = match(adapter(module), known)
    assert not found.updates
    assert any(part in found.unmatched[module] for part in why.split("|")), found.unmatched


def test_module_of_other_sizes_does_not_match() -> None:
    found = match(adapter("layers.0.q", outputs=8), layers("layers.0.q"))
    assert found.unmatched == {
        "layers.0.q": "it is for a layer of [4, 8] inputs and outputs, and layers.0.q has [4, 4]"
    }
    flat, kernel = layers("c.0.conv", kernel=(1, 1)), layers("c.0.conv", kernel=(3, 3))
    assert match(adapter("c.0.conv"), flat).updates and match(adapter("c.0.conv", kernel=(3, 3)), kernel).updates
    assert (
        not match(adapter("c.0.conv"), kernel).updates and not match(adapter("c.0.conv", kernel=(3, 3)), flat).updates
    )


def test_two_updates_of_one_layer() -> None:
    found = match(adapter("x.layers.0.q", "y.layers.0.q"), layers("layers.0.q"))
    assert not found.updates
    assert set(found.unmatched.values()) == {"one layer of x.layers.0.q, y.layers.0.q"}


def test_an_adapter_of_another_model() -> None:
    other = adapter("h.0.c_attn")
    with pytest.raises(MisuseError, match=r"another model's: 'h.0.c_attn': no layer .*q_proj"):
        need_matches(other, match(other, DECODER), DECODER)


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("base_model.model.transformer_blocks.0.attn.to_q", 0),
        ("transformer.single_transformer_blocks.0.attn.to_q", 1),
        ("lora_transformer_transformer_blocks_0_attn_to_q", 0),
        ("lora_transformer_single_transformer_blocks_0_attn_to_q", 1),
    ],
)
def test_a_scope_is_not_the_end_of_another_ones_name(module: str, number: int) -> None:
    """As in Flux, which has both kinds of blocks."""
    known = layers(*(f"m.{kind}transformer_blocks.0.attn.to_q" for kind in ("", "single_")))
    assert list(match(adapter(module), known).updates) == [number]
