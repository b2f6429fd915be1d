"""Tokens per second of a package's stages in onnxruntime-genai, compared with the unsplit model in genai.

    make .venv/serving/done
    .venv/serving/bin/python -m tests.benchmarks.genai --tokens 128

The two take turns in one process, with genai's own threads, and must give the same tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime.files.written import link_file
from splitc.runtime.serving.genai_folder import FILE_NAME, export_genai
from tests.helpers.genai_loop import generate, open_model


def write_unsplit(model: Path, stages: Path, folder: Path) -> None:
    """A folder of the unsplit model for genai, with the settings of its stages."""
    config = json.loads((stages / FILE_NAME).read_text())
    config["model"]["type"] = "llama"
    config["model"]["decoder"].pop("pipeline")
    config["model"]["decoder"]["filename"] = model.name
    folder.mkdir()
    for path in model.parent.iterdir():
        if path.is_file():
            link_file(path, folder / path.name)
    (folder / FILE_NAME).write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    options = parser.parse_args()
    size = Size(options.layers, options.hidden, 8, 4, 3 * options.hidden, vocabulary=1024)
    prompt = np.random.default_rng(0).integers(1, size.vocabulary, options.prompt).tolist()
    with tempfile.TemporaryDirectory(prefix="splitc-genai-") as place:
        folder, model = Path(place), Path(place) / "model" / "model.onnx"
        model.parent.mkdir()
        save(build(size), model)
        plan = plan_model(model, [f"{options.stages}xcpu"], Request(split_mode="layer", no_fuse=True))
        compile_model(plan, folder / "package")
        export_genai(folder / "package", folder / "stages", stop=[0], context=options.prompt + options.tokens)
        write_unsplit(model, folder / "stages", folder / "unsplit")
        models = {name: open_model(folder / name) for name in ("stages", "unsplit")}
        found: dict[str, list[list[float]]] = {name: [] for name in models}
        tokens = {}
        for _ in range(options.rounds):
            for name, each in models.items():
                tokens[name], seconds = generate(each, prompt, options.tokens)
                found[name].append(seconds[1:])
        for name, rounds in found.items():
            times = 1e3 * np.concatenate(rounds)
            percentiles = {f"{part} % ms": round(float(np.percentile(times, part)), 2) for part in (50, 99)}
            rates = [1 / np.mean(each) for each in rounds]
            print(json.dumps({"model": name, "tokens a second": round(float(np.median(rates)), 1), **percentiles}))
        same = tokens["stages"] == tokens["unsplit"]
        print(f"the same {len(tokens['stages'])} tokens: {same}")
    if not same:
        raise SystemExit("the stages gave other tokens than the unsplit model")


if __name__ == "__main__":
    main()
