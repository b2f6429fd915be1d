"""Encoders and decoders in one package: the tokens of the unsplit models, from texts and sounds."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from msgspec.structs import replace

from splitc.compiler import Request, compile_pipeline, plan_pipeline
from splitc.runtime import MisuseError, Pipeline
from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeBackend
from splitc.runtime.errors import FeedError, SplitcError
from splitc.runtime.generate.encoder_decoder import EncoderDecoder, _cross_mask, describe_encoder
from splitc.runtime.generate.sound import LogMel, read_sound
from splitc.runtime.generate.wiring import find_links, find_wiring
from splitc.runtime.package.manifest import Tensor
from splitc.runtime.package.manifest_file import read_manifest
from tests.conftest import DECODER, KEPT, assert_close
from tests.helpers import encoder_decoders as made
from tests.helpers.command import splitc
from tests.helpers.greedy import plain_loop
from tests.helpers.needs import needs_caches, needs_empty_weights

MODES = {"tensor": ("3xcpu", {}), "row": ("2xcpu", {"row_min": 16}), "auto": ("3xcpu", {}), "layer": ("2xcpu", {})}
TEXT = [7, 21, 5, 33, 40, 2]
WORDS = " ".join(f"w{token}" for token in TEXT)


def kept(folder: Path) -> Path:
    """The folder. Tests may not change its models, whose analyses are cached for all of them."""
    KEPT.models.update(folder.glob("*.onnx"))
    return folder


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of a speech folder."""
    return kept(made.speech_folder(tmp_path_factory.mktemp("speech")))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of a text folder."""
    return kept(made.text_folder(tmp_path_factory.mktemp("text")))


def compiled(folder: Path, package: Path, mode: str, names: tuple[str, ...] = ()) -> Path:
    """A package of the folder, each module split in this mode."""
    devices, options = MODES[mode]
    modules = names or tuple(each.stem for each in folder.glob("*.onnx"))
    modes = mode if mode == "auto" else ",".join(f"{name}={mode}" for name in modules)
    request = Request(split_mode=modes, **options)  # type: ignore[arg-type]
    compile_pipeline(plan_pipeline(folder, [devices], request, names), package, verify=False)
    return package


@pytest.fixture(scope="module")
def text_package(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The text folder in each mode, compiled once."""
    folder = tmp_path_factory.mktemp("package")
    return cache(lambda mode: compiled(text, folder / mode, mode))


@pytest.fixture(scope="module")
def tensor_text(text_package: Callable[[str], Path]) -> Path:
    """The text folder in tensor mode."""
    return text_package("tensor")


