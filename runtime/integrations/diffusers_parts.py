"""Models of a diffusers pipeline whose methods run sessions. Needs torch, diffusers and transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.utils import BaseOutput
from transformers.utils import ModelOutput

from splitc.runtime.arrays.torch_tensors import to_torch
from splitc.runtime.errors import MisuseError
from splitc.runtime.integrations.arguments import FORWARD, ModelMethod, method_of, numbered_together
from splitc.runtime.integrations.diffusers_adapters import MERGES, PROMPT, PackageAdapters, scaled, with_scaled_prompt
from splitc.runtime.package.manifest import Tensor
from splitc.runtime.session.session import Session

# The result of a method, by its name, from a part and its session's outputs.
Answer = Callable[[Any, Mapping[str, torch.Tensor]], BaseOutput | ModelOutput]
ENCODE, DECODE = "encode", "decode"
HOST = torch.device("cpu")
# Methods that would change what a compiled model computes.
CHANGES = (
    "_load_ip_adapter_weights",
    "add_adapter",
    "enable_freeu",
    "enable_tiling",
    "load_adapter",
    "load_attn_procs",
    "load_lora_adapter",
    "load_state_dict",
    "set_attn_processor",
)


class Weight:
    """A weight of a model without weights: it can be set, and only then read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, part: Any, kind: Any) -> Any:
        raise MisuseError(
            f"the pipeline reads {self._name}, one of the model's weights, and a package has the models' weights in "
            f"its engines: set it, as in pipeline.{self._name} = tensor"
        )


def find_class(library: str, name: str) -> Any:
    """The class that model_index.json names, from a library or from a pipeline's module in diffusers."""
    try:
        return getattr(getattr(diffusers.pipelines, library, None) or import_module(library), name)
    except (ImportError, AttributeError) as error:
        raise MisuseError(f"model_index.json names {library}.{name}, which is not installed here: {error}") from error


def make_part(kind: Any, config: Path, name: str, sessions: Mapping[str, Session]) -> torch.nn.Module:
    """A model of the class `kind`, built without weights from its config's folder. Its methods run sessions.

    Everything else is unchanged: its config, its properties, and its class, which pipelines check.
    """
    of_diffusers = issubclass(kind, diffusers.ConfigMixin)
    with torch.device("meta"):
        if of_diffusers:
            part: Any = kind.from_config(kind.load_config(config))
        else:
            part = kind(kind.config_class.from_pretrained(config))
    methods = {
        **_weights(part, name),
        "device": property(lambda self: HOST),
        "dtype": property(lambda self: _number_type(next(iter(self.sessions.values())))),
        "to": _stay,
        "_apply": _refusal(f"{name} is compiled for its devices and number type: it can't be moved"),
        **_refused(kind, name, sessions),
        **_served(kind, name, sessions, _diffusers_answer if of_diffusers else _transformers_answer),
    }
    part.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__, **methods})
    part.sessions = dict(sessions)
    return part.eval()  # type: ignore[no-any-return]


def _weights(part: Any, name: str) -> dict[str, Weight]:
    """Placeholders without data for the model's own tensors, which pipelines may read beside its methods."""
    own = [*part._parameters, *part._buffers]
    part._parameters.clear()
    part._buffers.clear()
    return {tensor: Weight(f"{name}.{tensor}") for tensor in own}


def with_adapters(pipeline: Any) -> Any:
    """A pipeline whose adapter methods act on its sessions."""
    kind = type(pipeline)
    merged = "a package's weights can't be changed: merge adapters with splitc compile --lora"
    refused = {name: _refusal(merged) for name in MERGES if hasattr(kind, name)}
    prompt = {PROMPT: with_scaled_prompt(kind.encode_prompt)} if hasattr(kind, PROMPT) else {}
    own = {"__module__": kind.__module__, "__doc__": kind.__doc__, **refused, **prompt}
    pipeline.__class__ = type(kind.__name__, (PackageAdapters, kind), own)
    return pipeline


def _served(kind: Any, name: str, sessions: Mapping[str, Session], answer: Answer) -> dict[str, Any]:
    """The methods that sessions replace."""
    answers = {FORWARD: answer, ENCODE: _latents, DECODE: answer}
    return {
        method: _method(answers[method], method_of(kind, method, f"{name}.{method}", session), session)
        for method, session in sessions.items()
    }


