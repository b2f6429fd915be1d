"""transformers' generate on packages: the tokens of optimum's model of the unsplit file. `make test-diffusers`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from splitc.compiler import Request, compile_pipeline, plan_pipeline
from splitc.runtime import MisuseError, PackageError
from splitc.runtime.integrations.transformers import load
from tests.helpers.folders import write_json

ROWS = [[0, 0, 5, 7, 9], [3, 8, 11, 12, 50], [0, 9, 9, 8, 4], [33, 44, 55, 66, 77]]  # padded in front
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "penalized": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder as optimum writes it, of a small model of transformers with random weights."""
    pytest.importorskip("optimum.onnxruntime")
    import torch
    import transformers
    from optimum import onnxruntime

    sizes = {"vocab_size": 200, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1, "initializer_range": 0.2}
    llama = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    configs: dict[str, tuple[str, str, dict[str, Any]]] = {
        "Llama": ("CausalLM", "LlamaForCausalLM", {**sizes, **llama, "intermediate_size": 128}),
        "GPT2": ("CausalLM", "GPT2LMHeadModel", {**sizes, "n_embd": 64, "n_layer": 4, "n_head": 4}),
        "T5": (
            "Seq2SeqLM",
            "T5ForConditionalGeneration",
            {**sizes, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4}
            | {"decoder_start_token_id": 0, "initializer_factor": 4.0},
        ),
        "Whisper": (
            "SpeechSeq2Seq",
            "WhisperForConditionalGeneration",
            {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "init_std": 0.2}
            | {"decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_mel_bins": 16}
            | {"max_source_positions": 1500, "max_target_positions": 40, "vocab_size": 200, "pad_token_id": 0}
            | {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3, "suppress_tokens": []}
            | {"begin_suppress_tokens": []},
        ),
        "Bert": ("FeatureExtraction", "BertModel", {**llama, "vocab_size": 200, "intermediate_size": 128}),
    }
    folders: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in folders:
            head, kind, values = configs[name]
            torch.manual_seed(0)
            model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**values))
            source, folders[name] = (tmp_path_factory.mktemp(name) for _ in range(2))
            model.save_pretrained(source)
            getattr(onnxruntime, f"ORTModelFor{head}").from_pretrained(source, export=True).save_pretrained(
                folders[name]
            )
        return folders[name]

    return make


@pytest.mark.parametrize(
    ("name", "mode", "count"), [("Llama", "tensor", 2), ("Llama", "layer", 3), ("GPT2", "tensor", 3)]
)
def test_tokens_are_those_of_the_unsplit_model(
    exported: Callable[[str], Path], tmp_path: Path, name: str, mode: str, count: int
) -> None:
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM

    folder = exported(name)
    compile_pipeline(plan_pipeline(folder, f"{count}xcpu", Request(split_mode=mode)), tmp_path / "package")
    own, whole = load(tmp_path / "package"), ORTModelForCausalLM.from_pretrained(folder)
    assert len(own.session.session.devices) == count
    ids = torch.tensor(ROWS)
    for way, options in WAYS.items():
        tokens = []
        for model in (own, whole):
            torch.manual_seed(5)
            tokens.append(model.generate(input_ids=ids, attention_mask=(ids != 0).long(), max_new_tokens=20, **options))
        assert torch.equal(*tokens), way
        assert len(set(tokens[0][:, 5:].flatten().tolist())) > 3
    own.session.session.close()


PAIR_WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "beams": {"num_beams": 3}, "sampled": {"do_sample": True}}


@pytest.mark.parametrize(("name", "mode", "count"), [("T5", "tensor", 2), ("T5", "layer", 3), ("Whisper", "tensor", 2)])
def test_tokens_of_an_encoder_and_its_decoder(
    exported: Callable[[str], Path], tmp_path: Path, name: str, mode: str, count: int
) -> None:
    import torch
    from optimum import onnxruntime

    folder = exported(name)
    parts = ("encoder_model", "decoder_model", "decoder_with_past_model")
    devices = ",".join(f"{part}={'&'.join(f'cpu{number}' for number in range(count))}" for part in parts)
    compile_pipeline(plan_pipeline(folder, devices, Request(split_mode=mode)), tmp_path / "package")
    kind = onnxruntime.ORTModelForSeq2SeqLM if name == "T5" else onnxruntime.ORTModelForSpeechSeq2Seq
    own, whole = load(tmp_path / "package"), kind.from_pretrained(folder)
    assert type(own) is type(whole) and own.use_cache
    assert [len(part.session.session.devices) for part in own.parts] == [count] * 3
    if name == "T5":
        ids = torch.tensor([row[::-1] for row in ROWS])  # padded behind
        feeds = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    else:
        feeds = {"input_features": torch.randn(2, 16, 3000, generator=torch.Generator().manual_seed(1))}
    for way, options in PAIR_WAYS.items():
        tokens = []
        for model in (own, whole):
            torch.manual_seed(5)
            tokens.append(model.generate(**feeds, max_new_tokens=20, **options))
        assert torch.equal(*tokens), way
        assert len(set(tokens[0].flatten().tolist())) > 3
    for part in own.parts:
        part.session.session.close()


def test_pair_that_lacks_a_part_says_so(exported: Callable[[str], Path], tmp_path: Path) -> None:
    wanted = ["encoder_model", "decoder_with_past_model"]
    plan = plan_pipeline(exported("T5"), "2xcpu", Request(split_mode="layer"), wanted)
    compile_pipeline(plan, tmp_path / "package")
    with pytest.raises(MisuseError, match=r"has not the decoder's use without caches|none computes"):
        load(tmp_path / "package")


def test_other_heads_and_where_configs_are(exported: Callable[[str], Path], tmp_path: Path) -> None:
    import torch
    from optimum.onnxruntime import ORTModelForFeatureExtraction

    from splitc.compiler import compile_model, plan_model

    folder = exported("Bert")
    compile_model(plan_model(folder / "model.onnx", "2xcpu", Request(split_mode="tensor")), tmp_path / "package")
    with pytest.raises(MisuseError, match="has no config"):
        load(tmp_path / "package")
    with pytest.raises(PackageError, match="none does not exist"):
        load(tmp_path / "none")
    own, whole = load(tmp_path / "package", config=folder), ORTModelForFeatureExtraction.from_pretrained(folder)
    feeds = {"input_ids": torch.tensor(ROWS), "attention_mask": torch.ones(4, 5, dtype=torch.long)}
    feeds["token_type_ids"] = torch.zeros_like(feeds["input_ids"])
    torch.testing.assert_close(own(**feeds).last_hidden_state, whole(**feeds).last_hidden_state, rtol=1e-3, atol=1e-4)
    own.session.session.close()
    write_json(
        tmp_path / "package" / "config.json", {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    )
    with pytest.raises(MisuseError, match=r"no model of one part for T5ForConditionalGeneration.* as a folder"):
        load(tmp_path / "package")


def test_optimum_is_asked_for(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optimum.onnxruntime", None)
    with pytest.raises(MisuseError, match=r"pip install splitc\[transformers\]"):
        load(package)
