"""A checkpoint: config.json and safetensors in one folder, found by its path, a bundled name or a hub id.

Nothing here knows a model family, and nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infer.errors import CheckpointError
from infer.request import SamplingParams

TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What generation_config.json may say of how to sample; the same names as in SamplingParams."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BUNDLED = {"demo": "infer-demo"}
"""Checkpoints that our own distributions bring."""
OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf")
MAX_LAYERS = 10_000
"""More is a damaged file: the deepest published models have some hundred, and each layer costs memory before a single
weight is read."""
DUMMY_STD = 0.02
DUMMY_PERIOD = 1_048_573
"""Values drawn once and repeated through all dummy weights: a prime, so that rows of a matrix differ."""

MAPPED = 32
"""Tensors for which a file is mapped at a time: what has been read of it counts as this process's memory."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Checkpoint:
    """What a folder says of itself. Every fault in it is a CheckpointError that names the file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = self._json("config.json")
        text = self.config.get("text_config")
        self._text: dict[str, Any] = text if isinstance(text, dict) else {}
        layers = self._field("num_hidden_layers")
        if layers is not None and not (_is_id(layers) and 0 < layers <= MAX_LAYERS):
            raise self._bad("num_hidden_layers", layers, f"an integer from 1 to {MAX_LAYERS}")

    @classmethod
    def locate(cls, path: str, *, bundled: Mapping[str, Path], revision: str | None = None) -> Checkpoint:
        """An existing folder, else a bundled name, else a hub id ``org/name``, downloaded at ``revision`` or
        found in the hub's cache."""
        folder = Path(os.path.expanduser(path))
        if not folder.is_dir():
            if folder.exists():
                raise CheckpointError(f"{path} is a file; give the folder that holds config.json and weights.")
            if path not in bundled:
                return cls(_download(path, bundled, revision))
            folder = bundled[path]
        if revision is not None:
            raise CheckpointError(
                f"A revision ({revision!r}) can be chosen of a hub id only, and {path!r} is {folder}."
            )
        return cls(folder)

    @property
    def architectures(self) -> tuple[str, ...]:
        """The names by which a model family is found; empty when config.json gives none."""
        names = self.config.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._bad("architectures", names, "a list of names")
        return tuple(names)

    @property
    def quant_method(self) -> str:
        """How the weights are quantised, by the hub's name; empty where they are not."""
        value = self._field("quantization_config")
        if value is None:
            return ""
        method = value.get("quant_method") if isinstance(value, dict) else None
        if not isinstance(method, str) or not method:
            raise self._bad("quantization_config", value, "a table with a quant_method")
        return method

    @property
    def dtype(self) -> torch.dtype:
        """The type the weights are kept in; float32 where config.json does not say."""
        name = self._field("dtype") or self._field("torch_dtype") or "float32"
        if not isinstance(name, str) or name not in DTYPES:
            raise self._bad("dtype", name, ", ".join(DTYPES))
        return DTYPES[name]

    @property
    def max_positions(self) -> int:
        """The longest sequence the model was made for; ``sys.maxsize`` where config.json does not say."""
        value = self._field("max_position_embeddings")
        if value is None:
            return sys.maxsize
        if not _is_id(value) or value < 2:
            raise self._bad("max_position_embeddings", value, "an integer of at least 2: a prompt and an answer")
        assert isinstance(value, int)
        return value

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that config.json or generation_config.json says ends an answer."""
        configs = [self.config, self._text, self._generation_config]
        found: set[int] = set()
        for value in (config.get("eos_token_id") for config in configs):
            ids = [] if value is None else value if isinstance(value, list) else [value]
            if not all(map(_is_id, ids)):
                raise self._bad("eos_token_id", value, "a token id or a list of them")
            found.update(ids)
        return frozenset(found)

    def check_ids(self, vocab_size: int) -> None:
        """Raises CheckpointError where a token that ends answers is none of the model's."""
        if beyond := [id for id in sorted(self.eos_token_ids) if id >= vocab_size]:
            raise CheckpointError(
                f"{self.folder}: eos_token_id, in config.json or generation_config.json, has {beyond[0]}, but the "
                f"model's token ids are 0 to {vocab_size - 1}; correct it there."
            )

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that generation_config.json gives, by name; ``do_sample: false`` is temperature 0."""
        config = self._generation_config
        found = {name: config[name] for name in SAMPLING if config.get(name) is not None}
        file = self.folder / GENERATION_CONFIG
        way_out = 'mend the file, or do without its values by model.generation_config = "none"'
        draws = config.get("do_sample")
        if not isinstance(draws, bool | None):
            raise CheckpointError(f"{file}: do_sample is {draws!r}; it has to be true or false: {way_out}.")
        try:
            SamplingParams.model_validate(found, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise CheckpointError(
                f"{file}: {first['loc'][0]} is {first['input']!r}: {first['msg']}; {way_out}."
            ) from None
        return found | ({"temperature": 0.0} if draws is False else {})

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of special tokens by role, ``bos_token`` and so on, as tokenizer_config.json gives them."""
        found = {}
        for role, value in self._tokenizer_config.items():
            if role.endswith("_token"):
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    found[role] = text
        return found

    @property
    def chat_template(self) -> str | None:
        """The Jinja source that makes messages a prompt, where the checkpoint has one."""
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return _read(file)
        value = self._tokenizer_config.get("chat_template")
        if isinstance(value, list):  # several by name
            named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
            value = named.get("default")
        if value is not None and not isinstance(value, str):
            raise CheckpointError(
                f"{self.folder / TOKENIZER_CONFIG}: chat_template is neither a text nor has a default."
            )
        return value

    @property
    def _tokenizer_config(self) -> dict[str, Any]:
        return self._json(TOKENIZER_CONFIG) if (self.folder / TOKENIZER_CONFIG).exists() else {}

    @property
    def _generation_config(self) -> dict[str, Any]:
        return self._json(GENERATION_CONFIG) if (self.folder / GENERATION_CONFIG).exists() else {}

    @property
    def tokenizer_file(self) -> Path:
        file = self.folder / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{self.folder} has no tokenizer.json, the one tokenizer that infer reads.")
        return file

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by name, in the order of the files."""
        files = self.files()
        for name in files.names():
            yield name, files.tensor(name)

    def files(self) -> TensorFiles:
        """The tensors, once all files have been opened and their names compared with the index."""
        files = self._shards()
        listed = set().union(*(names or () for names in files.values()))
        held: dict[str, list[str]] = {}
        for file, names in files.items():
            with _open(self.folder / file) as shard:
                held[file] = list(shard.keys())
            if names is None:
                continue
            if lacking := sorted(names - set(held[file])):
                raise CheckpointError(f"{self.folder / file} lacks {lacking[0]!r}, which {INDEX} lists.")
            if extra := sorted(set(held[file]) - names):
                raise CheckpointError(
                    f"{self.folder / file} holds {extra[0]!r}, which {INDEX} "
                    f"{'puts in another file' if extra[0] in listed else 'does not list'}."
                )
        return TensorFiles({name: self.folder / file for file, names in held.items() for name in names})

    def dummy_tensors(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Made-up weights: ones for norms, N(0, 0.02) elsewhere. Names and shapes decide the values."""
        generator = torch.Generator().manual_seed(0)
        period = (torch.randn(DUMMY_PERIOD, generator=generator) * DUMMY_STD).to(dtype)
        for name, shape in shapes.items():
            if len(shape) == 1 and not name.endswith(".bias"):
                yield name, torch.ones(shape, dtype=dtype)
                continue
            numel = torch.Size(shape).numel()
            values = period.roll(zlib.crc32(name.encode()) % DUMMY_PERIOD)
            yield name, values.repeat(-(-numel // DUMMY_PERIOD))[:numel].view(shape)

    def _shards(self) -> dict[str, set[str] | None]:
        """Files of tensors and the names the index lists for each; None when there is no index."""
        if (self.folder / SINGLE).exists():
            return {SINGLE: None}
        if not (self.folder / INDEX).exists():
            others = sorted(f.name for f in self.folder.iterdir() if f.suffix in OTHER_FORMATS)
            but = f"; it has {others[0]}, but infer reads safetensors only" if others else ""
            raise CheckpointError(f"{self.folder} has no {SINGLE} and no {INDEX}{but}.")
        weight_map = self._json(INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.folder / INDEX} has no weight_map.")
        shards: dict[str, set[str] | None] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
                raise CheckpointError(f"{self.folder / INDEX} puts {name!r} in {file!r}, which is not a file's name.")
            names = shards.setdefault(file, set())
            assert names is not None
            names.add(name)
        return shards

    def _field(self, key: str) -> Any:
        """A value of the text model, whether or not config.json describes other modalities too."""
        value = self._text.get(key)
        return self.config.get(key) if value is None else value

    def _bad(self, key: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.folder / 'config.json'}: {key} is {value!r}; it has to be {wanted}.")

    def _json(self, name: str) -> dict[str, Any]:
        file = self.folder / name
        try:
            value = json.loads(_regular(file).read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{self.folder} has no {name}, so it is not a checkpoint.") from None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} is not valid JSON: {error}.") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{file} holds a JSON {type(value).__name__} instead of an object.")
        return value


class TensorFiles:
    """A checkpoint's tensors by name, memory-mapped: each a view of its file, to be copied by whoever keeps it. Reading
    them in the order of ``names`` is fastest."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._opened: tuple[Path, Any] | None = None
        self._reads = 0

    def names(self) -> list[str]:
        return list(self._files)

    def tensor(self, name: str) -> Tensor:
        file = self._files[name]
        if self._opened is None or self._opened[0] != file or self._reads == MAPPED:
            self._opened = None  # before the next is mapped
            self._opened, self._reads = (file, _open(file)), 0
        self._reads += 1
        try:
            tensor: Tensor = self._opened[1].get_tensor(name)
        except Exception as error:  # the library has none of its own for types torch lacks
            raise CheckpointError(f"The tensor {name!r} of {file} cannot be read: {error}.") from error
        return tensor


def _regular(file: Path) -> Path:
    """The file, unless reading it might never end: a pipe waits for somebody who writes. (A directory is refused by
    whoever opens it.) Raises FileNotFoundError."""
    mode = file.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise CheckpointError(f"{file} is not a regular file.")
    return file


def _read(file: Path) -> str:
    try:
        return _regular(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _open(file: Path) -> Any:
    try:
        return safe_open(_regular(file), framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing, though {INDEX} lists it.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error
    except SafetensorError as error:
        with file.open("rb") as stream:
            pointer = stream.read(8) == b"version "
        why = "it is a Git LFS pointer, not the file itself" if pointer else str(error)
        raise CheckpointError(f"{file} is incomplete or damaged: {why}.") from error


def _download(path: str, bundled: Mapping[str, Path], revision: str | None) -> Path:
    """The folder of a hub id in the hub's cache, fetched if need be."""
    names = f" ({', '.join(sorted(bundled))})" if bundled else ""
    tried = f"{path!r} is neither a folder nor a bundled name{names}"
    if package := BUNDLED.get(path):
        raise CheckpointError(
            f"{path!r} is the checkpoint of {package}, which is not installed: pip install {package}."
        )
    if not _HUB_ID.fullmatch(path):
        raise CheckpointError(f"{tried}, and it cannot be a hub id, which reads org/name.")
    import huggingface_hub  # here, since it takes long to import and a local folder does not need it
    from huggingface_hub import errors

    where = path if revision is None else f"{path} at revision {revision}"
    try:
        # Weights lie at the top; subfolders and "consolidated" files hold other formats of the same.
        folder = huggingface_hub.snapshot_download(
            path,
            revision=revision,
            allow_patterns=["*.safetensors", "*.json", "*.jinja"],
            ignore_patterns=["*/*", "consolidated*"],
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{path} is gated: accept its terms at https://huggingface.co/{path} and set HF_TOKEN."
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise CheckpointError(f"{tried}, and the hub has no {where} that this HF_TOKEN may read.") from error
    except errors.LocalEntryNotFoundError as error:
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        raise CheckpointError(f"{tried}, and as a hub id it is not wholly in the cache and {why}.") from error
    except Exception as error:  # whatever the network, the disk or a proxy may answer
        raise CheckpointError(f"{where} cannot be downloaded: {' '.join(str(error).split())}") from error
    return Path(folder)
