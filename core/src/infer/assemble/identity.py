"""What the bits of K and V depend on, in words that are the same at every start: the content of the checkpoint, how it
is loaded, and who computes with it. Nothing is in there that may differ from start to start without a difference in
bits: sizes of batches and of the cache, threads, free memory."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from infer.checkpoint import Checkpoint
from infer.contracts.model import ModelContext
from infer.contracts.sections import Settings
from infer.errors import CheckpointError
from infer.plugins.discovery import Offer

PIECE = 16 << 20
"""Bytes of a checkpoint that are read and digested at a time, by each of ``READERS`` threads."""
READERS = 4
SAMPLES, SAMPLE = 64, 4096
"""About how many pieces of a checkpoint stand for all of it, and their bytes: few enough for a disk that turns."""
SAME_AT_ANY_LENGTH = {"default", "linear", "yarn", "llama3", "proportional", "mrope"}
"""Kinds of rope whose angles do not depend on how long sequences may be."""


def identity(
    settings: Settings, checkpoint: Checkpoint, context: ModelContext, chosen: Iterable[Offer]
) -> Mapping[str, str]:
    """All that K, V and states depend on besides their tokens. Reads the whole checkpoint. Raises CheckpointError."""
    made_up = settings.model.load_format == "dummy"
    parts = {"checkpoint": "dummy" if made_up else content(checkpoint.path)}
    parts |= _who(settings, checkpoint, context, chosen)
    if not rope_kinds(checkpoint.config) <= SAME_AT_ANY_LENGTH:
        parts["max_seq_len"] = str(context.max_seq_len)
    return parts


def packed_identity(
    settings: Settings, checkpoint: Checkpoint, context: ModelContext, chosen: Iterable[Offer], layout: str
) -> Mapping[str, str]:
    """All that the bytes of packed weights depend on; ``layout`` is the kernels'. Of the checkpoint's files, sizes,
    times and samples are looked at instead of all that is in them. Raises CheckpointError."""
    return {
        "checkpoint": stamp(checkpoint.path),
        "layout": layout,
        "parts": json.dumps([context.draft_head, context.adapter_slots > 0]),
        **_who(settings, checkpoint, context, chosen),
    }


def _who(settings: Settings, checkpoint: Checkpoint, context: ModelContext, chosen: Iterable[Offer]) -> dict[str, str]:
    """Who computes, and how the checkpoint is loaded."""
    model = settings.model
    parts = {
        "config": _digest(json.dumps(checkpoint.config, sort_keys=True, default=str).encode()),
        "dtype": str(context.dtype),
        "quantization": json.dumps([model.quantization, model.activations, sorted(map(str, model.plain_layers or ()))]),
        "device": _device(context.device),
        "software": f"infer-core {version('infer-core')}, torch {torch.__version__}",
    }
    for offer in chosen:
        own = offer.own(settings).model_dump_json()
        variant = re.split("[,:]", offer.about)[0]  # without why it runs
        parts[offer.point] = f"{offer.name} of {offer.distribution} {offer.version} {variant} {own}"
    return parts


def content(path: Path) -> str:
    """A digest of a checkpoint's tensors, wherever they are and whatever their files' dates say: of a file, or of
    a folder's safetensors or, if it has none, of all its files. Raises CheckpointError."""
    try:
        files = _files(path)
        sizes = [file.stat().st_size for file in files]
        pieces = [(file, begin) for file, size in zip(files, sizes, strict=True) for begin in range(0, size, PIECE)]
        with ThreadPoolExecutor(READERS) as readers:
            whole = b"".join(readers.map(_piece, pieces))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    return _digest(repr(sizes).encode() + whole)


def stamp(path: Path) -> str:
    """A digest of what the system says of a checkpoint's files, which is something else once one has been written, even
    if its date is set back, and of samples of them, for file systems that keep no date of their own. To read all would
    take longer than a start from packed weights. Raises CheckpointError."""
    try:
        files = _files(path)
        stats = [(file.name, file.resolve().name, file.stat().st_size, *_dates(file)) for file in files]
        number = max(2, SAMPLES // max(1, len(files)))
        samples = b"".join(piece for file in files for piece in _samples(file, number))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    return _digest(repr(stats).encode() + samples)


def _dates(file: Path) -> tuple[int, int]:
    """When its bytes were last written, and when anything about it last was."""
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_ctime_ns


def _samples(path: Path, number: int) -> Iterator[bytes]:
    """Pieces of a file at equal distances: its first bytes, its last ones, and between."""
    room = max(0, path.stat().st_size - SAMPLE)
    with path.open("rb") as file:
        for i in range(number):
            file.seek(i * room // (number - 1))
            yield file.read(SAMPLE)


def _files(path: Path) -> list[Path]:
    every = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [file for file in every if file.suffix == ".safetensors"] or every


def rope_kinds(config: Any) -> set[str]:
    """The kinds of rope that a configuration names, wherever it does."""

    def found(value: Any, inside: bool) -> Iterator[str]:
        if isinstance(value, Mapping):
            for key, each in value.items():
                if inside and key in ("rope_type", "type") and isinstance(each, str):
                    yield each
                yield from found(each, inside or "rope" in str(key))
        elif isinstance(value, list):
            for each in value:
                yield from found(each, inside)

    return {*found(config, False)}


def _piece(at: tuple[Path, int]) -> bytes:
    path, begin = at
    with path.open("rb") as file:
        file.seek(begin)
        return hashlib.blake2b(file.read(PIECE), digest_size=32).digest()


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()
