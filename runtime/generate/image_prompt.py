"""Questions about images as transformers reads them: tokens, arrays of pixels, and the tokens' positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import MisuseError, blamed, needed
from splitc.runtime.files.written import check_regular
from splitc.runtime.generate.package_configs import find_beside, generation_config

# The files by which transformers finds a processor.
CONFIGS = ("processor_config.json", "preprocessor_config.json")
# Where a model's config says which token stands for a row of an image's features.
IMAGE_TOKENS = ("image_token_id", "image_token_index")


@dataclass(frozen=True)
class ImagePrompt:
    """A question's tokens, in which each `image_token` stands for a row of features; and the processor's arrays."""

    ids: Sequence[int]
    image_token: int
    arrays: Mapping[str, Array]


def read_images(package: Path, module: str, question: str, paths: Sequence[Path]) -> ImagePrompt:
    """Read a question and images with the model's processor from transformers.

    Its configs travel with the `module` of the package. Raises MisuseError without them or without transformers, and
    for a file that is not an image.
    """
    folder = next((file.parent for name in CONFIGS if (file := find_beside(package, module, name))), None)
    if folder is None:
        raise MisuseError(
            f"{package} has no {' or '.join(CONFIGS)}, which says how the model reads images: compile the folder in "
            "which it is"
        )
    processor, images = _load_processor(folder), [_open_image(path) for path in paths]
    with blamed("the model's processor can't read the question and the images"):  # they are programs of models' authors
        text = _with_images(processor, question, len(images))
        made = processor(text=[text], images=images, return_tensors="np")
    arrays = {name: np.asarray(array) for name, array in made.items()}
    ids = arrays.pop("input_ids")[0]
    return ImagePrompt([int(token) for token in ids], _image_token(processor, package, module), arrays)


def _load_processor(folder: Path) -> Any:
    with needed("--image needs transformers and Pillow: pip install 'splitc[images]'"):
        import PIL  # noqa: F401  # which processors need, and transformers does not
        from transformers import AutoProcessor
    with blamed(f"transformers can't read the processor of {folder}"):
        return AutoProcessor.from_pretrained(str(folder))


def _open_image(path: Path) -> Any:
    from PIL import Image

    if not path.exists():
        raise MisuseError(f"no such image: {path}")
    check_regular(path)
    with blamed(f"can't read the image {path}"):
        return Image.open(path).convert("RGB")


def _with_images(processor: Any, question: str, images: int) -> str:
    """The question as the model's template writes it; without one, after a token for each image."""
    if getattr(processor, "chat_template", None):
        content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        return str(processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    token = str(getattr(processor, "image_token", "<image>"))
    return question if token in question else f"{token * images}{question}"


def _image_token(processor: Any, package: Path, module: str) -> int:
    config = generation_config(package, module)
    known = [getattr(processor, "image_token_id", None), *(config.get(name) for name in IMAGE_TOKENS)]
    token = next((token for token in known if isinstance(token, int)), None)
    if token is None:
        raise MisuseError(
            f"neither the processor nor config.json says which token stands for an image ({IMAGE_TOKENS[0]})"
        )
    return token


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
