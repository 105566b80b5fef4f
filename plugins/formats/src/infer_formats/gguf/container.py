"""A GGUF file as a checkpoint's container, and its weights in a model's terms."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from infer.contracts.weights import TensorFilesProtocol
from infer.errors import CheckpointError
from infer.weight import GroupedWeight, Weight, joined
from infer_formats.gguf import config, names, tokenizer
from infer_formats.gguf.blocks import PLAIN, weight_of
from infer_formats.gguf.gemma import GEMMA_27B_LAYERS
from infer_formats.gguf.header import TensorInfo, read_header
from infer_formats.gguf.latent import LatentHeads
from infer_formats.gguf.metadata import Metadata
from infer_formats.gguf.rope import FACTORS

SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


UNIT_OFFSET = (*GEMMA_27B_LAYERS, *names.DELTA)
"""Architectures whose models add 1 to the weights of norms."""
LATENT_SIZES = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
DELTA_SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")


class GGUF:
    """A ContainerProtocol."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self._metadata = Metadata(path, header.metadata)
        infos, files = dict(header.tensors), dict.fromkeys(header.tensors, path)
        for part in _other_parts(self._metadata):
            for name, info in read_header(part).tensors.items():
                if name in infos:
                    raise CheckpointError(f"{part} has the tensor {name!r}, but so has {files[name]}.")
                infos[name], files[name] = info, part
        self._tensors = Tensors(files, infos, self._metadata.text("general.architecture") or "")

    def config(self) -> dict[str, Any]:
        made = config.hub_config(self._metadata, self._tensors.infos, self._tensors.tensor)
        return made | {"eos_token_id": tokenizer.end_ids(self._metadata)}

    def generation_config(self) -> dict[str, Any]:
        values = self._metadata.values
        return {
            name: values[f"general.sampling.{key}"]
            for key, name in SAMPLING.items()
            if f"general.sampling.{key}" in values
        }

    def tokenizer_config(self) -> dict[str, Any]:
        key = "tokenizer.chat_template"
        named = {"default": key} | {
            name: f"{key}.{name}" for name in self._metadata.several("tokenizer.chat_templates", str) or []
        }
        texts = {name: self._metadata.text(key) for name, key in named.items()}
        held = [{"name": name, "template": text} for name, text in texts.items() if text is not None]
        return tokenizer.special_texts(self._metadata) | ({"chat_template": held} if held else {})

    def tokenizer(self) -> bytes:
        return json.dumps(tokenizer.hub_tokenizer(self._metadata), ensure_ascii=False).encode()

    def tensors(self) -> Tensors:
        return self._tensors


def _other_parts(meta: Metadata) -> Iterator[Path]:
    """The files that have the rest of a checkpoint's tensors; ``meta`` is the first one's. Raises CheckpointError."""
    count = meta.whole("split.count", 1, least=1)
    if count is None or count == 1:
        return
    name = re.fullmatch(r"(.*-)00001(-of-\d{5})", meta.path.stem)
    if name is None or not name[2].endswith(f"-{count:05}"):
        raise CheckpointError(
            f"{meta.path} is one of {count} parts of a checkpoint; give model.path the first of them, whose name ends "
            f"in -00001-of-{count:05}{meta.path.suffix}, with the others beside it."
        )
    for number in range(2, count + 1):
        yield meta.path.with_name(f"{name[1]}{number:05}{name[2]}{meta.path.suffix}")


class BlocksProtocol(TensorFilesProtocol, Protocol):
    """What a weight format needs to know of a GGUF file's tensors."""

    infos: Mapping[str, TensorInfo]
    architecture: str


class Tensors:
    """A BlocksProtocol: tensors by their names in the file, memory-mapped one by one. Those of quantized types are
    their bytes, [..., bytes of a row]."""

    def __init__(self, files: Mapping[str, Path], infos: Mapping[str, TensorInfo], architecture: str) -> None:
        self.infos, self.architecture = infos, architecture
        self._files = files

    def names(self) -> list[str]:
        return list(self.infos)

    def tensor(self, name: str) -> Tensor:
        info, file = self.infos[name], self._files[name]
        try:
            raw = np.memmap(file, np.uint8, "c", info.offset, (*info.shape[:-1], info.row_bytes))
        except (OSError, ValueError) as error:  # the file has changed since
            raise CheckpointError(f"The tensor {name!r} of {file} cannot be read: {error}.") from error
        tensor = torch.from_numpy(raw)
        return tensor.view(PLAIN[info.type.name]) if info.type.name in PLAIN else tensor


class Place(NamedTuple):
    """A tensor of a file, or the rows of one of its ``parts`` of an expert in a stack."""

    name: str
    expert: int | None = None
    part: int = 0
    parts: int = 1


