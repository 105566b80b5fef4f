"""Finding a checkpoint by what a user calls it."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from infer.checkpoint.hub import download
from infer.errors import CheckpointError

FOLDER = "/"
"""Stands for a folder among the endings of files' names."""
PART = re.compile(r"(.*-)\d{5}(-of-\d{5})")
"""The name of a file that is one of several parts, without its ending."""


def ending(path: Path) -> str:
    """The ending of a file's name, by which its container is found; ``FOLDER`` for a folder."""
    return FOLDER if path.is_dir() else path.suffix.lower() or path.name


def locate(
    path: str,
    *,
    bundled: Mapping[str, Path],
    suffixes: Sequence[str],
    tokenizers: Sequence[str] = (),
    revision: str | None = None,
    outlines: Path | None = None,
) -> Path:
    """The folder or file that holds a checkpoint. ``path`` is one that exists, else a bundled name, else a hub id,
    which is found in the hub's cache or downloaded at ``revision``, into the folder ``outlines`` without the weights'
    values if it is given. A folder without safetensors stands
    for the file in it that ends in one of the ``suffixes``. ``tokenizers`` are the names of files that may be there in
    place of tokenizer.json. Raises CheckpointError."""
    suffixes = [suffix for suffix in suffixes if suffix != FOLDER]
    place = Path(os.path.expanduser(path))
    try:
        if not place.exists():
            if path not in bundled:
                return _within(download(path, bundled, suffixes, tokenizers, revision, outlines), suffixes)
            place = bundled[path]
        if revision is not None:
            raise CheckpointError(f"A revision ({revision!r}) can be chosen of a hub id only, and {path!r} is {place}.")
        return _within(place, suffixes)
    except OSError as error:  # a folder that this process may not enter, a name that is too long
        raise CheckpointError(f"{path!r} cannot be read: {error.strerror}.") from error


def parts(file: Path) -> list[Path]:
    """All files of a checkpoint that is kept in several, of which ``file`` is one: a-00001-of-00003.gguf and so on."""
    name = PART.fullmatch(file.stem)
    return sorted(file.parent.glob(f"{glob.escape(name[1])}?????{name[2]}{file.suffix}")) if name else [file]


def _within(place: Path, suffixes: Sequence[str]) -> Path:
    """``place``, or the file for which it stands."""
    if not place.is_dir() or any(place.glob("*.safetensors")):
        return place
    files = sorted(file for file in place.iterdir() if ending(file) in suffixes and not file.is_dir())
    files = [file for file in files if file == parts(file)[0]]
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3]) + (", …" if len(files) > 3 else "")
        raise CheckpointError(
            f"{place} holds {len(files)} files of weights ({names}); add the name of one to model.path."
        )
    return files[0] if files else place
