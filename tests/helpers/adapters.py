"""Adapter files with random numbers, in the formats of several programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Pairs = dict[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]


def random_pairs(sizes: Mapping[str, tuple[int, ...]], rank: int = 4, seed: int = 0, size: float = 0.3) -> Pairs:
    """Random A and B for each module, by its numbers of inputs and outputs and its kernel."""
    random = np.random.default_rng(seed)
    pairs = {}
    for module, (inputs, outputs, *kernel) in sizes.items():
        a = random.normal(size=(rank, inputs, *kernel)) * size
        b = random.normal(size=(outputs, rank, *([1] * len(kernel)))) * size
        pairs[module] = a.astype(np.float32), b.astype(np.float32)
    return pairs


def product(pair: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """The product B A in the shape of the layer's weight: [outputs, inputs, ...]."""
    a, b = pair
    made: npt.NDArray[np.float32] = (b.reshape(len(b), -1) @ a.reshape(len(a), -1)).reshape(len(b), *a.shape[1:])
    return made


def write_peft(folder: Path, pairs: Pairs, **config: Any) -> Path:
    """PEFT's folder. By default alpha is twice the rank, so that the scale is 2."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = len(next(iter(pairs.values()))[0])
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    tensors: dict[str, npt.NDArray[Any]] = {}
    for module, (a, b) in pairs.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_kohya(path: Path, pairs: Pairs, alpha: float, prefix: str = "lora_unet") -> Path:
    """A file in the format of kohya's scripts, whose module names have no dots."""
    tensors: dict[str, npt.NDArray[Any]] = {}
    for module, (a, b) in pairs.items():
        name = f"{prefix}_{module.replace('.', '_')}"
        tensors |= {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b}
        tensors[f"{name}.alpha"] = np.array(alpha, np.float32)
    save_file(tensors, path)
    return path
