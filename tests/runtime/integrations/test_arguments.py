"""Calls of a model's methods become feeds."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from splitc.runtime.errors import FeedError
from splitc.runtime.integrations.arguments import ModelMethod, numbered_together
from splitc.runtime.package.manifest import FixedInput, Tensor

SAMPLE, STATES = np.zeros((1, 4)), np.ones((1, 2))


def forward(
    sample: Any,
    timestep: Any,
    encoder_hidden_states: Any,
    class_labels: Any = None,
    added_cond_kwargs: Any = None,
    residuals: Any = None,
    scale_of_residuals: float = 1.0,
    guess_mode: bool = False,
    num_frames: int | None = None,
    cross_attention_kwargs: Any = None,
    output_attentions: bool = False,
    return_dict: bool = True,
) -> None:
    """A denoiser's arguments."""


def decode(z: Any, generator: Any = None, return_dict: bool = True) -> None:
    """A decoder's arguments."""


def hidden(*args: Any, **kwargs: Any) -> None:
    """A function whose signature a decorator hides."""


def method(call: Any, *names: str, optional: tuple[str, ...] = (), fixed: tuple[FixedInput, ...] = ()) -> ModelMethod:
    inputs, others = ([Tensor(name, "float32", None) for name in each] for each in (names, optional))
    return ModelMethod("unet.forward", inspect.signature(call), inputs, others, fixed)


def test_arguments_go_into_the_inputs_of_their_names() -> None:
    """By position and by name, numbers, and entries of dicts; missing ones have their defaults."""
    unet = method(forward, "sample", "timestep", "encoder_hidden_states", "text_embeds")
    added = {"text_embeds": STATES, "nothing": None}
    feeds, arguments = unet.bind((SAMPLE, 3), {"encoder_hidden_states": STATES, "added_cond_kwargs": added})
    assert feeds["sample"] is SAMPLE and feeds["text_embeds"] is STATES
    assert feeds["timestep"] == np.asarray(3)
    assert arguments["return_dict"] is True


@pytest.mark.parametrize("signature", [decode, hidden])
def test_only_input_is_the_first_tensor(signature: Any) -> None:
    for call, kwargs in (((SAMPLE,), {}), ((), {"generator": object(), "z": SAMPLE})):
        feeds, arguments = method(signature, "latent_sample").bind(call, {**kwargs, "return_dict": False})
        assert feeds["latent_sample"] is SAMPLE
        assert arguments["return_dict"] is False


def test_tensor_without_an_input_is_refused() -> None:
    """It would change the model's output, so it must not be dropped silently."""
    unet = method(forward, "sample", "timestep", "encoder_hidden_states")
    call = (SAMPLE, 1, STATES)
    with pytest.raises(FeedError, match="'class_labels', and the compiled model has no such input"):
        unet.bind(call, {"class_labels": STATES})
    with pytest.raises(FeedError, match="'residuals'"):
        unet.bind(call, {"residuals": [STATES, STATES]})
    with pytest.raises(FeedError, match="'image_embeds'"):
        unet.bind(call, {"added_cond_kwargs": {"image_embeds": STATES}})


def test_missing_tensor_is_named() -> None:
    unet = method(forward, "sample", "timestep", "encoder_hidden_states", "text_embeds")
    with pytest.raises(FeedError, match=r"unet\.forward is called without 'text_embeds'"):
        unet.bind((SAMPLE, 1, STATES), {})


def test_optional_input_need_not_be_given() -> None:
    unet = method(forward, "sample", "timestep", "encoder_hidden_states", optional=("class_labels",))
    assert "class_labels" not in unet.bind((SAMPLE, 1, STATES), {})[0]
    assert unet.bind((SAMPLE, 1, STATES), {"class_labels": SAMPLE})[0]["class_labels"] is SAMPLE


