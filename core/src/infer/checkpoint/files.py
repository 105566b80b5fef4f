"""Reading a checkpoint's small files, text and JSON. Every fault raises a CheckpointError that names the file."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from infer.errors import CheckpointError

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
