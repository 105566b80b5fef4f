"""llama.cpp's adapters: a GGUF file with two factors for each matrix that is changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from infer.contracts.adapters import LowRank
from infer.errors import CheckpointError
from infer.weight import GroupedWeight
from infer_formats.gguf import names
from infer_formats.gguf.blocks import weight_of
from infer_formats.gguf.config import architecture
from infer_formats.gguf.container import Tensors
from infer_formats.gguf.header import read_header
from infer_formats.gguf.metadata import Metadata

FACTOR = re.compile(r"(?P<name>.+)\.lora_(?P<kind>[ab])")
INVOCATION = "adapter.alora.invocation_tokens"


class GGUFAdapter:
    """An AdapterReaderProtocol; ``config`` is the base's config.json."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        header = read_header(path)
        meta = Metadata(path, header.metadata)
        for key, wanted in {"general.type": "adapter", "adapter.type": "lora"}.items():
            if (found := meta.text(key)) != wanted:
                raise CheckpointError(f"{path}: {key} is {found!r}, but that of a LoRA adapter is {wanted!r}.")
        if meta.values.get(INVOCATION):
            raise CheckpointError(
                f"{path}: {INVOCATION} asks for an activated LoRA (aLoRA), which begins in the middle of a prompt and "
                "which infer does not compute."
            )
        self._path, self._alpha, self._architecture = path, meta.needed("adapter.lora.alpha"), architecture(meta)
        if self._architecture in names.DELTA:
            raise CheckpointError(
                f"{path}: infer reads no GGUF adapters of {self._architecture!r}, whose layers GGUF keeps in another "
                "order; use the adapter's PEFT folder."
            )
        heads = config.get("num_attention_heads") or 1
        self._head_size = config.get("head_dim") or config.get("hidden_size", 0) // heads
        self._tensors = Tensors(dict.fromkeys(header.tensors, path), header.tensors, self._architecture)

    def changes(self) -> Mapping[str, LowRank]:
        factors: dict[str, dict[str, Tensor]] = {}
        for own in self._tensors.names():
            if (found := FACTOR.fullmatch(own)) is None:
                raise CheckpointError(f"{self._path} holds {own!r}, which is no factor (.lora_a, .lora_b).")
            factors.setdefault(found["name"], {})[found["kind"]] = self._matrix(own)
        return {self._hub_path(name): self._change(name, own) for name, own in factors.items()}

    def _matrix(self, own: str) -> Tensor:
        weight = weight_of(own, self._tensors.infos[own], self._tensors.tensor(own))
        plain = weight.dequantize() if isinstance(weight, GroupedWeight) else weight
        if plain.dim() != 2:
            raise CheckpointError(f"{self._path}: the factor {own!r} has shape {list(plain.shape)}, and is no matrix.")
        return plain

    def _hub_path(self, name: str) -> str:
        if names.expert_names(self._architecture, name):
            raise CheckpointError(f"{self._path} changes {name!r}; experts of a mixture cannot be changed by adapters.")
        return names.hub_name(self._architecture, name).removesuffix(".weight")

    def _change(self, name: str, own: Mapping[str, Tensor]) -> LowRank:
        if missing := {"a", "b"} - own.keys():
            raise CheckpointError(f"{self._path} has no {name}.lora_{missing.pop()}.")
        a_RK, b_NR = own["a"], own["b"]
        if len(a_RK) != b_NR.shape[1]:
            raise CheckpointError(
                f"{self._path} has for {name!r} factors of {list(a_RK.shape)} and {list(b_NR.shape)}, whose ranks "
                "differ."
            )
        if self._architecture in names.TURNED and name.split(".")[-2:-1] in (["attn_q"], ["attn_k"]):
            b_NR = b_NR[names.row_order(len(b_NR), self._head_size)]
        # As llama.cpp has it: without an alpha, the factors are not scaled.
        return LowRank(a_RK, b_NR, self._alpha / len(a_RK) if self._alpha else 1.0)