def test_bound_input_takes_what_it_was_bound_to() -> None:
    bound = (FixedInput("class_labels", "float32", None, [[1.0, 1.0]]), FixedInput("residuals", "float32", None))
    unet = method(forward, "sample", "timestep", "encoder_hidden_states", fixed=bound)
    feeds, _ = unet.bind((SAMPLE, 1, STATES), {"class_labels": STATES, "residuals": SAMPLE})
    assert feeds.keys() == {"sample", "timestep", "encoder_hidden_states"}
    with pytest.raises(FeedError, match="another 'class_labels' than it was compiled for"):
        unet.bind((SAMPLE, 1, STATES), {"class_labels": 2 * STATES})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"guess_mode": True}, "'guess_mode' True, .*computes with False, the method's default"),
        ({"scale_of_residuals": 0.5}, "'scale_of_residuals' 0.5, and the compiled model has no such input"),
        ({"scale_of_residuals": [1.0, np.float32(0.5)]}, "'scale_of_residuals'"),
        ({"class_labels": 2}, r"another 'class_labels' than it was compiled for \(--set\): 2, and not \[0.1.*\]"),
    ],
)
def test_number_that_the_model_does_not_have_is_refused(given: dict[str, Any], why: str) -> None:
    """It would be dropped silently, and the image be another."""
    bound = FixedInput("class_labels", "float32", None, [float(np.float32(0.1))])
    unet = method(forward, "sample", "timestep", "encoder_hidden_states", fixed=(bound,))
    with pytest.raises(FeedError, match=why):
        unet.bind((SAMPLE, 1, STATES), given)


@pytest.mark.parametrize(
    "given",
    [
        {"guess_mode": False, "scale_of_residuals": [1, np.float64(1)], "class_labels": 0.1},
        {"guess_mode": None, "cross_attention_kwargs": {}, "added_cond_kwargs": {"resolution": None, "size": 3}},
        {"num_frames": 8, "output_attentions": True, "return_dict": False},
    ],
)
def test_numbers_that_change_nothing_or_whose_default_is_not_known_are_taken(given: dict[str, Any]) -> None:
    """Pipelines always pass some of them."""
    bound = FixedInput("class_labels", "float32", None, [float(np.float32(0.1))])
    unet = method(forward, "sample", "timestep", "encoder_hidden_states", fixed=(bound,))
    assert unet.bind((SAMPLE, 1, STATES), given)[0].keys() == {"sample", "timestep", "encoder_hidden_states"}


def test_flags_of_other_methods_are_the_pipelines_own() -> None:
    """Kandinsky's pipelines always give `force_not_quantize`, which is not the default, to `decode`."""

    def decode(z: Any, force_not_quantize: bool = False) -> None:
        """A decoder's arguments."""

    vae = ModelMethod("movq.decode", inspect.signature(decode), [Tensor("z", "float32", None)])
    assert vae.bind((SAMPLE,), {"force_not_quantize": True})[0]["z"] is SAMPLE


def test_scale_of_adapters_is_a_calls_own() -> None:
    unet = method(forward, "sample", "timestep", "encoder_hidden_states")
    for given, scale in ((None, 1.0), ({}, 1.0), ({"scale": None}, 1.0), ({"scale": np.float32(0.5)}, 0.5)):
        _, arguments = unet.bind((SAMPLE, 1, STATES), {"cross_attention_kwargs": given})
        assert unet.strength(arguments) == scale
    with pytest.raises(FeedError, match="the scale 'much' of adapters, which is not a number"):
        unet.strength({"scale": "much"})


def test_numbered_outputs_are_one_tuple() -> None:
    """Outputs that the model lacks are empty places: `states[-2]` is never another layer's."""
    outputs = {"last": 9, "states.0": 0, "states.10": 10, "states.1": 1, "attentions.0": 5}
    found = numbered_together({**outputs, **{f"states.{n}": n for n in range(2, 10)}}, {"states": 12})
    assert found == {"last": 9, "states": (*range(11), None), "attentions": (5,)}


def test_lists_go_into_numbered_inputs_and_come_of_numbered_outputs() -> None:
    """As a ControlNet's outputs for a denoiser."""
    unet = method(forward, "sample", "timestep", "encoder_hidden_states", "residuals_0", "residuals_1")
    feeds, _ = unet.bind((SAMPLE, 1, STATES), {"residuals": (SAMPLE, STATES)})
    assert feeds["residuals_0"] is SAMPLE and feeds["residuals_1"] is STATES
    with pytest.raises(FeedError, match="'residuals_2', and the compiled model has no such input"):
        unet.bind((SAMPLE, 1, STATES), {"residuals": (SAMPLE, STATES, STATES)})
    with pytest.raises(FeedError, match="without 'residuals_1'"):
        unet.bind((SAMPLE, 1, STATES), {"residuals": (SAMPLE,)})
    found = numbered_together({"down_0": 1, "down_1": 2, "middle": 3, "level_7": 4, "one_0": 5}, {})
    assert found == {"down": (1, 2), "middle": 3, "level_7": 4, "one_0": 5}
