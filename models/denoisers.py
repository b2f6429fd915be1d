"""Two image models without weights: SDXL's U-Net (2.6 billion parameters) and FLUX.1-dev's transformer (11.9 billion).

    python models/denoisers.py unet -o unet.onnx
    python models/denoisers.py flux -o flux.onnx --tiny

Exported by torch from diffusers' classes, which are to be installed: pip install torch diffusers onnxscript. No weight
is ever in memory, and none is written: the file says where in NAME.onnx.data each of them is. `tests.gpu.made_weights`
makes that file, of random numbers. With --tiny the same structure, in a size for tests.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common as passes

OPSET = 20
# Weights begin on pages of memory.
ALIGNMENT = 4096

UNET: dict[str, Any] = {
    "sample_size": 128,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [320, 640, 1280],
    "layers_per_block": 2,
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
TINY_UNET: dict[str, Any] = {
    **UNET,
    "sample_size": 16,
    "block_out_channels": [32, 64, 128],
    "transformer_layers_per_block": [1, 1, 2],
    "attention_head_dim": [2, 4, 8],
    "cross_attention_dim": 64,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 112,
}
FLUX: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": [16, 56, 56],
}
TINY_FLUX: dict[str, Any] = {
    **FLUX,
    "in_channels": 16,
    "num_layers": 3,
    "num_single_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "axes_dims_rope": [4, 6, 6],
}


def unet_inputs(config: Mapping[str, Any], torch: Any) -> dict[str, Any]:
    """One step of an image with guidance: two latents of `sample_size` and two prompts of 77 tokens.

    The batch may have any size.
    """
    side, half = config["sample_size"], torch.float16
    pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
    return {
        "sample": torch.zeros(2, config["in_channels"], side, side, dtype=half),
        "timestep": torch.zeros(1, dtype=half),
        "encoder_hidden_states": torch.zeros(2, 77, config["cross_attention_dim"], dtype=half),
        "text_embeds": torch.zeros(2, pooled, dtype=half),
        "time_ids": torch.zeros(2, 6, dtype=half),
    }


def flux_inputs(config: Mapping[str, Any], torch: Any) -> dict[str, Any]:
    """One step of two images of 1024 pixels, 4096 tokens, and prompts of 512; a small model has 64 and 16.

    The batch may have any size.
    """
    image, text = (4096, 512) if config["num_layers"] > 8 else (64, 16)
    half = torch.float16
    return {
        "hidden_states": torch.zeros(2, image, config["in_channels"], dtype=half),
        "encoder_hidden_states": torch.zeros(2, text, config["joint_attention_dim"], dtype=half),
        "pooled_projections": torch.zeros(2, config["pooled_projection_dim"], dtype=half),
        "timestep": torch.zeros(2, dtype=half),
        "img_ids": torch.zeros(image, 3, dtype=half),
        "txt_ids": torch.zeros(text, 3, dtype=half),
        "guidance": torch.zeros(2, dtype=half),
    }


def export_unet(config: Mapping[str, Any]) -> ir.Model:
    """SDXL's U-Net. Raises ImportError if torch or diffusers are missing."""
    import torch
    from diffusers import UNet2DConditionModel

    class Step(torch.nn.Module):  # type: ignore[misc]
        """Takes what the class takes in a dictionary as inputs of their own."""

        def __init__(self) -> None:
            super().__init__()
            self.unet = UNet2DConditionModel(**config)

        def forward(self, sample, timestep, encoder_hidden_states, text_embeds, time_ids):  # type: ignore[no-untyped-def]
            # In single precision, as what it is joined with: torch's exporter joins unlike types, which ONNX does not.
            added = {"text_embeds": text_embeds.float(), "time_ids": time_ids}
            return self.unet(sample, timestep, encoder_hidden_states, added_cond_kwargs=added, return_dict=False)[0]

    batch = torch.export.Dim("batch")
    pictures = {"sample": {0: batch}, "timestep": None, "encoder_hidden_states": {0: batch}}
    shapes = {**pictures, "text_embeds": {0: batch}, "time_ids": {0: batch}}
    return _export(Step, lambda: unet_inputs(config, torch), "out_sample", shapes)