@pytest.fixture(scope="module")
def speech_package(speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The speech folder, split."""
    return compiled(speech, tmp_path_factory.mktemp("package") / "speech", "tensor")


def text_feeds(tokens: list[int]) -> dict[str, Any]:
    ids = np.array([tokens])
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def expected_text(folder: Path, most: int) -> list[int]:
    return made.plain_tokens(folder, text_feeds(TEXT), [0], most)


def expected_speech(folder: Path, sound: Path, language: int, task: int) -> list[int]:
    maker = LogMel(made.BINS, made.RATE, made.HOP, 400, made.SAMPLES)
    feeds = {"input_features": maker.features(read_sound(sound, made.RATE))}
    prompt = [made.START, language, task, made.PLAIN]
    return made.plain_tokens(folder, feeds, prompt, 24 - len(prompt), rules=True)


def run(package: Path, *options: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(splitc("generate", package, "--threads", 1, "--json", *options).stdout)
    return found


@pytest.mark.parametrize("mode", ["tensor", "row", "auto"])
def test_texts_become_the_tokens_of_the_unsplit_models(
    text: Path, text_package: Callable[[str], Path], mode: str
) -> None:
    expected = expected_text(text, 20)
    assert len(set(expected)) > 3
    found = run(text_package(mode), "--prompt", WORDS, "-n", 20)
    assert found["tokens"] == expected
    assert found["text"] == " ".join(f"w{token}" for token in expected)
    assert found["timings"]["encoder_seconds"] > 0


def test_sounds_become_the_tokens_of_the_unsplit_models(speech: Path, speech_package: Path, tmp_path: Path) -> None:
    answers = set()
    for seed, (language, task) in ((1, ("en", "transcribe")), (2, ("de", "translate"))):
        sound = made.write_sound(tmp_path / f"{seed}.wav", seed)
        tokens = (made.ENGLISH, made.TRANSCRIBE) if seed == 1 else (made.GERMAN, made.TRANSLATE)
        expected = expected_speech(speech, sound, *tokens)
        found = run(speech_package, "--audio", sound, "--language", language, "--task", task)
        assert found["tokens"] == expected
        answers.add(tuple(expected))
    assert len(answers) == 2, "the sound matters"


def test_language_is_heard(speech: Path, whole_speech: Path, tmp_path: Path) -> None:
    sound = made.write_sound(tmp_path / "sound.wav", 3)
    answers = [expected_speech(speech, sound, each, made.TRANSCRIBE) for each in (made.ENGLISH, made.GERMAN)]
    assert run(whole_speech, "--audio", sound)["tokens"] in answers


def test_long_sounds_are_written_down_in_windows(speech: Path, whole_speech: Path, tmp_path: Path) -> None:
    sound = made.write_sound(tmp_path / "sound.wav", 1, seconds=0.3)
    result = splitc("generate", whole_speech, "--audio", sound, "--language", "en", "--json")
    assert "at a time" in result.stderr
    maker = LogMel(made.BINS, made.RATE, made.HOP, 400, made.SAMPLES)
    prompt = [made.START, made.ENGLISH, made.TRANSCRIBE, made.PLAIN]
    expected = [
        token
        for features in maker.windows(read_sound(sound, made.RATE))
        for token in made.plain_tokens(speech, {"input_features": features}, prompt, 20, rules=True)
    ]
    assert json.loads(result.stdout)["tokens"] == expected


def test_cross_caches_go_to_the_ranks_once(tensor_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pipeline(tensor_text, threads=1) as pipeline:
        model = EncoderDecoder(pipeline)
        stream = model.generate(model.encode_tokens(TEXT), [0], max_new_tokens=8)
        next(stream), next(stream)
        moved: list[int] = []
        known = OnnxRuntimeBackend.upload

        def count(self: Any, array: Any) -> Any:
            moved.append(array.nbytes)
            return known(self, array)

        monkeypatch.setattr(OnnxRuntimeBackend, "upload", count)
        rest = list(stream)
    # To each of three ranks, and to those that compute its logits.
    assert moved and sum(moved) <= len(rest) * (3 + 3) * 8, (
        "only the newest token moves, and its index among the new ones"
    )


def test_encoders_take_tokens_that_they_know(tensor_text: Path) -> None:
    with Pipeline(tensor_text, threads=1) as pipeline:
        model = EncoderDecoder(pipeline)
        whole = model.encode_tokens(TEXT)
        assert_close(model.encode_tokens(np.array(TEXT)), whole, 0)  # type: ignore[arg-type]
        with pytest.raises(MisuseError, match="has the token 70000, and the model has a vocabulary of"):
            model.encode_tokens([*TEXT, 70_000])
        with pytest.raises(MisuseError, match="the prompt has no tokens"):
            model.encode_tokens([])


def test_texts_at_the_same_time(text: Path, tensor_text: Path) -> None:
    with Pipeline(tensor_text, threads=1) as pipeline:
        model = EncoderDecoder(pipeline)
        prompts = [TEXT, TEXT[::-1], TEXT[:2]]
        streams: list[Iterator[int]] = [
            model.generate(model.encode_tokens(prompt), [0], max_new_tokens=10) for prompt in prompts
        ]
        found = [list(tokens) for tokens in zip(*zip(*streams))]
    assert found == [made.plain_tokens(text, text_feeds(prompt), [0], 10) for prompt in prompts]


def test_what_the_encoder_did_not_return_is_named(tensor_text: Path) -> None:
    with Pipeline(tensor_text, threads=1) as pipeline:
        model = EncoderDecoder(pipeline)
        with pytest.raises(MisuseError, match=r"output 'last_hidden_state' is missing.* what encode\(\) returned"):
            list(model.generate({"hidden": np.zeros((1, 2, 8), np.float32)}, [0], max_new_tokens=2))


def test_padding_is_hidden_from_the_decoder_too(text: Path, tensor_text: Path) -> None:
    feeds = {"input_ids": np.array([[*TEXT, 9, 9]]), "attention_mask": np.array([[1] * len(TEXT) + [0, 0]])}
    with Pipeline(tensor_text, threads=1) as pipeline:
        model = EncoderDecoder(pipeline)
        found = list(model.generate(model.encode(feeds), [0], max_new_tokens=10, stop_tokens=[made.END]))
        assert found == made.plain_tokens(text, feeds, [0], 10) == made.plain_tokens(text, text_feeds(TEXT), [0], 10)


@pytest.mark.parametrize(
    ("named", "masked", "expected"),
    [
        ("heard", [1, 1, 1, 0], [1, 1, 1, 0]),  # of what is heard in both models: the decoder thins it out itself
        ("seen", [1, 1, 1, 1], [1, 1]),
        ("seen", [1, 1, 1, 0], None),
    ],
)
def test_mask_of_more_positions_than_states(named: str, masked: list[int], expected: list[int] | None) -> None:
    mask = Tensor("encoder_mask", "int64", ["batch", named])
    encoded = {"mask": np.array([masked]), "states": np.zeros((1, 2, 8), np.float32)}
    own = [Tensor("mask", "int64", ["batch", "heard"])]
    if expected is None:
        with pytest.raises(MisuseError, match="the encoder's mask hides some positions, and the decoder's mask"):
            _cross_mask(mask, own, encoded)
        return
    assert _cross_mask(mask, own, encoded).tolist() == [expected]


def test_decoder_without_caches_reads_all_again(text: Path, tmp_path: Path) -> None:
    package = compiled(text, tmp_path / "package", "layer", ("encoder_model", "decoder_model"))
    assert run(package, "--prompt", WORDS, "-n", 12)["tokens"] == expected_text(text, 12)


@pytest.mark.usefixtures("gpus")
def test_gpus_hold_caches_too(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake GPUs, whose caches are not in place; a second text has states of the same sizes."""
    monkeypatch.setattr("splitc.compiler.lowering.segments.has_collectives", lambda engine, devices: False)
    names = ("encoder_model", "decoder_model", "decoder_with_past_model")
    modes = Request(split_mode=",".join(f"{name}=tensor" for name in names), no_fuse=True)
    package = tmp_path / "package"
    compile_pipeline(plan_pipeline(text, ["2xcpu"], modes), package, verify=False)
    with Pipeline(package, devices=["2xcuda"]) as pipeline:
        model = EncoderDecoder(pipeline)
        for prompt in (TEXT, TEXT[::-1]):
            found = list(model.generate(model.encode_tokens(prompt), [0], max_new_tokens=10))
            assert found == made.plain_tokens(text, text_feeds(prompt), [0], 10)


def test_encoder_that_makes_the_caches_itself(text: Path, tmp_path: Path) -> None:
    """As in folders of onnxruntime-genai."""
    folder = made.genai_folder(tmp_path / "folder")
    package = compiled(folder, tmp_path / "package", "tensor", ("encoder", "decoder"))
    assert run(package, "--prompt", WORDS, "-n", 12)["tokens"] == expected_text(text, 12)


def test_ranks_that_are_processes_hold_caches_too(text: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    compile_pipeline(plan_pipeline(text, ["cpu0"]), package, verify=False)
    found = run(package, "--prompt-ids", ",".join(map(str, TEXT)), "-n", 12, "--ranks", "processes")
    assert found["tokens"] == expected_text(text, 12)


@pytest.fixture(scope="module")
def whole_speech(speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The speech folder on one device."""
    package = tmp_path_factory.mktemp("package") / "whole"
    compile_pipeline(plan_pipeline(speech, ["cpu0"]), package, verify=False)
    return package


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), r"the features of a sound \(input_features\), as of speech; give it as --audio speech.wav"),
        (
            ("--prompt", "w1"),
            "can't read a text with this package: its encoder takes the features of a sound",
        ),
        (("--audio", "missing.wav"), "no such file: missing.wav"),
        (("--audio", __file__), "is not an integer WAV file .*ffmpeg"),
        (("--audio", "SOUND", "--language", "fr"), "--language fr: .* has de, en"),
        (("--audio", "SOUND", "--task", "sing"), "--task sing: .* has transcribe, translate"),
        (("--audio", "SOUND", "-n", "50"), "has 40 positions, .* ask for 37 at most"),
        (("--audio", "SOUND", "--prompt", "w1"), "an encoder reads a sound or a text"),
        (("--language", "en"), "--language has no effect without --audio"),
    ],
)
def test_what_speech_can_not_be_made_of(
    whole_speech: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    sound = str(made.write_sound(tmp_path / "sound.wav", 1))
    result = splitc("generate", whole_speech, *(sound if each == "SOUND" else each for each in options), code=2)
    assert re.search(message, result.stderr), result.stderr


@needs_empty_weights
def test_decoder_in_two_uses_without_an_encoder(decoder: Path, tmp_path: Path) -> None:
    """As exporters write decoders: one model without caches, and one with them."""
    folder = tmp_path / "folder"
    folder.mkdir()
    whole = ir.load(decoder)
    ir.save(whole, folder / "decoder_with_past_model.onnx", external_data="weights.data")
    states = [value for value in whole.graph.inputs if (value.name or "").startswith("past")]
    for value in states:
        empty = ir.tensor(np.zeros((1, DECODER.kv_heads, 0, DECODER.head), np.float32), name=value.name)
        whole.graph.inputs.remove(value)
        value.const_value, value.shape = empty, ir.Shape(empty.shape.numpy())
        whole.graph.register_initializer(value)
    ir.save(whole, folder / "decoder_model.onnx", external_data="more.data")
    package = compiled(folder, tmp_path / "package", "layer", ("decoder_model", "decoder_with_past_model"))
    found = run(package, "--prompt-ids", "5,17,33", "-n", 10)
    assert found["tokens"] == plain_loop(decoder, [5, 17, 33], 10)
    sound = made.write_sound(tmp_path / "sound.wav", 1)
    assert "it has no encoder" in splitc("generate", package, "--audio", sound, code=2).stderr


def test_modules_that_are_missing_are_said(text: Path, tmp_path: Path) -> None:
    package = compiled(text, tmp_path / "package", "layer", ("encoder_model", "decoder_with_past_model"))
    said = splitc("generate", package, "--prompt", WORDS, code=2).stderr
    assert "none computes 'past_key_values.0.encoder.key', which decoder_with_past_model reads" in said


@pytest.mark.parametrize(
    "wrong",
    [
        {"suppress_tokens": ["one"]},
        {"lang_to_id": [1]},
        {"forced_decoder_ids": [3]},
        {"bad_words_ids": 5},
        {"forced_eos_token_id": {}},
        {"num_beams": "many"},
    ],
)
def test_damaged_configs_are_said(whole_speech: Path, tmp_path: Path, wrong: dict[str, Any]) -> None:
    package = tmp_path / "package"
    shutil.copytree(whole_speech, package)
    file = package / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **wrong}))
    sound = made.write_sound(tmp_path / "sound.wav", 1)
    said = splitc("generate", package, "--audio", sound, code=2).stderr
    assert "can't understand the generation config of decoder_with_past_model" in said


def test_sounds_need_their_preprocessor(whole_speech: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(whole_speech, package)
    (package / "preprocessor_config.json").unlink()
    sound = made.write_sound(tmp_path / "sound.wav", 1)
    assert "no preprocessor_config.json" in splitc("generate", package, "--audio", sound, code=2).stderr


def test_held_feeds_are_given_once(tensor_text: Path) -> None:
    with Pipeline(tensor_text, threads=1) as pipeline, pipeline["decoder_with_past_model"].start() as sequence:
        for name in ("nothing", "input_ids"):
            with pytest.raises(FeedError, match=f"can't hold '{name}': it may hold each of these inputs once: "):
                sequence.hold({name: np.zeros((1, 1), np.int64)})
        mask = {"encoder_attention_mask": np.ones((1, 4), np.int64)}
        sequence.hold(mask)
        caches = {
            tensor.name: np.zeros((1, made.HEADS, 4, made.HEAD), np.float32)
            for tensor in pipeline["decoder_with_past_model"].inputs
            if ".encoder." in tensor.name
        }
        sequence.hold(caches)
        with pytest.raises(FeedError, match="no input encoder_attention_mask"):
            sequence.run({"input_ids": np.array([[1]]), **mask})
        sequence.run({"input_ids": np.array([[1]])})
        with pytest.raises(SplitcError, match="before its first run"):
            sequence.hold(caches)


@needs_caches  # whose number of rows the ranks read off any input
def test_held_feeds_have_the_sizes_of_requests(text_package: Callable[[str], Path]) -> None:
    """A request that does not fit them changes nothing."""
    with Pipeline(text_package("layer"), threads=1) as pipeline:
        session = pipeline["decoder_with_past_model"]
        given = {
            tensor.name: np.zeros((2, made.HEADS, 4, made.HEAD), np.float32)
            for tensor in session.inputs
            if ".encoder." in tensor.name
        }
        with session.start() as sequence:
            sequence.hold({"encoder_attention_mask": np.ones((2, 4), np.int64), **given})
            with pytest.raises(FeedError, match="this package treats them as one size"):
                sequence.run({"input_ids": np.array([[1]])})
            assert sequence.run({"input_ids": np.array([[1], [1]])})["logits"].shape[0] == 2


def test_held_feeds_are_the_sequences_own(tensor_text: Path) -> None:
    with Pipeline(tensor_text, threads=1) as pipeline:
        answers = []
        for changes in (False, True):
            random = np.random.default_rng(0)
            held = {
                tensor.name: random.standard_normal((1, made.HEADS, 4, made.HEAD), np.float32)
                for tensor in pipeline["decoder_with_past_model"].inputs
                if ".encoder." in tensor.name
            }
            with pipeline["decoder_with_past_model"].start() as sequence:
                sequence.hold({"encoder_attention_mask": np.ones((1, 4), np.int64), **held})
                for array in held.values():
                    array *= 1 - changes
                answers.append(sequence.run({"input_ids": np.array([[1]])})["logits"])
        one, other = answers
        np.testing.assert_array_equal(one, other)


def test_encoder_that_does_not_say_its_width_is_one(tensor_text: Path) -> None:
    """Exporters give a width a symbol if their own inference fails."""
    manifests = {name: read_manifest(tensor_text / name) for name in ("encoder_model", "decoder_model")}
    (states,) = manifests["encoder_model"].outputs
    unnamed = replace(states, name="hidden", shape=["batch", "positions", "width"])
    encoder = replace(manifests["encoder_model"], outputs=[unnamed])
    assert find_links(manifests["decoder_model"], encoder) == {"encoder_hidden_states": "hidden"}
    assert find_wiring({**manifests, "encoder_model": encoder}).encoder == "encoder_model"
    other = replace(encoder, outputs=[replace(unnamed, shape=["batch", "positions", made.WIDTH + 1])])
    assert find_links(manifests["decoder_model"], other) == {}


@pytest.mark.parametrize(
    ("shape", "said"),
    [(["b", 3, 8, 8], "takes an image (x), which generate can't read"), (["b", "n"], "the samples of a sound (x)")],
)
def test_what_an_encoder_takes_is_said(tensor_text: Path, shape: list[Any], said: str) -> None:
    manifest = read_manifest(tensor_text / "encoder_model")
    assert said in describe_encoder(replace(manifest, inputs=[Tensor("x", "float32", shape)]))


def test_path_is_no_pipeline() -> None:
    path: Any = "package"
    with pytest.raises(MisuseError, match=r"takes a Pipeline, as in Pipeline\('package'\), not 'package'"):
        EncoderDecoder(path)
