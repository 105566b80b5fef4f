"""PEFT's folders: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from infer.contracts.adapters import LowRank
from infer.errors import CheckpointError

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
"""What the names of all tensors begin with."""
FACTOR = re.compile(r"(?P<path>.+)\.lora_(?P<kind>[AB])\.weight")
IDLE = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "megatron_core", "runtime_config", "qalora_group_size", "eva_config", "ensure_weight_tying"),
}
"""Fields that say how an adapter was trained or is run, and change no result."""
READ = {
    *("peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"),
    *("use_rslora", "bias", "init_lora_weights", "layers_to_transform", "layers_pattern"),
}
REFUSED = {
    "use_dora": "DoRA, which scales the base's weights",
    "alora_invocation_tokens": "an activated LoRA (aLoRA), which begins in the middle of a prompt",
    "modules_to_save": "whole modules that replace the base's",
    "lora_bias": "biases beside its factors",
    "fan_in_fan_out": "layers whose weights are transposed",
    "layer_replication": "layers that the base does not have",
    "target_parameters": "parameters that are no linear layers",
    "trainable_token_indices": "rows of the embedding",
}
"""What is not computed, by the field that asks for it."""
INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
"""How factors may begin; others change the base's weights, too."""


class PeftAdapter:
    """An AdapterReaderProtocol."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config = self._read_config()
        self._check()

    @property
    def base(self) -> str | None:
        named = self._config.get("base_model_name_or_path")
        return named if isinstance(named, str) and named else None

    def changes(self) -> Mapping[str, LowRank]:
        factors: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self._tensors().items():
            found = FACTOR.fullmatch(name.removeprefix(PREFIX))
            if found is None or not name.startswith(PREFIX):
                raise CheckpointError(f"{self._path / WEIGHTS} holds {name!r}; {_kind(name)} not computed here.")
            factors.setdefault(found["path"], {})[found["kind"]] = tensor
        return {path: self._change(path, own) for path, own in factors.items()}

    def _change(self, path: str, own: Mapping[str, Tensor]) -> LowRank:
        where = f"{self._path / WEIGHTS} has for {path!r}"
        if missing := {"A", "B"} - own.keys():
            raise CheckpointError(f"{where} no lora_{missing.pop()}.weight.")
        a_RK, b_NR = own["A"], own["B"]
        rank = self._pattern("rank_pattern", path, self._config["r"])
        if not all(x.dim() == 2 and x.dtype.is_floating_point and x.dtype.itemsize > 1 for x in (a_RK, b_NR)):
            raise CheckpointError(f"{where} factors that are no matrices of float32, float16 or bfloat16.")
        if not a_RK.shape[0] == b_NR.shape[1] == rank:
            shapes = f"{list(a_RK.shape)} and {list(b_NR.shape)}"
            raise CheckpointError(f"{where} factors of {shapes}, but {CONFIG} says that their rank is {rank}.")
        if not self._targeted(path):
            raise CheckpointError(f"{where} factors, but target_modules in {CONFIG} leaves that layer out.")
        alpha = self._pattern("alpha_pattern", path, self._config["lora_alpha"])
        return LowRank(a_RK, b_NR, alpha / (rank**0.5 if self._config.get("use_rslora") else rank))

    def _read_config(self) -> dict[str, Any]:
        path = self._path / CONFIG
        try:
            config = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{self._path} has no {CONFIG}, which PEFT's adapters have.") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise CheckpointError(f"{path} is no JSON: {error}.") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{path} is no JSON object.")
        return config

    def _check(self) -> None:
        """Raises CheckpointError if the configuration asks for what is not computed."""
        config, path = self._config, self._path / CONFIG
        if (kind := config.get("peft_type")) != "LORA":
            raise CheckpointError(f"{path}: peft_type is {kind!r}; infer applies LoRA's adapters only.")
        for field, what in REFUSED.items():
            if config.get(field) not in (None, False, [], {}):
                raise CheckpointError(f"{path}: {field} asks for {what}, which infer does not compute.")
        if (bias := config.get("bias", "none")) != "none":
            raise CheckpointError(f'{path}: bias is {bias!r}; infer computes adapters without biases ("none").')
        if (initial := config.get("init_lora_weights", True)) not in INITIAL:
            raise CheckpointError(
                f"{path}: init_lora_weights is {initial!r}, which changes the base's weights, too; save the adapter as "
                "one of the original base (PEFT's path_initial_model_for_weight_conversion)."
            )
        for field, value in config.items():
            if field not in IDLE | READ | REFUSED.keys() and value not in (None, False, [], {}):
                raise CheckpointError(f"{path}: infer does not know the field {field} = {value!r}.")
        for field, least in (("r", 1), ("lora_alpha", 0)):
            self._check_number(field, config.setdefault(field, 8), least)
        for field, least in (("rank_pattern", 1), ("alpha_pattern", 0)):
            patterns = config.get(field) or {}
            if not isinstance(patterns, dict):
                raise CheckpointError(f"{path}: {field} is {patterns!r}, no object of patterns and numbers.")
            for pattern, value in patterns.items():
                self._check_number(f"{field}[{pattern!r}]", value, least)
                self._check_pattern(field, pattern)
        targets = config.get("target_modules")
        if isinstance(targets, str):
            self._check_pattern("target_modules", targets)
        elif not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise CheckpointError(f"{path}: target_modules is {targets!r}, neither a list of names nor a pattern.")

    def _check_number(self, field: str, value: Any, least: int) -> None:
        kinds = (int,) if least else (int, float)
        if type(value) not in kinds or not least <= value < 1e9:
            what = "whole number above 0" if least else "number from 0 on"
            raise CheckpointError(f"{self._path / CONFIG}: {field} is {value!r}, not a {what}.")

    def _check_pattern(self, field: str, pattern: str) -> None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(f"{self._path / CONFIG}: {field} has the pattern {pattern!r}: {error}.") from None

    def _pattern(self, field: str, path: str, otherwise: Any) -> Any:
        """What a field says of a path: the first pattern that fits a whole number of the path's last steps."""
        for pattern, value in (self._config.get(field) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", path):
                return value
        return otherwise

    def _targeted(self, path: str) -> bool:
        """Whether PEFT would load the factors of this path."""
        targets = self._config["target_modules"]
        if _named(self._config.get("exclude_modules") or (), path):
            return False
        if targets == "all-linear":
            return True
        layers = self._config.get("layers_to_transform")
        if isinstance(targets, str) or layers in (None, []):
            return _named(targets, path)
        patterns = self._config.get("layers_pattern") or r"[^.]*"
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            if layer := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", path):
                return _named(targets, path) and int(layer[1]) in ([layers] if isinstance(layers, int) else layers)
        return False

    def _tensors(self) -> Mapping[str, Tensor]:
        path = self._path / WEIGHTS
        if not path.exists():
            if (self._path / PICKLE).exists():
                raise CheckpointError(
                    f"{self._path / PICKLE} is a pickle, which may run any code while it is read; save the adapter as "
                    f"{WEIGHTS}."
                )
            raise CheckpointError(f"{self._path} has no {WEIGHTS}.")
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged: {error}.") from error


def _named(names: str | Iterable[str], path: str) -> bool:
    """Whether a pattern fits a path, or one of the names ends it."""
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names)


def _kind(name: str) -> str:
    """What a tensor is that is no factor of a linear layer."""
    if "lora_embedding" in name:
        return "adapters of embeddings are"
    if "lora_magnitude_vector" in name:
        return "DoRA is"
    if name.endswith("lora_B.bias"):
        return "biases beside factors are"
    return "adapters that have anything but lora_A.weight and lora_B.weight are"
