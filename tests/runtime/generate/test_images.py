"""A vision-language model: the unsplit models' tokens. `integrations/test_images.py` tests transformers'."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, compile_pipeline, plan_pipeline
from splitc.runtime import EncoderDecoder, MisuseError, Pipeline
from splitc.runtime.generate.image_prompt import ImagePrompt, Positions
from splitc.runtime.generate.vision_language import find_vision_wiring, generate_about_images
from tests.conftest import Array, whole_session
from tests.helpers.blocks import FLOAT, INT, Block
from tests.helpers.command import splitc
from tests.helpers.encoder_decoders import text_folder

SIZE = Size(layers=3, hidden=64, heads=4, kv_heads=2, feed_forward=96, vocabulary=50)
IMAGE, PATCHES, NAME = 49, 4, "decoder_model_merged"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision encoder, the table of embeddings, and a decoder that reads embeddings."""
    place = tmp_path_factory.mktemp("vision")
    vision = Block()
    pixels = vision.input("pixel_values", FLOAT, ["batch", 3, 8, 8])
    patches = vision.op("Conv", pixels, vision.w("patches", SIZE.hidden, 3, 4, 4), strides=[4, 4])
    flat = vision.op("Reshape", patches, vision.ints(0, SIZE.hidden, -1))
    vision.give(vision.op("Transpose", flat, perm=[0, 2, 1]), "image_features", ["batch", PATCHES, SIZE.hidden])
    save(vision.model(), place / "vision_encoder.onnx")
    embed = Block()
    ids = embed.input("input_ids", INT, ["batch", "sequence"])
    rows = embed.op("Gather", embed.w("table", SIZE.vocabulary, SIZE.hidden), ids)
    embed.give(rows, "inputs_embeds", ["batch", "sequence", SIZE.hidden])
    save(embed.model(), place / "embed_tokens.onnx")
    save(_reads_embeddings(), place / "decoder_model_merged.onnx")
    return place


def _reads_embeddings() -> ir.Model:
    """The decoder of the other tests, without its table of embeddings."""
    model = build(SIZE)
    graph = model.graph
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    lookup = next(use.node for use in ids.uses() if use.node.op_type == "Gather" and use.idx == 1)
    embeds = ir.Value(
        name="inputs_embeds", type=ir.TensorType(FLOAT), shape=ir.Shape(["batch", "sequence", SIZE.hidden])
    )
    for use in list(lookup.outputs[0].uses()):
        use.node.replace_input_with(use.idx, embeds)
    graph.remove(lookup, safe=True)
    for use in list(ids.uses()):
        use.node.replace_input_with(use.idx, embeds)
    graph.inputs[graph.inputs.index(ids)] = embeds
    return model


class Unsplit:
    """An unsplit model, with its caches if it has some."""

    def __init__(self, path: Path) -> None:
        self._session = whole_session(path)
        self._states: dict[str, Array] = {
            each.name: np.zeros((1, SIZE.kv_heads, 0, SIZE.head), np.float32)
            for each in self._session.get_inputs()
            if each.name.startswith("past")
        }

    def run(self, feeds: dict[str, Array]) -> dict[str, Array]:
        made = self._session.run(None, {**feeds, **self._states})
        outputs = dict(zip([each.name for each in self._session.get_outputs()], made))
        self._states = {name: outputs[name.replace("past_key_values", "present")] for name in self._states}
        return {name: each for name, each in outputs.items() if not name.startswith("present")}


def plain_loop(folder: Path, prompt: ImagePrompt, count: int) -> list[int]:
    """Greedy tokens of the unsplit models."""
    vision, embed, decoder = (Unsplit(folder / f"{name}.onnx") for name in ("vision_encoder", "embed_tokens", NAME))
    ids = np.array([prompt.ids])
    embeds = embed.run({"input_ids": ids})["inputs_embeds"].copy()
    if prompt.arrays:
        embeds[ids == IMAGE] = vision.run(dict(prompt.arrays))["image_features"].reshape(-1, SIZE.hidden)
    made: list[int] = []
    for _ in range(count):
        length = len(prompt.ids) + len(made)
        positions = np.arange(length - embeds.shape[1], length)[None]
        mask = np.ones((1, length), np.int64)
        outputs = decoder.run({"inputs_embeds": embeds, "attention_mask": mask, "position_ids": positions})
        made.append(int(outputs["logits"][0, -1].argmax()))
        embeds = embed.run({"input_ids": np.array([made[-1:]])})["inputs_embeds"]
    return made


def asked(*seeds: int) -> ImagePrompt:
    """A question about images of random pixels."""
    pixels = [3 * np.random.default_rng(seed).standard_normal((1, 3, 8, 8)).astype(np.float32) for seed in seeds]
    ids = [3, *(token for _ in seeds for token in (*[IMAGE] * PATCHES, 7)), 11]
    return ImagePrompt(ids, IMAGE, {"pixel_values": np.concatenate(pixels)} if pixels else {})


