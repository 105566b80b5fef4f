"""The hub's own form of a checkpoint: config.json, safetensors and tokenizer.json in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.checkpoint.files import read_json, read_text, regular
from infer.checkpoint.tensors import TensorFiles, tensor_files
from infer.errors import CheckpointError


@dataclass(frozen=True)
class Folder:
    """A ContainerProtocol. Every fault in its files raises a CheckpointError that names the file."""

    path: Path

    def config(self) -> dict[str, Any]:
        return read_json(self.path, "config.json")

    def generation_config(self) -> dict[str, Any]:
        return self._optional("generation_config.json")

    def tokenizer_config(self) -> dict[str, Any]:
        """With the chat template of chat_template.jinja, if there is this file."""
        config, file = self._optional("tokenizer_config.json"), self.path / "chat_template.jinja"
        return config | {"chat_template": read_text(file)} if file.is_file() else config

    def tokenizer(self) -> bytes:
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{self.path} has no tokenizer.json, the one tokenizer that infer reads.")
        try:
            return regular(file).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error

    def tensors(self) -> TensorFiles:
        return tensor_files(self.path)

    def _optional(self, name: str) -> dict[str, Any]:
        return read_json(self.path, name) if (self.path / name).exists() else {}
