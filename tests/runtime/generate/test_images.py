"""A vision-language model by the loop of docs/guide/genai.md: the tokens of its unsplit models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, compile_pipeline, plan_pipeline
from splitc.runtime import EncoderDecoder, MisuseError, Pipeline
from tests.conftest import Array, whole_session
from tests.helpers.blocks import FLOAT, INT, Block

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "genai.md"
SIZE = Size(layers=3, hidden=64, heads=4, kv_heads=2, feed_forward=96, vocabulary=50)
IMAGE, PATCHES = 49, 4


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
    """An unsplit model with the face of a session and of its sequence."""

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

    @contextmanager
    def start(self) -> Iterator[Unsplit]:
        yield self


def tokens(modules: Any, seed: int) -> list[int]:
    """What the guide's loop makes of an image between words."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    ids = np.array([[3, *[IMAGE] * PATCHES, 7, 11]])
    pixels = 3 * np.random.default_rng(seed).standard_normal((1, 3, 8, 8)).astype(np.float32)
    return list(names["describe"](modules, ids, pixels, IMAGE, end=-1, most=12))


@pytest.mark.parametrize(("mode", "devices"), [("layer", "3xcpu"), ("tensor", "2xcpu"), ("row", "2xcpu")])
def test_images_become_the_tokens_of_the_unsplit_models(folder: Path, tmp_path: Path, mode: str, devices: str) -> None:
    options: dict[str, Any] = {"row_min": 16} if mode == "row" else {}
    request = Request(split_mode=f"layer,decoder_model_merged={mode}", **options)
    compile_pipeline(plan_pipeline(folder, [devices], request), tmp_path / "package", verify=False)
    expected = [tokens({path.stem: Unsplit(path) for path in folder.glob("*.onnx")}, seed) for seed in (1, 2)]
    assert expected[0] != expected[1], "the image matters"
    with Pipeline(tmp_path / "package", threads=1) as pipeline:
        assert [tokens(pipeline, seed) for seed in (1, 2)] == expected
        with pytest.raises(MisuseError, match=r"can't generate with the modules .*vision_encoder"):
            EncoderDecoder(pipeline)
