"""The settings that PEFT and diffusers keep beside the matrices: how much an update is scaled, and what kind it is."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitc.runtime.errors import AdapterError
from splitc.runtime.files.written import read_config

CONFIG = "adapter_config.json"
# What PEFT's files have before a module's name.
PREFIX = "base_model.model."
# Settings of other kinds of adapters.
KINDS = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA, whose matrices are block-diagonal",
    "alora_invocation_tokens": "aLoRA",
    "layer_replication": "LoRA of a model with repeated layers",
    "target_parameters": "LoRA of single parameters",
}
# Initializations that change the base weights: the first product of A and B is taken from them, or they are quantized.
CHANGING = ("pissa", "corda", "olora", "lora_ga", "loftq")


@dataclass(frozen=True)
class Scaling:
    """How updates are scaled: by `alpha` over their rank, or over its root.

    - `patterns`: other alphas, by regular expressions for modules' names, or for their ends from a dot on.
    - `prefix`: what files put before modules' names. Patterns don't have it.
    """

    alpha: float | None = None
    by_root: bool = False
    patterns: Mapping[str, float] = field(default_factory=dict)
    prefix: str = ""

    def scale(self, module: str, rank: int) -> float:
        """The scale of a module's update. Without an alpha, it is the rank."""
        name = module.removeprefix(self.prefix)
        matching = (alpha for pattern, alpha in self.patterns.items() if re.match(_expression(pattern), name))
        alpha = next(matching, self.alpha)
        if alpha is None:
            return 1.0
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def read_scaling(folder: Path) -> Scaling:
    """The scaling that PEFT's adapter_config.json gives, if there is one.

    Raises AdapterError, which names the kind, for adapters that are more than two matrices a module.
    """
    path = folder / CONFIG
    return scaling_of(read_config(path), str(path), PREFIX) if path.is_file() else Scaling()


def scaling_of(config: Mapping[str, Any], where: str, prefix: str) -> Scaling:
    """The scaling of a config, whose file has a prefix before modules' names. `where` it is, is for messages."""
    _check_plain(config, where)
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"{where} has an alpha_pattern that is not an object of numbers by name: {patterns}")
    alphas = [config.get("lora_alpha"), *patterns.values()]
    if not all(alpha is None or isinstance(alpha, int | float) for alpha in alphas):
        raise AdapterError(f"{where} has an alpha that is not a number: {alphas}")
    for pattern in patterns:
        try:
            re.compile(_expression(pattern))
        except re.error as error:
            raise AdapterError(
                f"{where} has the alpha_pattern '{pattern}', which is not a regular expression: {error}"
            ) from None
    return Scaling(config.get("lora_alpha"), bool(config.get("use_rslora")), patterns, prefix)


def _check_plain(config: Mapping[str, Any], where: str) -> None:
    """Raise AdapterError for a config of another kind than matrices that are added to the original model's layers."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterError(f"{where} is of the kind {kind}, and only LORA is known")
    for key, what in KINDS.items():
        if config.get(key):
            raise AdapterError(f"{where} is of the kind {what} ({key}), and only plain LoRA is known")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise AdapterError(f"{where} trains biases too (bias={config.get('bias')}), and only matrices are known")
    if saved := config.get("modules_to_save"):
        raise AdapterError(f"{where} has whole modules beside its matrices ({saved})")
    begin = config.get("init_lora_weights")
    if str(begin).lower().startswith(CHANGING):
        raise AdapterError(
            f"{where} was trained beside changed base weights (init_lora_weights={begin}), and is wrong beside the "
            "original ones: convert it to plain LoRA, by PEFT's save_pretrained(folder, "
            "path_initial_model_for_weight_conversion=...), or export the model with the changed weights, and say "
            "init_lora_weights=true in the config"
        )


def _expression(pattern: str) -> str:
    """The regular expression that PEFT makes of a pattern."""
    return rf"(.*\.)?({pattern})$"
