"""The hub's own form of a checkpoint: config.json, safetensors and tokenizer.json in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.checkpoint.files import read_json, read_text, regular
from infer.checkpoint.tensors import TensorFiles, tensor_files
from infer.errors import CheckpointError

TEMPLATES = "additional_chat_templates"
"""The folder of further chat templates, each a file by the template's name."""


@dataclass(frozen=True)
class Folder:
    """A ContainerProtocol. Every fault in its files raises a CheckpointError that names the file."""

    path: Path

    def config(self) -> dict[str, Any]:
        return read_json(self.path, "config.json")

    def generation_config(self) -> dict[str, Any]:
        return self._optional("generation_config.json")

    def tokenizer_config(self) -> dict[str, Any]:
        """With the chat templates that have files of their own, and the special tokens of special_tokens_map.json
        where old files have them there."""
        config = self._optional("tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            config |= self._optional("special_tokens_map.json")
        files = {"default": self.path / "chat_template.jinja"}
        files |= {file.stem: file for file in sorted(self.path.glob(f"{TEMPLATES}/*.jinja"))}
        named = [{"name": name, "template": read_text(file)} for name, file in files.items() if file.is_file()]
        return config | {"chat_template": named} if named else config

    def tokenizer(self) -> bytes:
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{self.path} has no tokenizer.json, and no other that an installed plugin reads; infer-formats reads "
                "tekken.json and tiktoken.model."
            )
        try:
            return regular(file).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error

    def tensors(self) -> TensorFiles:
        return tensor_files(self.path)

    def _optional(self, name: str) -> dict[str, Any]:
        return read_json(self.path, name) if (self.path / name).exists() else {}
