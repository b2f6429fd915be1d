"""optimum's models of transformers, run on a package: with `generate`, pipelines and everything that uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from splitc.runtime.errors import MisuseError, needed
from splitc.runtime.generate.wiring import find_wiring
from splitc.runtime.integrations.inference_session import InferenceSession
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.pipeline_file import read_pipeline
from splitc.runtime.session.pipeline import Pipeline

NEEDS = "transformers' models need transformers, torch and optimum: pip install splitc[transformers]"
# transformers' names of model heads, with optimum's classes.
HEADS = {"LMHeadModel": "CausalLM", "Model": "FeatureExtraction"}
# optimum's classes of an encoder and a decoder.
PAIRS = ("Seq2SeqLM", "SpeechSeq2Seq", "Vision2Seq")


def load(package: str | Path, *, config: str | Path | None = None, **options: Any) -> Any:
    """optimum's model, such as ORTModelForCausalLM, running on a package. `generate` is transformers' own.

        model = load("package")
        tokens = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), num_beams=4)

    A package of several models must be an encoder and its decoder, such as T5 or Whisper. `config` is a folder with the
    model's config.json, which determines the class, and generation_config.json if there is one. Default: the package,
    which has them if the model's folder was compiled. `options` are arguments of Session. The session
    (`model.session.session`, or that of each of `model.parts`) is closed with the model.

    Caches are copied to and from the ranks for every token, as beam search needs them. `Session.generate` leaves them
    on the ranks.

    Raises as Session does, and MisuseError if optimum is not installed, if there is no config, and for a model that
    optimum has no class for.
    """
    with needed(NEEDS):
        import optimum.onnxruntime as ort_models
        from transformers import AutoConfig, GenerationConfig
    package = Path(package)
    if (pipeline := read_pipeline(package)) is None:
        read_manifest(package)  # raises the error if there is no package
    folder = package if config is None else Path(config)
    if not (folder / "config.json").is_file():
        raise MisuseError(
            f"{folder} has no config.json: compile the model's folder instead of the file, or name the folder by config"
        )
    known = AutoConfig.from_pretrained(str(folder))
    generates = (folder / "generation_config.json").is_file()
    extra = {"generation_config": GenerationConfig.from_pretrained(str(folder))} if generates else {}
    if pipeline is not None and len(pipeline.modules) > 1:
        extra.setdefault("generation_config", GenerationConfig.from_model_config(known))
        return _load_pair(_find_pair(ort_models, known), known, package, options, extra)
    kind = _find_class(ort_models, getattr(known, "architectures", None) or [])
    session = InferenceSession(package, **options)
    try:
        return kind(config=known, session=session, use_io_binding=False, **extra)
    except BaseException:
        session.session.close()
        raise


def _load_pair(kind: Any, config: Any, package: Path, options: dict[str, Any], extra: dict[str, Any]) -> Any:
    """The model of an encoder and its decoder, with one use or two. It sets in the configs what optimum sets."""
    pipeline = Pipeline(package, **options)
    try:
        wiring = find_wiring({name: session.manifest for name, session in pipeline.items()})
        if wiring.encoder is None or wiring.first is None:
            lacking = "an encoder" if wiring.encoder is None else "the decoder's use without caches"
            raise MisuseError(f"{package} has not {lacking}: compile the model's folder without --module")
        config.use_cache = extra["generation_config"].use_cache = wiring.step is not None
        config.is_decoder, config.is_encoder_decoder = False, True
        return kind(
            config=config,
            encoder_session=InferenceSession(pipeline[wiring.encoder]),
            decoder_session=InferenceSession(pipeline[wiring.first]),
            decoder_with_past_session=None if wiring.step is None else InferenceSession(pipeline[wiring.step]),
            use_io_binding=False,
            model_save_dir=package,
            **extra,
        )
    except BaseException:
        pipeline.close()
        raise


def _find_class(ort_models: Any, architectures: list[str]) -> Any:
    """optimum's class for the first architecture that it has a class for."""
    for name in architectures:
        head = name.rpartition("For")[2] if "For" in name else next((key for key in HEADS if name.endswith(key)), "")
        kind = getattr(ort_models, f"ORTModelFor{HEADS.get(head, head)}", None)
        if kind is not None:
            return kind
    raise MisuseError(
        f"optimum has no model of one part for {', '.join(architectures) or 'a config without architectures'}: open "
        "the package as a Session or an InferenceSession. An encoder and its decoder are compiled as a folder"
    )


def _find_pair(ort_models: Any, config: Any) -> Any:
    """optimum's class for an encoder and a decoder: for this architecture, or else for its kind."""
    architectures = getattr(config, "architectures", None) or []
    kinds = [getattr(ort_models, f"ORTModelFor{name}") for name in PAIRS]
    for kind in kinds:
        for own in kind.__subclasses__():
            if own.auto_model_class.__name__ in architectures:
                return own
    for kind in kinds:
        if type(config) in kind.auto_model_class._model_mapping:
            return kind
    named = ", ".join(architectures) or type(config).__name__
    raise MisuseError(f"optimum has no model of an encoder and a decoder for {named}: open the package as a Pipeline")
