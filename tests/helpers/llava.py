"""A small LLaVA of transformers with random weights, and its three parts as exporters write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.folders import write_json

LAYERS, HIDDEN, HEADS, KV_HEADS, WORDS = 3, 64, 4, 2, 70
IMAGE, PAD, END = WORDS - 3, WORDS - 2, WORDS - 1
SIDE, PATCH = 16, 8
TEMPLATE = (
    "{% for message in messages %}w50 {% for part in message.content %}"
    "{% if part.type == 'image' %}<image> {% else %}{{ part.text }} {% endif %}{% endfor %}{% endfor %}w51"
)


def make_model() -> Any:
    """The model. Its weights are large enough for images to matter."""
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
    """Its processor: a word for each token."""
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
    from transformers.cache_utils import DynamicCache

    class Vision(torch.nn.Module):  # type: ignore[misc]  # torch is not there when types are checked
        def forward(self, pixel_values: Any) -> Any:
            seen = model.model.vision_tower(pixel_values, output_hidden_states=True).hidden_states[-2][:, 1:]
            return model.model.multi_modal_projector(seen)

    class Decoder(torch.nn.Module):  # type: ignore[misc]
        def forward(self, embeds: Any, mask: Any, positions: Any, *past: Any) -> Any:
            cache = DynamicCache.from_legacy_cache(tuple(zip(past[::2], past[1::2])))
            causal = torch.arange(mask.shape[1])[None, None] <= positions[:, :, None]
            allowed = (causal & mask.bool()[:, None])[:, None]
            bias = torch.where(allowed, torch.zeros(()), torch.full((), torch.finfo(torch.float32).min))
            made = model.model.language_model(
                inputs_embeds=embeds, attention_mask=bias, position_ids=positions, past_key_values=cache, use_cache=True
            )
            present = [each for pair in made.past_key_values.to_legacy_cache() for each in pair]
            return (model.lm_head(made.last_hidden_state), *present)

    def write(part: Any, arrays: tuple[Any, ...], name: str, inputs: list[str], outputs: list[str], axes: Any) -> None:
        file = str(folder / f"{name}.onnx")
        options: dict[str, Any] = {"dynamo": False, "opset_version": 17, "dynamic_axes": axes}
        torch.onnx.export(part, arrays, file, input_names=inputs, output_names=outputs, **options)

    folder.mkdir()
    text = {0: "batch", 1: "sequence"}
    caches = [f"{layer}.{kind}" for layer in range(LAYERS) for kind in ("key", "value")]
    past, present = ([f"{name}.{cache}" for cache in caches] for name in ("past_key_values", "present"))
    held = torch.randn(1, KV_HEADS, 4, HIDDEN // HEADS)
    pixels, embeds, ids = torch.randn(1, 3, SIDE, SIDE), torch.randn(1, 3, HIDDEN), torch.zeros(1, 3, dtype=torch.int64)
    fed = (embeds, torch.ones(1, 7, dtype=torch.int64), torch.arange(4, 7)[None], *[held] * len(past))
    inputs = ["inputs_embeds", "attention_mask", "position_ids"]
    axes = dict.fromkeys(("inputs_embeds", "position_ids", "logits"), text) | {
        "attention_mask": {0: "batch", 1: "total"}
    }
    axes |= {name: {0: "batch", 2: "past"} for name in past} | {name: {0: "batch", 2: "total"} for name in present}
    many = {"pixel_values": {0: "images"}, "image_features": {0: "images"}}
    write(Vision(), (pixels,), "vision_encoder", ["pixel_values"], ["image_features"], many)
    write(
        model.get_input_embeddings(),
        (ids,),
        "embed_tokens",
        ["input_ids"],
        ["inputs_embeds"],
        dict.fromkeys(("input_ids", "inputs_embeds"), text),
    )
    write(Decoder(), fed, "decoder_model_merged", [*inputs, *past], ["logits", *present], axes)
    processor.save_pretrained(folder)
    model.config.save_pretrained(folder)
    write_json(folder / "generation_config.json", {"eos_token_id": END})
    return folder


def write_image(path: Path, seed: int) -> Path:
    """Random pixels."""
    from PIL import Image

    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(path)
    return path
