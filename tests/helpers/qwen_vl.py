"""A small Qwen2-VL of transformers with random weights, and its parts. The decoder has three positions for a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.vision_parts import write_parts

LAYERS, HIDDEN, HEADS, KV_HEADS, WORDS = 2, 64, 4, 2, 70
END_OF_IMAGE, START_OF_IMAGE, IMAGE, END = WORDS - 5, WORDS - 4, WORDS - 3, WORDS - 1
# An image's patches: frames, rows and columns. Two by two patches become a token.
GRID = (1, 4, 6)
PROMPT = [1, START_OF_IMAGE, *[IMAGE] * 6, END_OF_IMAGE, 5, 6, 7]


def make_model() -> Any:
    """The model. Its weights are large, so that images change the answers."""
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
    """An image as the processor cuts it: [patches, numbers]."""
    import torch

    return torch.randn(24, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(1))


def export(model: Any, folder: Path) -> Path:
    """Write the parts and the config into the folder."""
    import torch

    def see(pixels: Any) -> Any:
        return model.model.visual(pixels, grid_thw=torch.tensor([GRID]))

    positions = torch.arange(4, 7).expand(3, 1, 3)
    write_parts(folder, model, see, make_pixels(), positions, {"position_ids": {1: "batch", 2: "sequence"}})
    model.config.save_pretrained(folder)
    return folder
