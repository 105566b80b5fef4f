"""A checkpoint: what its container's configuration says, checked.

Nothing here knows a model family, and nothing is ever unpickled.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from infer.checkpoint.files import read_json, read_text
from infer.checkpoint.locate import parts
from infer.contracts.params import SamplingParams
from infer.contracts.weights import ContainerProtocol
from infer.errors import CheckpointError, first_fault

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The sampling parameters that infer takes from generation_config.json; SamplingParams has the same names."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
POOLING = "1_Pooling/config.json"
"""Where sentence-transformers say how hidden states become an embedding."""
MAX_POSITIONS = 1 << 24
"""The most positions that a checkpoint may state. Models make tables of them; published ones state up to 10 million."""
POSITIONS = ("max_position_embeddings", "n_positions", "model_max_length")
"""The fields that say how many positions a model was made for; the others are GPT-2's and Kimi Linear's."""
MAX_LAYERS = 10_000
"""A file that asks for more layers is damaged: the deepest published models have about a hundred, and each layer takes
memory before a single weight is read."""


class Checkpoint:
    """What a container says, tensors and tokenizer aside. Every fault in it raises a CheckpointError that names the
    file."""

    def __init__(self, container: ContainerProtocol) -> None:
        self.container = container
        self.path = container.path
        self.config = container.config()
        text = self.config.get("text_config")
        self._text: dict[str, Any] = text if isinstance(text, dict) else {}
        layers = self._field("num_hidden_layers")
        if layers is not None and not (_is_id(layers) and 0 < layers <= MAX_LAYERS):
            raise self._bad("num_hidden_layers", layers, f"an integer from 1 to {MAX_LAYERS}")

    @property
    def architectures(self) -> tuple[str, ...]:
        """The architecture names, by which a model family is found; empty if config.json gives none."""
        names = self.config.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._bad("architectures", names, "a list of names")
        return tuple(names)

    @property
    def pooling(self) -> str:
        """What an embedding is made of, as sentence-transformers' files say: ``last`` or ``mean``; other ways, and
        further layers, by the names that they have there. ``last`` if there are none of its files."""
        file = self.path / "modules.json"
        if file.is_file():
            modules: list[str] = re.findall(r'"type"\s*:\s*"[^"]*\.(\w+)"', read_text(file))
            if more := [name for name in modules if name not in ("Transformer", "Pooling", "Normalize")]:
                return more[0]
        if not (self.path / POOLING).is_file():
            return "last"
        config = read_json(self.path, POOLING)
        ways = [key.removeprefix("pooling_mode_") for key, value in config.items() if value is True]
        name = str(config.get("pooling_mode") or "+".join(way for way in ways if way != "include_prompt"))
        return {"lasttoken": "last", "mean_tokens": "mean"}.get(name, name)

    @property
    def quant_method(self) -> str:
        """How the weights are quantized, by the hub's name of the method; empty if they are not quantized."""
        value = self._field("quantization_config")
        if value is None:
            return ""
        method = value.get("quant_method") if isinstance(value, dict) else None
        if not isinstance(method, str) or not method:
            raise self._bad("quantization_config", value, "a table with a quant_method")
        return method

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that config.json gives; float32 if it gives none."""
        name = self._field("dtype") or self._field("torch_dtype") or "float32"
        if not isinstance(name, str) or name not in DTYPES:
            raise self._bad("dtype", name, ", ".join(DTYPES))
        return DTYPES[name]

    @property
    def max_positions(self) -> int:
        """The longest sequence, in tokens, that the model was made for; ``sys.maxsize`` if config.json does not say."""
        name = next((name for name in POSITIONS if self._field(name) is not None), None)
        if name is None:
            return sys.maxsize
        value = self._field(name)
        if not _is_id(value) or not 2 <= value <= MAX_POSITIONS:
            raise self._bad(name, value, f"an integer from 2 (a prompt and an answer) to {MAX_POSITIONS}")
        assert isinstance(value, int)
        return value

    @property
    def hidden_size(self) -> int | None:
        """The size of the model's hidden states; None if config.json does not say."""
        value = self._field("hidden_size")
        return value if _is_id(value) else None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All end-of-sequence tokens that config.json and generation_config.json give."""
        configs = [self.config, self._text, self.container.generation_config()]
        eos: set[int] = set()
        for value in (config.get("eos_token_id") for config in configs):
            ids = [] if value is None else value if isinstance(value, list) else [value]
            if not all(map(_is_id, ids)):
                raise self._bad("eos_token_id", value, "a token id or a list of them")
            eos.update(ids)
        return frozenset(eos)

    def check_ids(self, vocab_size: int) -> None:
        """Raise CheckpointError if an end-of-sequence token is not in the model's vocabulary."""
        if beyond := [id for id in sorted(self.eos_token_ids) if id >= vocab_size]:
            raise CheckpointError(
                f"{self.path}: eos_token_id, in config.json or generation_config.json, has {beyond[0]}, but the "
                f"model's token ids are 0 to {vocab_size - 1}; correct it there."
            )

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that generation_config.json gives, by name. ``do_sample: false`` means temperature
        0."""
        config = self.container.generation_config()
        given = {name: config[name] for name in SAMPLING if config.get(name) is not None}
        file = self._place("generation_config.json")
        way_out = 'mend the file, or do without its values by model.generation_config = "none"'
        draws = config.get("do_sample")
        if not isinstance(draws, bool | None):
            raise CheckpointError(f"{file}: do_sample is {draws!r}; it has to be true or false: {way_out}.")
        try:
            SamplingParams.model_validate(given, strict=True)
        except ValidationError as error:
            fault = first_fault(error)
            raise CheckpointError(f"{file}: {fault.path[0]} is {fault.value!r}: {fault.text}; {way_out}.") from None
        return given | ({"temperature": 0.0} if draws is False else {})

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens' texts by role (``bos_token`` and so on), as tokenizer_config.json gives them."""
        tokens = {}
        for role, value in self.container.tokenizer_config().items():
            if role.endswith("_token"):
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    tokens[role] = text
        return tokens

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template; None if the checkpoint has none."""
        return self._template("default")

    @property
    def tool_template(self) -> str | None:
        """The Jinja source of the template for chats with tools, if they have one of their own."""
        return self._template("tool_use")

    def _template(self, name: str) -> str | None:
        value = self.container.tokenizer_config().get("chat_template")
        if isinstance(value, list):  # several by name
            value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}.get(name)
        elif name != "default":
            return None
        if value is not None and not isinstance(value, str):
            where = self._place("tokenizer_config.json")
            raise CheckpointError(f"{where}: chat_template is neither a text nor a list of texts by name.")
        return value

    @property
    def nbytes(self) -> int:
        """The bytes of the files that hold the weights."""
        files = self.path.glob("*.safetensors") if self.path.is_dir() else parts(self.path)
        return sum(file.stat().st_size for file in files)

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Errors of those who know config.json's fields, but not where these come from, say so."""
        try:
            yield
        except CheckpointError as error:
            place = str(self._place("config.json"))
            text = re.sub(r"(?<![\w./\\])config\.json\b", lambda _: place, str(error))
            raise CheckpointError(text) from error.__cause__

    def _place(self, file: str) -> Path:
        """Where a message says that a fault is: ``file`` of a folder, or the one file there is."""
        return self.path / file if self.path.is_dir() else self.path

    def _field(self, key: str) -> Any:
        """A field of the text model's config, which is nested in ``text_config`` if there are other modalities."""
        value = self._text.get(key)
        return self.config.get(key) if value is None else value

    def _bad(self, key: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self._place('config.json')}: {key} is {value!r}; it has to be {wanted}.")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
