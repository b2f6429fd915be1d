"""optimum's models of transformers, run on a package: `generate`, pipelines and all that stands on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from splitc.runtime.errors import MisuseError
from splitc.runtime.integrations.inference_session import InferenceSession

NEEDS = "transformers' models need transformers, torch and optimum: pip install splitc[transformers]"
# What transformers calls the head of a model, and optimum the class.
HEADS = {"LMHeadModel": "CausalLM", "Model": "FeatureExtraction"}


def load(package: str | Path, *, config: str | Path | None = None, **options: Any) -> Any:
    """optimum's model of a package: of the class for what config.json names, with transformers' own `generate`.

        model = load("package")
        tokens = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), num_beams=4)

    `config` is a folder with the model's config.json, and generation_config.json if it has one; by default the package,
    where they are if the folder of a model was compiled. `options` are Session's. The session ends with the model; it
    is `model.session.session`.

    Caches go to the ranks and come back with every token, as beams need it: `Session.generate` leaves them there.

    Raises as Session does, and MisuseError where optimum is not installed, where there is no config, and for a model of
    several parts.
    """
    try:
        import optimum.onnxruntime as ort_models
        from transformers import AutoConfig, GenerationConfig
    except ImportError as error:
        raise MisuseError(f"{NEEDS} ({error})") from error
    folder = Path(package if config is None else config)
    if not (folder / "config.json").is_file():
        raise MisuseError(
            f"{folder} has no config.json: compile the model's folder instead of the file, or name the folder by config"
        )
    known = AutoConfig.from_pretrained(str(folder))
    kind = _find_class(ort_models, getattr(known, "architectures", None) or [])
    session = InferenceSession(package, **options)
    try:
        generates = (folder / "generation_config.json").is_file()
        extra = {"generation_config": GenerationConfig.from_pretrained(str(folder))} if generates else {}
        return kind(config=known, session=session, **extra)
    except BaseException:
        session.session.close()
        raise


def _find_class(ort_models: Any, architectures: list[str]) -> Any:
    """optimum's class for the first architecture that it has one for."""
    for name in architectures:
        head = name.rpartition("For")[2] if "For" in name else next((key for key in HEADS if name.endswith(key)), "")
        kind = getattr(ort_models, f"ORTModelFor{HEADS.get(head, head)}", None)
        if kind is not None:
            return kind
    raise MisuseError(
        f"optimum has no model of one part for {', '.join(architectures) or 'a config without architectures'}: open "
        "the package as a Session or an InferenceSession. An encoder with its decoder is EncoderDecoder's"
    )
