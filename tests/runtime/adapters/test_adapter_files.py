"""Adapter files: each program's names, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from safetensors.numpy import save_file

from splitc.runtime.adapters.adapter_files import adapter_of, read_adapter
from splitc.runtime.adapters.asked import open_adapter, parse_adapters, read_names
from splitc.runtime.arrays.ort_values import host_value
from splitc.runtime.errors import MisuseError
from tests.helpers.adapters import Pairs, random_pairs, write_kohya, write_peft

SIZES = {"blocks.0.attn.to_q": (6, 8), "blocks.1.attn.to_out.0": (8, 6)}
PAIRS = random_pairs(SIZES, rank=4)
A = np.ones((4, 6), np.float32)
B = np.ones((8, 4), np.float32)


def written(path: Path, tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> Path:
    save_file(tensors, path, metadata)
    return path


def named(pairs: Pairs) -> dict[str, Any]:
    return {f"{module}.lora_{'AB'[n]}.weight": array for module, pair in pairs.items() for n, array in enumerate(pair)}


def of_names(path: Path, a: str, b: str) -> Path:
    return written(
        path, {f"{m}{end}": array for m, pair in PAIRS.items() for end, array in zip((a, b), pair, strict=True)}
    )


def of_onnx_runtime(path: Path) -> Path:
    file = onnxruntime.AdapterFormat()
    arrays = {
        f"{m}.lora_{'AB'[n]}.weight": np.ascontiguousarray(x.T) for m, p in PAIRS.items() for n, x in enumerate(p)
    }
    file.set_parameters({name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()})
    file.export_adapter(str(path))
    return path


FORMS = {
    "peft": lambda folder: write_peft(folder, PAIRS, lora_alpha=4),
    "its file": lambda folder: write_peft(folder, PAIRS, lora_alpha=4) / "adapter_model.safetensors",
    "named": lambda folder: of_names(folder / "x.safetensors", ".lora_A.default.weight", ".lora_B.default.weight"),
    "diffusers": lambda folder: (
        of_names(folder / "pytorch_lora_weights.safetensors", ".lora.down.weight", ".lora.up.weight").parent
    ),
    "linear": lambda folder: of_names(
        folder / "x.safetensors", ".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"
    ),
    "processor": lambda folder: of_names(folder / "x.safetensors", "_lora.down.weight", "_lora.up.weight"),
    "kohya": lambda folder: write_kohya(folder / "x.safetensors", PAIRS, 4),
    "onnx": lambda folder: of_onnx_runtime(folder / "x.onnx_adapter"),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_file_format_is_read(form: str, tmp_path: Path) -> None:
    adapter = read_adapter(FORMS[form](tmp_path))
    assert len(adapter.updates) == len(PAIRS)
    for (module, (a, b)), (name, update) in zip(sorted(PAIRS.items()), sorted(adapter.updates.items()), strict=True):
        assert name.replace("_", ".").endswith(module.replace("_", "."))
        assert (update.inputs, update.outputs, update.rank, update.kernel, update.scale) == (*SIZES[module], 4, (), 1.0)
        np.testing.assert_array_equal(update.read_a(), a)
        np.testing.assert_array_equal(update.read_b(), b)


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"lora_alpha": 16}, (4, 4)),
        ({"lora_alpha": 16, "use_rslora": True}, (8, 8)),
        ({"lora_alpha": 16, "init_lora_weights": "gaussian", "use_bdlora": None, "target_parameters": []}, (4, 4)),
        ({"lora_alpha": 16, "init_lora_weights": True, "layer_replication": None}, (4, 4)),
        ({"lora_alpha": 8, "alpha_pattern": {"1.attn.to_out.0": 1, "nothing": 3}}, (2, 0.25)),
        # As PEFT matches them: names without its prefix, whole or from a dot on, and each alternative as the others.
        ({"lora_alpha": 8, "alpha_pattern": {"to_q|to_out": 1, r"to_out\.0|x": 4}}, (0.25, 1)),
        ({"lora_alpha": 8, "alpha_pattern": {r"^blocks\.0\..*": 1, "^to_out.0": 4}}, (0.25, 2)),
        ({"lora_alpha": 8, "alpha_pattern": {"base_model.model.blocks.0.attn.to_q": 1, "o_q": 1}}, (2, 2)),
    ],
)
def test_scales_follow_the_peft_config(config: dict[str, Any], scales: tuple[float, float], tmp_path: Path) -> None:
    updates = read_adapter(write_peft(tmp_path, PAIRS, **config)).updates.values()
    assert [update.scale for update in updates] == pytest.approx(scales)


def test_ranks_and_types_differ_by_module(tmp_path: Path) -> None:
    pairs: Pairs = {**random_pairs({"a.q": (6, 8)}, 2), **random_pairs({"b.q": (6, 8)}, 3)}
    tensors = {
        f"{m}.lora_{'AB'[n]}.weight": x.astype(ml_dtypes.bfloat16) for m, p in pairs.items() for n, x in enumerate(p)
    }
    tensors["a.q.alpha"] = np.array([1], np.float32)
    first, second = read_adapter(written(tmp_path / "x.safetensors", tensors)).updates.values()
    assert (first.rank, first.scale, second.rank, second.scale) == (2, 0.5, 3, 1.0)
    assert first.read_a().dtype == ml_dtypes.bfloat16


def test_metadata_of_diffusers(tmp_path: Path) -> None:
    tensors = {"unet.a.q.lora_A.weight": A, "unet.a.q.lora_B.weight": B, "text_encoder.q.lora_A.weight": A}
    tensors["text_encoder.q.lora_B.weight"] = B
    settings: dict[str, Any] = {
        "unet.r": 4,
        "unet.lora_alpha": 16,
        "unet.use_rslora": True,
        "text_encoder.lora_alpha": 1,
    }
    settings["text_encoder.alpha_pattern"] = {"^q": 2}  # without the model's name
    path = written(tmp_path / "x.safetensors", tensors, {"lora_adapter_metadata": json.dumps(settings)})
    scales = {module: update.scale for module, update in read_adapter(path).updates.items()}
    assert scales == {"unet.a.q": 16 / math.sqrt(4), "text_encoder.q": 0.5}


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"q.lora_A.weight": A}, r"'q' lacks the matrix B \(up\)"),
        ({"q.lora_up.weight": B}, r"'q' lacks the matrix A \(down\)"),
        ({"q.lora_A.weight": A, "q.lora_B.weight": B.T}, r"'q' has the matrices A \[4, 6\] and B \[4, 8\]"),
        ({"q.lora_A.weight": A[None], "q.lora_B.weight": B}, "and they are"),
        ({"q.lora_A.weight": A[:0], "q.lora_B.weight": B[:, :0]}, "and they are"),
        ({"q.lora_A.weight": A, "q.lora_B.weight": B, "q.lora_magnitude_vector": B}, "of the kind DoRA"),
        ({"q.hada_w1_a": A}, "of the kind LoHa"),
        ({"q.lokr_w1": A}, "of the kind LoKr"),
        ({"embed.lora_embedding_A": A}, "LoRA of an embedding"),
        ({"q.weight": A}, "no part of a LoRA: q.weight"),
        ({"q.lora_A.weight": A, "q.lora_B.weight": B, "q.alpha": A}, "alpha of 'q' has the shape"),
        ({"q.lora_A.weight": A, "q.lora_B.weight": B, "q.alpha": A[:1, 0] * np.nan}, "'q' is scaled by nan, as its"),
        ({"q.lora_A.weight": A, "q.lora_B.weight": B.astype(np.int8)}, "'q' is of type (int8|I8), and matrices are"),
        ({}, "no matrices"),
    ],
)
def test_tensors_that_are_no_adapter(tensors: dict[str, Any], why: str, tmp_path: Path) -> None:
    """In a file, or given as tensors."""
    path = written(tmp_path / "x.safetensors", {name: np.ascontiguousarray(array) for name, array in tensors.items()})
    with pytest.raises(MisuseError, match=why):
        read_adapter(path)
    with pytest.raises(MisuseError, match=why):
        adapter_of(tensors)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_types_of_onnx_runtimes_files(dtype: str, tmp_path: Path) -> None:
    file = onnxruntime.AdapterFormat()
    arrays = {f"q.lora_{'AB'[n]}.weight": np.ascontiguousarray(x.T.astype(dtype)) for n, x in enumerate((A, B))}
    file.set_parameters({name: host_value(array) for name, array in arrays.items()})
    file.export_adapter(str(tmp_path / "x.onnx_adapter"))
    (update,) = read_adapter(tmp_path / "x.onnx_adapter").updates.values()
    for read, array in ((update.read_a, A), (update.read_b, B)):
        assert read().dtype == dtype
        np.testing.assert_array_equal(read().astype(np.float32), array)


def test_damaged_metadata_is_refused(tmp_path: Path) -> None:
    pairs = named(random_pairs({"unet.q": (4, 4)}))
    for text, why in (("{", "can't read the metadata of"), ('{"unet.lora_alpha": 1e40}', r"is scaled by 2\.5e\+39")):
        path = written(tmp_path / "x.safetensors", pairs, {"lora_adapter_metadata": text})
        with pytest.raises(MisuseError, match=why):
            read_adapter(path)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"peft_type": "IA3"}, "of the kind IA3"),
        ({"use_dora": True}, "of the kind DoRA"),
        ({"use_bdlora": {"nblocks": 2}}, r"of the kind BD-LoRA, .* \(use_bdlora\)"),
        ({"layer_replication": [[0, 2], [1, 3]]}, r"repeated layers \(layer_replication\)"),
        ({"target_parameters": ["experts.up"]}, r"single parameters \(target_parameters\)"),
        *(
            ({"init_lora_weights": begin}, f"changed base weights .init_lora_weights={begin}.*save_pretrained")
            for begin in ("pissa", "pissa_niter_16", "corda", "OLoRA", "lora_ga", "loftq")
        ),
        ({"bias": "all"}, "trains biases"),
        ({"modules_to_save": ["head"]}, "whole modules beside its matrices ..'head'"),
        ({"modules_to_save": 5}, "whole modules beside its matrices .5"),
        ({"alpha_pattern": [1]}, "an alpha_pattern that is not an object"),
        ({"lora_alpha": "much"}, "an alpha that is not a number"),
        ({"alpha_pattern": {"(": 1}}, "which is not a regular expression"),
    ],
)
def test_configs_of_other_kinds(config: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=why):
        read_adapter(write_peft(tmp_path, PAIRS, **config))


HUGE = json.dumps(
    {"q.lora_A.weight": {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 62]}}
).encode()
DAMAGED = {
    "empty": b"",
    "noise": b"\x07" * 100,
    "a header of 2^60 bytes": (1 << 60).to_bytes(8, "little") + b"{}",
    "tensors of 2^62 bytes": len(HUGE).to_bytes(8, "little") + HUGE,
}


@pytest.mark.parametrize("kind", [".safetensors", ".onnx_adapter"])
@pytest.mark.parametrize("damage", [*DAMAGED, "truncated"])
def test_damaged_files(damage: str, kind: str, tmp_path: Path) -> None:
    whole = of_onnx_runtime(tmp_path / "whole.onnx_adapter") if kind == ".onnx_adapter" else FORMS["kohya"](tmp_path)
    content = whole.read_bytes()
    path = tmp_path / f"bad{kind}"
    path.write_bytes(DAMAGED.get(damage, content[: len(content) // 2]))
    with pytest.raises(MisuseError, match=f"can't read the adapter .*bad{kind}: "):
        read_adapter(path)


def test_what_is_no_file_of_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    for path, why in (
        ("none", "does not exist"),
        ("weights.bin", "is no adapter: there are"),
        (".", "no adapter in it"),
    ):
        with pytest.raises(MisuseError, match=why):
            read_adapter(tmp_path / path)


def test_adapter_options_are_parsed() -> None:
    texts = ["a.safetensors", "b:0.5", "c:-2", "d:.25", "C:\\x.safetensors", "e:1e-1", "f:x"]
    assert parse_adapters(texts) == (
        *(("a.safetensors", 1.0), ("b", 0.5), ("c", -2.0), ("d", 0.25)),
        *(("C:\\x.safetensors", 1.0), ("e", 0.1), ("f:x", 1.0)),
    )


def test_names_of_files_may_look_like_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning names folders so. Requests to servers name adapters and not files."""
    monkeypatch.chdir(tmp_path)
    for name in ("epoch=3-step=100", "r8:0.5"):
        write_peft(Path(name), PAIRS)
    asked = parse_adapters(["epoch=3-step=100", "epoch=3-step=100:0.5", "unet=r8:0.5", "r8:0.5", "r8:0.5:2", "r8:0.25"])
    assert asked == (
        *(("epoch=3-step=100", 1.0), ("epoch=3-step=100", 0.5), ("unet=r8:0.5", 1.0)),
        *(("r8:0.5", 1.0), ("r8:0.5", 2.0), ("r8", 0.25)),
    )
    for text, _ in asked[:-1]:
        assert open_adapter(text).updates.keys() == read_adapter("r8:0.5").updates.keys()
    assert read_names("r8:0.5") == {"r8": 0.5}
    with pytest.raises(MisuseError, match=r"^4 does not exist"):
        open_adapter("epoch=4")


def test_parts_of_a_file_for_several_models(tmp_path: Path) -> None:
    pairs = random_pairs({"layers.0.q": (4, 4)})
    tensors = named({f"{part}.layers.0.q": pairs["layers.0.q"] for part in ("unet", "text_encoder", "text_encoder_2")})
    path = written(tmp_path / "x.safetensors", tensors)
    assert list(open_adapter(f"text_encoder_2={path}").updates) == ["text_encoder_2.layers.0.q"]
    assert len(open_adapter(str(path)).updates) == 3
    with pytest.raises(MisuseError, match="has nothing for vae: it is for text_encoder, text_encoder_2, unet"):
        open_adapter(f"vae={path}")
    kohya = write_kohya(tmp_path / "k.safetensors", pairs, 1, "lora_te2")
    assert list(open_adapter(f"text_encoder_2={kohya}").updates) == ["lora_te2_layers_0_q"]
    plain = write_peft(tmp_path / "plain", pairs)
    assert len(open_adapter(f"decoder={plain}").updates) == 1