def no_positions(prompt: ImagePrompt) -> Positions:
    """One number a token."""
    raise AssertionError("the decoder wants no positions in images")


def generate(pipeline: Pipeline, prompt: ImagePrompt, **options: Any) -> list[int]:
    wiring = find_vision_wiring({name: session.manifest for name, session in pipeline.items()})
    assert wiring is not None
    return list(generate_about_images(pipeline, wiring, lambda: prompt, no_positions, max_new_tokens=12, **options))


@pytest.mark.parametrize(("mode", "devices"), [("tensor", "2xcpu"), ("row", "2xcpu")])
def test_images_become_the_tokens_of_the_unsplit_models(folder: Path, tmp_path: Path, mode: str, devices: str) -> None:
    options: dict[str, Any] = {"row_min": 16} if mode == "row" else {}
    request = Request(split_mode=f"layer,{NAME}={mode}", **options)
    compile_pipeline(plan_pipeline(folder, [devices], request), tmp_path / "package", verify=False)
    questions = [asked(1), asked(2), asked(1, 2), asked()]
    expected = [plain_loop(folder, question, 12) for question in questions]
    assert len({tuple(tokens) for tokens in expected}) == 4, "the image matters"
    with Pipeline(tmp_path / "package", threads=1) as pipeline:
        assert [generate(pipeline, question) for question in questions] == expected
        assert generate(pipeline, asked(1, 2), prompt_chunk=3) == expected[2]
        assert list(pipeline.generate(list(asked().ids), max_new_tokens=12)) == expected[3]
        with pytest.raises(MisuseError, match=r"can't generate with the modules .*vision_encoder"):
            EncoderDecoder(pipeline)


def test_embeddings_may_take_the_features_themselves(folder: Path, tmp_path: Path) -> None:
    """As in onnxruntime-genai, which writes them into the rows of the image's tokens."""
    merging = tmp_path / "merging"
    shutil.copytree(folder, merging)
    embed = Block()
    ids = embed.input("input_ids", INT, ["batch", "sequence"])
    features = embed.input("image_features", FLOAT, ["rows", SIZE.hidden])
    rows = embed.op("Gather", embed.w("table", SIZE.vocabulary, SIZE.hidden), ids)
    places = embed.op("NonZero", embed.op("Equal", ids, embed.constant(IMAGE, np.int64)))
    merged = embed.op("ScatterND", rows, embed.op("Transpose", places, perm=[1, 0]), features)
    embed.give(merged, "inputs_embeds", ["batch", "sequence", SIZE.hidden])
    save(embed.model(), merging / "embed_tokens.onnx")
    compile_pipeline(plan_pipeline(merging, ["2xcpu"], Request(split_mode="layer")), tmp_path / "package", verify=False)
    with Pipeline(tmp_path / "package", threads=1) as pipeline:
        for question in (asked(1), asked(1, 2)):
            assert generate(pipeline, question, prompt_chunk=3) == plain_loop(folder, question, 12)


def test_what_does_not_fit_is_named(folder: Path, tmp_path: Path) -> None:
    compile_pipeline(plan_pipeline(folder, ["2xcpu"], Request(split_mode="layer")), tmp_path / "package", verify=False)
    good = asked(1)
    with Pipeline(tmp_path / "package", threads=1) as pipeline:
        with pytest.raises(MisuseError, match="makes 4 rows of features, and the processor's prompt has 5 tokens"):
            generate(pipeline, replace(good, ids=[*good.ids, IMAGE]))
        with pytest.raises(MisuseError, match="takes 'pixel_values', and the processor makes grid"):
            generate(pipeline, replace(good, arrays={"grid": np.ones(3)}))
        with pytest.raises(MisuseError, match="and no sound"):
            list(pipeline.generate([1], sound="speech.wav"))
    refused = splitc("generate", tmp_path / "package", "--image", "cat.png", "--prompt", "w1", code=2)
    assert "no processor_config.json or preprocessor_config.json" in " ".join(refused.stderr.split())
    assert (
        "--image has no effect without --prompt"
        in splitc("generate", tmp_path / "package", "--image", "cat.png", code=2).stderr
    )


def test_other_packages_read_no_images(package: Path, tmp_path: Path) -> None:
    refused = splitc("generate", package, "--image", "cat.png", "--prompt", "w1", code=2)
    assert "--image is for a package with a vision model and a decoder" in refused.stderr
    folder = text_folder(tmp_path / "t5")
    compile_pipeline(plan_pipeline(folder, ["2xcpu"], Request(split_mode="layer")), tmp_path / "package", verify=False)
    refused = splitc("generate", tmp_path / "package", "--image", "cat.png", "--prompt", "w1", code=2)
    assert "can't read images with the modules decoder_model, decoder_with_past_model, encoder_model" in refused.stderr
