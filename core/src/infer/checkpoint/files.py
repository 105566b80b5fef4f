"""Reading a checkpoint's small files, text and JSON. Every fault raises a CheckpointError that names the file."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from infer.errors import CheckpointError, installing

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf")
MAX_NAME = 255
"""Bytes of a file's name that systems allow."""


def names_file(text: str) -> bool:
    """Whether a text is the name of a file that can lie in a folder."""
    plain = text.isprintable() and len(text.encode()) <= MAX_NAME
    return plain and Path(text).name == text and text not in ("", "..")


def regular(file: Path) -> Path:
    """Return ``file``. Raises CheckpointError if it is a pipe or a device, since reading it might never end, and
    FileNotFoundError if it does not exist. A directory passes: opening it raises an error of its own."""
    mode = file.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise CheckpointError(f"{file} is not a regular file.")
    return file


def read_text(file: Path) -> str:
    try:
        return regular(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error


def read_json(folder: Path, name: str) -> dict[str, Any]:
    file = folder / name
    try:
        value = json.loads(regular(file).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {name}, so it is not a checkpoint.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a JSON {type(value).__name__} instead of an object.")
    return value


def shards(folder: Path) -> dict[str, set[str] | None]:
    """The names of a folder's safetensors files, be they there or not, each with the names of tensors that the index
    lists for it; None if there is no index. Raises CheckpointError."""
    if (folder / SINGLE).exists():
        return {SINGLE: None}
    if not (folder / INDEX).exists():
        others = sorted(f.name for f in folder.iterdir() if f.suffix in OTHER_FORMATS)
        but = f"; it has {others[0]}, but infer reads safetensors only" if others else ""
        but += f", and GGUF by {installing('infer-formats')}" if others[:1] and others[0].endswith(".gguf") else ""
        raise CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}{but}.")
    weight_map = read_json(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX} has no weight_map.")
    files: dict[str, set[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not names_file(file):
            raise CheckpointError(f"{folder / INDEX} puts {name!r} in {file!r}, which is not a file's name.")
        names = files.setdefault(file, set())
        assert names is not None
        names.add(name)
    return files