def _refused(kind: Any, name: str, sessions: Mapping[str, Session]) -> dict[str, Any]:
    """The methods that a model without weights can't support."""
    missing = set() if FORWARD in sessions else {FORWARD, ENCODE, DECODE} - sessions.keys()
    refused = {
        method: f"the package has no module for {name}.{method}: export and compile it too" for method in missing
    }
    changed = f"{name} is compiled, and can't be changed: make the change to the model before it is exported"
    refused |= {change: changed for change in CHANGES if hasattr(kind, change)}
    return {method: _refusal(reason) for method, reason in refused.items()}


def _method(answer: Answer, method: ModelMethod, session: Session) -> Callable[..., Any]:
    warned: set[str] = set()

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors, arguments = method.bind(args, kwargs)
        known = [tensor for tensor in (*method.inputs, *method.optional) if tensor.name in tensors]
        for tensor in known:
            if tensor.name not in warned and (cut := _cut_off(tensors[tensor.name], tensor)):
                warned.add(tensor.name)
                warnings.warn(f"{method.name} is called with '{tensor.name}' {cut}", stacklevel=2)
        feeds = {tensor.name: _fitted(tensors[tensor.name], tensor) for tensor in known}
        outputs = session.run(feeds, adapters=scaled(session.adapters.used, method.strength(arguments)))
        made = answer(self, to_torch(outputs))
        return tuple(made.values()) if arguments.get("return_dict") is False else made

    return run


def _diffusers_answer(part: Any, outputs: Mapping[str, torch.Tensor]) -> BaseOutput:
    """Outputs by their names in the export. The first is also `sample`, the name that most models of diffusers use."""
    made = BaseOutput(**numbered_together(outputs, {}))  # ModelOutput of transformers 5 refuses other attributes
    if "sample" not in made:
        made.sample = next(iter(made.values()))  # an attribute, not one more output
    return made


def _transformers_answer(part: Any, outputs: Mapping[str, torch.Tensor]) -> ModelOutput:
    layers = getattr(part.config, "num_hidden_layers", 0)
    # The states before the first layer and after each.
    return ModelOutput(**numbered_together(outputs, {"hidden_states": layers + 1}))


def _latents(part: Any, outputs: Mapping[str, torch.Tensor]) -> BaseOutput:
    """Latents, or the means and variances to draw them from, which have twice the channels."""
    (latents,) = outputs.values()
    decoder = part.sessions.get(DECODE)
    channels = decoder.inputs[0].shape[1] if decoder else part.config.get("latent_channels")
    if latents.shape[1] == 2 * channels:
        return BaseOutput(latent_dist=DiagonalGaussianDistribution(latents))
    return BaseOutput(latents=latents, latent=latents)


def _refusal(reason: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise MisuseError(reason)

    return refuse


def _stay(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The part itself, since it takes tensors of any number type. Raises MisuseError for another device."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type != HOST.type:
        raise MisuseError(
            f"can't move the pipeline to {device}: a package runs on the devices that it was compiled for, and takes "
            "tensors from the host. load(package, devices=[...]) puts its ranks on others"
        )
    if dtype not in (None, self.dtype):
        warnings.warn(f"{type(self).__name__} stays in {self.dtype}, which it was compiled for", stacklevel=2)
    return self


def _number_type(session: Session) -> torch.dtype:
    """A model's floating-point type."""
    types = [
        getattr(torch, tensor.dtype) for tensor in (*session.inputs, *session.outputs) if hasattr(torch, tensor.dtype)
    ]
    return next((dtype for dtype in types if dtype.is_floating_point), torch.float32)


def _fitted(value: Any, tensor: Tensor) -> torch.Tensor:
    """A tensor in the form that an input takes: its number type, with an added axis for a single number."""
    value = torch.as_tensor(value)
    if value.ndim == 0 and tensor.shape is not None and len(tensor.shape) == 1:
        value = value.reshape(1)
    return value.to(HOST, getattr(torch, tensor.dtype))


def _cut_off(value: Any, tensor: Tensor) -> str:
    """What becomes of a number with a fraction for an input of whole ones, such as schedulers' timesteps; else empty.

    It is no error: the pipelines' own schedulers have such timesteps, and images are much the same.
    """
    value, dtype = torch.as_tensor(value), getattr(torch, tensor.dtype)
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or not value.is_floating_point():
        return ""
    fractions = value[value != value.trunc()].tolist()
    if not fractions:
        return ""
    return (
        f"{fractions[0]:g}, and the model was exported with whole numbers there, of type {tensor.dtype}: it computes "
        f"without the fraction. Export it with '{tensor.name}' of type float32, or choose whole numbers, as by a "
        'scheduler\'s timestep_spacing="leading"'
    )
