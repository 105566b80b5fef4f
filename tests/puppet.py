"""A model that says what it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tests.serving import Running
from torch import Tensor

from infer import PLUGIN_API, hookimpl
from infer.contracts.model import ModelContext, ModelRegistration, Pass
from infer_layers import Decoder
from infer_models.llama import LlamaConfig, LlamaLayer


class Puppet(Decoder):
    """A model that says at each position what it has been told to say there."""

    said = torch.zeros(1 << 17, dtype=torch.int64)

    def forward(self, batch: Pass) -> Tensor:
        positions_N = batch.positions_T if batch.rows_N is None else batch.positions_T[batch.rows_N]
        return self.said[positions_N, None].float()

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden_ND[:, 0].long(), self.vocab_size) * 99.0


class Puppets:
    INFER_PLUGIN_API = PLUGIN_API

    @hookimpl
    def infer_models(self) -> list[ModelRegistration]:
        return [ModelRegistration("puppet", _make, "says what it is told", architectures=("Puppet",))]


def _make(config: Mapping[str, Any], context: ModelContext, settings: Any) -> Puppet:
    """In a process of its own, the model reads what it is told in the file that its config names."""
    if "said" in config:
        size = len(Puppet.said)
        Puppet.said = torch.from_file(config["said"], shared=True, size=size, dtype=torch.int64)
    return Puppet(config, context, LlamaConfig, LlamaLayer)


PUPPETS = Puppets()


async def say(server: Running, at: int, text: str) -> Sequence[int]:
    """Have the model answer a prompt of ``at`` tokens with ``text``. Returns the text's tokens."""
    _, answer, _ = await server.post({"prompt": text, "add_special_tokens": False}, "/tokenize")
    ids: list[int] = answer["tokens"]
    Puppet.said[at - 1 :][: len(ids)] = torch.tensor(ids)
    return ids
