"""Positions of tokens in images, as transformers' own model computes them: Qwen-VL's have three numbers a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import MisuseError, blamed, needed
from splitc.runtime.generate.image_prompt import ImagePrompt
from splitc.runtime.generate.package_configs import find_beside

METHOD = "get_rope_index"
# Arrays of a processor that the method takes, if it does.
TAKEN = ("image_grid_thw", "mm_token_type_ids")


@dataclass(frozen=True)
class Positions:
    """The positions of a prompt, [rows, tokens]. Later tokens have their index plus `shift`, in all rows."""

    prompt: Array
    shift: int

    def at(self, places: Array) -> Array:
        """The positions, [rows, *places], of tokens with these indices in the sequence."""
        count = self.prompt.shape[1]
        known = self.prompt[:, np.minimum(places, count - 1)]
        return np.asarray(np.where(places < count, known, places + self.shift))


def read_positions(package: Path, module: str, prompt: ImagePrompt) -> Positions:
    """Compute the positions of a prompt's tokens with transformers' model, without its weights.

    Its config travels with the `module` of the package. Raises MisuseError without that, without torch, and for a model
    that does not compute positions.
    """
    file = find_beside(package, module, "config.json")
    if file is None:
        raise MisuseError(
            f"the decoder takes positions in an image, and {package} has no config.json, by which transformers "
            "computes them: compile the folder in which it is"
        )
    method = _find_method(file)
    with blamed(f"transformers can't compute positions by {file}"):
        import torch

        ids = torch.tensor([list(prompt.ids)])
        wanted = [name for name in TAKEN if name in signature(method).parameters and name in prompt.arrays]
        arrays = {name: torch.as_tensor(prompt.arrays[name]) for name in wanted}
        places, shift = method(ids, **arrays, attention_mask=torch.ones_like(ids))
    return Positions(places[:, 0].numpy(), int(shift.flatten()[0]))


def _find_method(config: Path) -> Callable[..., Any]:
    """The method of the model's class, on a model whose weights take no memory."""
    with needed(
        "the decoder takes positions in an image, which transformers computes with torch: pip install transformers "
        "torch"
    ):
        import torch
        from transformers import AutoConfig, AutoModel
    with blamed(f"transformers can't make a model by {config}"), torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(str(config.parent)))
    method: Callable[..., Any] | None = getattr(model, METHOD, None)
    if method is None:
        raise MisuseError(
            f"the decoder takes positions in an image, and transformers' {type(model).__name__} has no {METHOD} to "
            "compute them: in Python, run the modules by yourself"
        )
    return method