class GGUFFormat:
    """A WeightFormatProtocol: the tensors by the hub's names, as the hub's models have them."""

    def __init__(self, given: Mapping[str, Any], files: TensorFilesProtocol) -> None:
        # isinstance would not see what Outlines finds by __getattr__.
        if not all(hasattr(files, name) for name in ("infos", "architecture")):
            raise CheckpointError("config.json: quant_method is 'gguf', which only files that end in .gguf have.")
        self._files = blocks = cast(BlocksProtocol, files)
        self._head_size = given["head_dim"]
        delta = blocks.architecture in names.DELTA
        self._delta = names.DeltaHeads(*(given[f"linear_{key}"] for key in DELTA_SIZES)) if delta else None
        latent = blocks.architecture in names.LATENT
        self._latent = LatentHeads(*(given[key] for key in LATENT_SIZES)) if latent else None
        self._names: dict[str, list[Place]] = {}
        """For each of the hub's tensors, what it consists of."""
        count = given.get("num_experts") or given.get("num_local_experts") or 0
        layers = given["num_hidden_layers"]
        beyond = range(layers, layers + given.get("num_nextn_predict_layers", 0))
        for name in sorted(blocks.names(), key=lambda name: any(part in name for part in names.SECOND)):
            if name in FACTORS or names.layer_of(name) in beyond:
                continue
            if not (experts := names.expert_names(blocks.architecture, name)):
                hub = names.hub_name(blocks.architecture, name)
                held = self._held(hub, layers)
                held.append(Place(name))
                if len(held) > 1 + hub.endswith(names.PAIRS):
                    raise CheckpointError("The checkpoint holds a tensor under two names.")
                continue
            if len(shape := blocks.infos[name].shape) < 2 or shape[0] != count:
                raise CheckpointError(f"The tensor {name!r} has shape {list(shape)}, but there are {count} experts.")
            if shape[1] % len(experts):
                raise CheckpointError(
                    f"The tensor {name!r} has shape {list(shape)}; its rows have to be as many gates as ups."
                )
            for index, (part, expert) in itertools.product(range(count), enumerate(experts)):
                self._held(expert(index), layers).append(Place(name, index, part, len(experts)))

    def _held(self, hub: str, layers: int) -> list[Place]:
        drafts = self._files.architecture in names.DRAFTING
        return self._names.setdefault(names.drafting_name(hub, layers) if drafts else hub, [])

    def names(self) -> list[str]:
        return list(self._names)

    def weight(self, name: str) -> Weight:
        parts = [self._part(place) for place in self._names[name]]
        if len(parts) == 1:
            return parts[0]
        rows = torch.arange(sum(len(part) if isinstance(part, Tensor) else part.shape[0] for part in parts))
        order_N = rows
        if self._delta is not None and name.endswith(names.QKVZ):
            order_N = self._delta.interleaved(len(rows))
        elif self._latent is not None and name.endswith(names.KV_B):
            order_N = names.by_head([part.shape[0] for part in parts], self._latent.heads)
        elif names.MIXTURES[self._files.architecture].interleaved:
            order_N = rows.view(len(parts), -1).t().flatten()
        grouped = [part for part in parts if isinstance(part, GroupedWeight)]
        if len(grouped) == len(parts) and all(map(grouped[0].stacks_with, grouped)):
            return GroupedWeight.stack(grouped).rows(order_N)
        return joined([part.dequantize() if isinstance(part, GroupedWeight) else part for part in parts])[order_N]

    def _part(self, place: Place) -> Weight:
        own, architecture = place.name, self._files.architecture
        info, raw = self._files.infos[own], self._files.tensor(own)
        if place.expert is not None:
            rows = info.shape[1] // place.parts
            info = replace(info, shape=(rows, *info.shape[2:]))
            raw = raw[place.expert].narrow(0, place.part * rows, rows)
        if self._latent is not None and (part := self._latent.rows(own, info, raw)) is not None:
            return part
        weight = weight_of(own, info, raw)
        if architecture in names.TURNED and own.split(".")[-2] in ("attn_q", "attn_k"):
            order_N = names.row_order(weight.shape[0], self._head_size)
            return weight.rows(order_N) if isinstance(weight, GroupedWeight) else weight[order_N]
        if architecture in UNIT_OFFSET and own.endswith("norm.weight") and isinstance(weight, Tensor):
            # GGUF adds the 1 that the model adds, too.
            return weight if own.endswith("ssm_norm.weight") else weight.float() - 1
        if self._delta is not None and architecture in names.TILED:
            weight = self._delta.grouped(own, weight)
        return names.hub_tensor(own, weight)
