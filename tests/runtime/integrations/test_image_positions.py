"""Positions in an image: the tokens of transformers' Qwen2-VL. `make test-diffusers` runs this."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from splitc.compiler import Request, compile_pipeline, plan_pipeline
from splitc.runtime import MisuseError, Pipeline
from splitc.runtime.generate.image_prompt import ImagePrompt, read_positions
from splitc.runtime.generate.vision_language import find_vision_wiring, generate_about_images
from tests.helpers import qwen_vl

MOST = 16


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_tokens_are_those_of_transformers(tmp_path: Path, mode: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model, pixels, grid = qwen_vl.make_model(), qwen_vl.make_pixels(), torch.tensor([qwen_vl.GRID])
    folder, package = qwen_vl.export(model, tmp_path / "exported"), tmp_path / "package"
    request = Request(split_mode=f"decoder_model_merged={mode}")
    compile_pipeline(plan_pipeline(folder, ["2xcpu"], request), package)
    ids = torch.tensor([qwen_vl.PROMPT])
    with Pipeline(package) as pipeline:
        wiring = find_vision_wiring({name: pipeline[name].manifest for name in pipeline})
        assert wiring is not None
        generated = partial(generate_about_images, pipeline, wiring, max_new_tokens=MOST, stop_tokens=[qwen_vl.END])
        read = partial(read_positions, package, wiring.decoder)
        for images in ({"pixel_values": pixels, "image_grid_thw": grid}, {}):
            prompt = ids if images else ids[:, -3:]
            made = model.generate(prompt, **images, max_new_tokens=MOST, do_sample=False)[0, prompt.shape[1] :].tolist()
            arrays = {name: array.numpy() for name, array in images.items()}
            asked = ImagePrompt(prompt[0].tolist(), qwen_vl.IMAGE, arrays)
            tokens = list(generated(lambda: asked, read))  # noqa: B023  # it is called at once
            assert tokens == [token for token in made if token != qwen_vl.END]
        for file in package.rglob("config.json"):
            file.unlink()
        with pytest.raises(MisuseError, match=r"has no config\.json, by which transformers computes them"):
            list(generated(lambda: ImagePrompt(qwen_vl.PROMPT, qwen_vl.IMAGE, {"pixel_values": pixels.numpy()}), read))
