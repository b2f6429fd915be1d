"""The three parts of a vision-language model of transformers, as exporters write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_parts(
    folder: Path,
    model: Any,
    see: Any,
    pixels: Any,
    positions: Any,
    axes: Mapping[str, Mapping[int, str]],
) -> None:
    """Write the vision model (`see`, from pixels), the table of embeddings and the decoder into a new folder.

    `positions` are those of three tokens after four others. `axes` are the dynamic axes of positions, of pixels, and of
    the vision model's outputs.
    """
    import torch
    from transformers.cache_utils import DynamicCache

    class Vision(torch.nn.Module):  # type: ignore[misc]  # torch is not there when types are checked
        def forward(self, pixel_values: Any) -> Any:
            return see(pixel_values)

    class Decoder(torch.nn.Module):  # type: ignore[misc]
        def forward(self, embeds: Any, mask: Any, positions: Any, *past: Any) -> Any:
            cache = DynamicCache.from_legacy_cache(tuple(zip(past[::2], past[1::2])))
            total, new = mask.shape[1], embeds.shape[1]
            places = torch.arange(total)
            allowed = ((places[None] <= places[total - new :, None])[None] & mask.bool()[:, None])[:, None]
            bias = torch.where(allowed, torch.zeros(()), torch.full((), torch.finfo(torch.float32).min))
            made = model.model.language_model(
                inputs_embeds=embeds, attention_mask=bias, position_ids=positions, past_key_values=cache, use_cache=True
            )
            present = [value for pair in made.past_key_values.to_legacy_cache() for value in pair]
            return (model.lm_head(made.last_hidden_state), *present)

    def write(part: Any, arrays: tuple[Any, ...], name: str, inputs: list[str], outputs: list[str], axes: Any) -> None:
        file = str(folder / f"{name}.onnx")
        options: dict[str, Any] = {"dynamo": False, "opset_version": 17, "dynamic_axes": axes}
        torch.onnx.export(part, arrays, file, input_names=inputs, output_names=outputs, **options)

    folder.mkdir()
    size = model.config.text_config
    caches = [f"{layer}.{kind}" for layer in range(size.num_hidden_layers) for kind in ("key", "value")]
    past, present = ([f"{name}.{cache}" for cache in caches] for name in ("past_key_values", "present"))
    held = torch.randn(1, size.num_key_value_heads, 4, size.hidden_size // size.num_attention_heads)
    ids, embeds = torch.zeros(1, 3, dtype=torch.int64), torch.randn(1, 3, size.hidden_size)
    text = {0: "batch", 1: "sequence"}
    own = {**axes, "inputs_embeds": text, "logits": text, "attention_mask": {0: "batch", 1: "total"}}
    own |= {name: {0: "batch", 2: "past"} for name in past} | {name: {0: "batch", 2: "total"} for name in present}
    seen = {name: axes[name] for name in ("pixel_values", "image_features") if name in axes}
    both = dict.fromkeys(("input_ids", "inputs_embeds"), text)
    inputs = ["inputs_embeds", "attention_mask", "position_ids", *past]
    fed = (embeds, torch.ones(1, 7, dtype=torch.int64), positions, *[held] * len(past))
    write(Vision(), (pixels,), "vision_encoder", ["pixel_values"], ["image_features"], seen)
    write(model.get_input_embeddings(), (ids,), "embed_tokens", ["input_ids"], ["inputs_embeds"], both)
    decoder = {name: dynamic for name, dynamic in own.items() if name not in seen}
    write(Decoder(), fed, "decoder_model_merged", inputs, ["logits", *present], decoder)
