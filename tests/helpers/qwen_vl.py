"""A small Qwen2-VL of transformers with random weights, whose decoder has three positions a token, and its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LAYERS, HIDDEN, HEADS, KV_HEADS, WORDS = 2, 64, 4, 2, 70
END_OF_IMAGE, START_OF_IMAGE, IMAGE, END = WORDS - 5, WORDS - 4, WORDS - 3, WORDS - 1
# The patches of an image: one frame, rows and columns. Two by two of them are a token.
GRID = (1, 4, 6)
PROMPT = [1, START_OF_IMAGE, *[IMAGE] * 6, END_OF_IMAGE, 5, 6, 7]


def make_model() -> Any:
    """The model. Its weights are large enough for images to matter."""
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    torch.manual_seed(0)
    turned = {"type": "mrope", "mrope_section": [2, 3, 3]}
    text: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    text |= {"hidden_size": HIDDEN, "intermediate_size": 96, "vocab_size": WORDS, "rope_scaling": turned}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": HIDDEN, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    tokens = {"image_token_id": IMAGE, "vision_start_token_id": START_OF_IMAGE, "vision_end_token_id": END_OF_IMAGE}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, video_token_id=WORDS - 2, **tokens)
    config._attn_implementation = "eager"
    model = Qwen2VLForConditionalGeneration(config).eval().requires_grad_(False)
    for weights in model.parameters():
        if weights.ndim > 1:
            weights.mul_(4)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = END
    return model


def make_pixels() -> Any:
    """An image as the processor cuts it, [patches, numbers]."""
    import torch

    return torch.randn(24, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(1))


def export(model: Any, folder: Path) -> Path:
    """Write the parts and the config into the folder."""
    import torch
    from transformers.cache_utils import DynamicCache

    class Vision(torch.nn.Module):  # type: ignore[misc]  # torch is not there when types are checked
        def forward(self, pixel_values: Any) -> Any:
            return model.model.visual(pixel_values, grid_thw=torch.tensor([GRID]))

    class Decoder(torch.nn.Module):  # type: ignore[misc]
        def forward(self, embeds: Any, mask: Any, positions: Any, *past: Any) -> Any:
            cache = DynamicCache.from_legacy_cache(tuple(zip(past[::2], past[1::2])))
            total, new = mask.shape[1], embeds.shape[1]
            places = torch.arange(total)
            causal = (places[None] <= places[total - new :, None])[None, None]
            bias = torch.where(causal, torch.zeros(()), torch.full((), torch.finfo(torch.float32).min))
            made = model.model.language_model(
                inputs_embeds=embeds, attention_mask=bias, position_ids=positions, past_key_values=cache, use_cache=True
            )
            present = [value for pair in made.past_key_values.to_legacy_cache() for value in pair]
            return (model.lm_head(made.last_hidden_state), *present)

    def write(part: Any, arrays: tuple[Any, ...], name: str, inputs: list[str], outputs: list[str], axes: Any) -> None:
        options: dict[str, Any] = {"dynamo": False, "opset_version": 17, "dynamic_axes": axes}
        file = str(folder / f"{name}.onnx")
        torch.onnx.export(part, arrays, file, input_names=inputs, output_names=outputs, **options)

    folder.mkdir()
    caches = [f"{layer}.{kind}" for layer in range(LAYERS) for kind in ("key", "value")]
    past, present = ([f"{name}.{cache}" for cache in caches] for name in ("past_key_values", "present"))
    held, ids = torch.randn(1, KV_HEADS, 4, HIDDEN // HEADS), torch.zeros(1, 3, dtype=torch.int64)
    places = torch.arange(4, 7).expand(3, 1, 3)
    fed = (torch.randn(1, 3, HIDDEN), torch.ones(1, 7, dtype=torch.int64), places, *[held] * len(past))
    text = {0: "batch", 1: "sequence"}
    axes = {"inputs_embeds": text, "logits": text, "position_ids": {1: "batch", 2: "sequence"}}
    axes |= {"attention_mask": {0: "batch", 1: "total"}}
    axes |= {name: {0: "batch", 2: "past"} for name in past} | {name: {0: "batch", 2: "total"} for name in present}
    write(Vision(), (make_pixels(),), "vision_encoder", ["pixel_values"], ["image_features"], {})
    both = dict.fromkeys(("input_ids", "inputs_embeds"), text)
    write(model.get_input_embeddings(), (ids,), "embed_tokens", ["input_ids"], ["inputs_embeds"], both)
    inputs = ["inputs_embeds", "attention_mask", "position_ids", *past]
    write(Decoder(), fed, "decoder_model_merged", inputs, ["logits", *present], axes)
    model.config.save_pretrained(folder)
    return folder
