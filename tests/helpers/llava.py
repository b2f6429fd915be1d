"""A small LLaVA of transformers with random weights, and its three parts as exporters write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.folders import write_json
from tests.helpers.vision_parts import write_parts

LAYERS, HIDDEN, HEADS, KV_HEADS, WORDS = 3, 64, 4, 2, 70
IMAGE, PAD, END = WORDS - 3, WORDS - 2, WORDS - 1
SIDE, PATCH = 16, 8
TEMPLATE = (
    "{% for message in messages %}w50 {% for part in message.content %}"
    "{% if part.type == 'image' %}<image> {% else %}{{ part.text }} {% endif %}{% endfor %}{% endfor %}w51"
)


def make_model() -> Any:
    """The model. Its weights are large, so that images change the answers."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    common = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=64, image_size=SIDE, patch_size=PATCH, **common)
    text = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_key_value_heads=KV_HEADS,
        eos_token_id=END,
        **common,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-2)
    model = LlavaForConditionalGeneration(config).eval().requires_grad_(False)
    for weights in model.parameters():
        if weights.ndim > 1:
            weights.mul_(4)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = END, PAD
    return model


def make_processor() -> Any:
    """Its processor, with a word for each token."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    special = {"<image>": IMAGE, "<pad>": PAD, "<end>": END}
    words = {f"w{number}": number for number in range(IMAGE)} | special
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.model_input_names = ["input_ids", "attention_mask"]
    images = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return LlavaProcessor(
        images,
        fast,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=TEMPLATE,
    )


def export(model: Any, processor: Any, folder: Path) -> Path:
    """Write the parts, the configs and the processor into the folder."""
    import torch

    def see(pixels: Any) -> Any:
        seen = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states[-2][:, 1:]
        return model.model.multi_modal_projector(seen)

    images = {0: "images"}
    axes = {"position_ids": {0: "batch", 1: "sequence"}, "pixel_values": images, "image_features": images}
    write_parts(folder, model, see, torch.randn(1, 3, SIDE, SIDE), torch.arange(4, 7)[None], axes)
    processor.save_pretrained(folder)
    model.config.save_pretrained(folder)
    write_json(folder / "generation_config.json", {"eos_token_id": END})
    return folder


def write_image(path: Path, seed: int) -> Path:
    """An image of random pixels."""
    from PIL import Image

    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(path)
    return path
