"""Make a small diffusion pipeline with random weights, as diffusers saves it.

    python models/diffusion.py -o pipeline --kind sdxl
    optimum-cli export onnx --task text-to-image --model pipeline onnx

Needs diffusers, transformers and torch. The kinds are Stable Diffusion, SDXL with two text encoders, SD3 with three,
and Flux with two.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import diffusers
import tokenizers
import torch
import transformers
from transformers import CLIPTextModel, CLIPTextModelWithProjection, T5EncoderModel
from transformers.models.clip.tokenization_clip import bytes_to_unicode

START, END = "<|startoftext|>", "<|endoftext|>"
# Tokens of a prompt: CLIP's limit, which the exporters take for granted.
PROMPT = 77
HEAD = 8


@dataclass(frozen=True)
class Size:
    """`width` is that of the narrowest layer, `depth` the number of blocks, `image` the height and width in pixels."""

    width: int = 32
    depth: int = 4
    image: int = 64


def make(kind: str, size: Size = Size()) -> diffusers.DiffusionPipeline:
    """A pipeline of this kind. Its weights are the same each time."""
    torch.manual_seed(0)
    return KINDS[kind](size)


def stable_diffusion(size: Size) -> diffusers.DiffusionPipeline:
    return diffusers.StableDiffusionPipeline(
        vae=autoencoder(size, latents=4),
        text_encoder=_clip(size, CLIPTextModel),
        tokenizer=_clip_tokenizer(),
        unet=_unet(size, cross_attention_dim=size.width),
        scheduler=diffusers.DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl(size: Size) -> diffusers.DiffusionPipeline:
    # The added embedding reads the pooled text and six sizes, each of 8 numbers.
    added = {"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": size.width + 6 * 8}
    return diffusers.StableDiffusionXLPipeline(
        vae=autoencoder(size, latents=4),
        text_encoder=_clip(size, CLIPTextModel),
        text_encoder_2=_clip(size, CLIPTextModelWithProjection),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        unet=_unet(size, cross_attention_dim=2 * size.width, addition_embed_type="text_time", **added),
        scheduler=diffusers.EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1),
        add_watermarker=False,
    )


def sd3(size: Size) -> diffusers.DiffusionPipeline:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=size.image // 2,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=size.depth,
        attention_head_dim=HEAD,
        num_attention_heads=size.width // HEAD,
        caption_projection_dim=size.width,
        joint_attention_dim=2 * size.width,
        pooled_projection_dim=2 * size.width,
        pos_embed_max_size=size.image // 2,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        vae=autoencoder(size, latents=16, shift_factor=0.06, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=_clip(size, CLIPTextModelWithProjection),
        text_encoder_2=_clip(size, CLIPTextModelWithProjection),
        text_encoder_3=_t5(size),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        tokenizer_3=_t5_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


def flux(size: Size) -> diffusers.DiffusionPipeline:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=size.depth // 2,
        num_single_layers=size.depth - size.depth // 2,
        attention_head_dim=2 * HEAD,
        num_attention_heads=size.width // (2 * HEAD),
        joint_attention_dim=2 * size.width,
        pooled_projection_dim=size.width,
        axes_dims_rope=(HEAD // 2, HEAD // 2, HEAD),
        guidance_embeds=True,
    )
    return diffusers.FluxPipeline(
        transformer=transformer.eval(),
        vae=autoencoder(size, latents=4, shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=_clip(size, CLIPTextModel),
        text_encoder_2=_t5(size),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_t5_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


KINDS = {"sd": stable_diffusion, "sdxl": sdxl, "sd3": sd3, "flux": flux}


def _unet(size: Size, **options: Any) -> torch.nn.Module:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(size.width, 2 * size.width),
        layers_per_block=max(1, size.depth // 2),
        sample_size=size.image // 2,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=HEAD,
        norm_num_groups=min(32, size.width // 2),
        **options,
    ).eval()


def autoencoder(size: Size, latents: int, **options: Any) -> torch.nn.Module:
    return diffusers.AutoencoderKL(
        block_out_channels=(size.width, 2 * size.width),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=latents,
        norm_num_groups=min(32, size.width // 2),
        sample_size=size.image,
        **options,
    ).eval()


def _clip(size: Size, kind: type[torch.nn.Module]) -> torch.nn.Module:
    config = transformers.CLIPTextConfig(
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_attention_heads=size.width // HEAD,
        num_hidden_layers=size.depth,
        projection_dim=size.width,
        vocab_size=len(_clip_vocabulary()),
        max_position_embeddings=PROMPT,
        hidden_act="gelu",
        bos_token_id=_clip_vocabulary()[START],
        eos_token_id=_clip_vocabulary()[END],
        pad_token_id=_clip_vocabulary()[END],
    )
    return kind(config).eval()


def _t5(size: Size) -> torch.nn.Module:
    config = transformers.T5Config(
        d_model=2 * size.width,
        d_ff=4 * size.width,
        d_kv=HEAD,
        num_heads=2 * size.width // HEAD,
        num_layers=size.depth,
        vocab_size=len(_t5_vocabulary()),
    )
    return T5EncoderModel(config).eval()


def _clip_vocabulary() -> dict[str, int]:
    letters = list(bytes_to_unicode().values())
    return {word: place for place, word in enumerate([*letters, *(f"{each}</w>" for each in letters), START, END])}


def _clip_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """A tokenizer of single letters."""
    with TemporaryDirectory() as folder:
        vocabulary, merges = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        tokenizers.models.BPE(_clip_vocabulary(), []).save(folder)
        merges.write_text("#version: 0.2\n")
        return transformers.CLIPTokenizer(str(vocabulary), str(merges), model_max_length=PROMPT)


def _t5_vocabulary() -> list[tuple[str, float]]:
    words = ["<pad>", "</s>", "<unk>", "▁", *map(chr, range(ord("!"), ord("~") + 1))]
    return [(word, -float(place)) for place, word in enumerate(words)]


def _t5_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """A tokenizer of single letters."""
    words = tokenizers.Tokenizer(tokenizers.models.Unigram(_t5_vocabulary(), unk_id=2))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    words.decoder = tokenizers.decoders.Metaspace()
    end = _t5_vocabulary()[1][0]
    words.post_processor = tokenizers.processors.TemplateProcessing(f"$A {end}", special_tokens=[(end, 1)])
    return transformers.T5TokenizerFast(tokenizer_object=words, extra_ids=0, model_max_length=PROMPT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", required=True, help="the folder to write")
    parser.add_argument("--kind", choices=KINDS, default="sd")
    parser.add_argument("--width", type=int, default=Size.width, help="of the narrowest layer, a multiple of 32")
    parser.add_argument("--depth", type=int, default=Size.depth, help="blocks of each model")
    parser.add_argument("--image", type=int, default=Size.image, help="height and width in pixels")
    options = parser.parse_args()
    make(options.kind, Size(options.width, options.depth, options.image)).save_pretrained(options.output)


if __name__ == "__main__":
    main()