def export_flux(config: Mapping[str, Any]) -> ir.Model:
    """FLUX.1-dev's transformer. Raises ImportError if torch or diffusers are missing."""
    import torch
    from diffusers import FluxTransformer2DModel

    class Step(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.transformer = FluxTransformer2DModel(**config)

        def forward(  # type: ignore[no-untyped-def]
            self, hidden_states, encoder_hidden_states, pooled_projections, timestep, img_ids, txt_ids, guidance
        ):
            embedded = (hidden_states, encoder_hidden_states, pooled_projections)
            return self.transformer(*embedded, timestep, img_ids, txt_ids, guidance, return_dict=False)[0]

    batch = torch.export.Dim("batch")
    embedded = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "guidance")
    shapes = {**{name: {0: batch} for name in embedded}, "img_ids": None, "txt_ids": None}
    return _export(Step, lambda: flux_inputs(config, torch), "out_hidden_states", shapes)


def _export(
    make: Callable[[], Any], inputs: Callable[[], dict[str, Any]], output: str, dynamic: Any = None
) -> ir.Model:
    """The graph of a module in half precision. Its tensors have shapes and types only.

    `dynamic` are the inputs' dynamic axes, in torch.export's form.
    """
    import onnxscript
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.no_grad():
        single = torch.get_default_dtype()
        torch.set_default_dtype(torch.float16)
        try:
            module = make().eval()
        finally:
            torch.set_default_dtype(single)
        program = torch.onnx.export(
            module,
            kwargs=inputs(),
            dynamic_shapes=dynamic,
            dynamo=True,
            opset_version=OPSET,
            output_names=[output],
            optimize=False,
            verbose=False,
        )
    assert program is not None
    model: ir.Model = program.model
    for value in _weights(model):
        value.const_value = None
    onnxscript.optimizer.optimize_ir(model)
    return model


def _weights(model: ir.Model) -> list[ir.Value]:
    """The parameters. Tensors that torch made from numbers in the code are constants."""
    return [value for value in model.graph.initializers.values() if "." in (value.name or "")]


def save_without_weights(model: ir.Model, path: Path) -> int:
    """Write the graph, with each weight's place in NAME.onnx.data, and return that file's size in bytes."""
    end = 0
    for value in _weights(model):
        _fold_transposes(value)
        assert value.dtype is not None and value.shape is not None
        length = math.prod(value.shape.numpy()) * value.dtype.itemsize
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + int(length)
        value.const_value = ir.ExternalTensor(
            f"{path.name}.data", start, int(length), value.dtype, shape=value.shape, name=value.name or ""
        )
    passes.ClearMetadataAndDocStringPass()(model)  # torch's stack traces are most of the file
    path.parent.mkdir(parents=True, exist_ok=True)
    ir.save(model, path)
    return end


def _fold_transposes(weight: ir.Value) -> None:
    """Store a weight transposed as it is used, like exporters that have its data."""
    users = [node for node, _ in weight.uses()]
    if not all(node.op_type == "Transpose" for node in users) or weight.shape is None:
        return
    orders = {tuple(node.attributes["perm"].as_ints()) for node in users}
    if len(orders) == 1:
        weight.shape = ir.Shape([weight.shape[axis] for axis in orders.pop()])
        for node in users:
            node.outputs[0].replace_all_uses_with(weight)
            assert node.graph is not None
            node.graph.remove(node, safe=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["unet", "flux"])
    parser.add_argument("--output", "-o", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="few and small blocks")
    options = parser.parse_args()
    if options.model == "unet":
        model = export_unet(TINY_UNET if options.tiny else UNET)
    else:
        model = export_flux(TINY_FLUX if options.tiny else FLUX)
    size = save_without_weights(model, options.output)
    print(f"wrote {options.output}, without its {size} bytes of weights")


if __name__ == "__main__":
    main()
