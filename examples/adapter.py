"""An adapter (LoRA) on a split model: requests with it and without, at the same time."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model")
parser.add_argument("--adapter", help="a folder of PEFT or a file; default: random numbers")
options = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    plan = plan_model(options.model, "2xcpu", Request(split_mode="tensor", lora_slots=8))
    compile_model(plan, Path(folder) / "package")
    adapter = options.adapter
    if adapter is None:
        random, slot = np.random.default_rng(0), plan.analysis.slots[0]
        shapes = {"lora_A": (8, slot.inputs), "lora_B": (slot.outputs, 8)}
        name, adapter = slot.names[0], Path(folder) / "random.safetensors"
        save_file(
            {f"{name}.{k}.weight": random.normal(0, 0.2, s).astype(np.float32) for k, s in shapes.items()}, adapter
        )
    ids = np.array([[5, 17, 33]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(3)[None]}
    with Session(Path(folder) / "package") as session:
        loaded = session.adapters.load("style", adapter)
        print(f"{len(loaded.arrays)} layers change; without a layer: {dict(loaded.unmatched)}")
        futures = [session.submit(feeds, adapters=asked) for asked in ({}, "style", {"style": 0.5})]
        plain, whole, half = (future.result()["logits"] for future in futures)
    print(
        "the adapter changes logits by up to",
        np.abs(whole - plain).max(),
        "and half of it by",
        np.abs(half - plain).max(),
    )
