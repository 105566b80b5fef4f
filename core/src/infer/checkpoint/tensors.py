"""A checkpoint's tensors: memory-mapped from safetensors, or random for benchmarks. Nothing is ever unpickled."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infer.checkpoint.files import INDEX, regular, shards
from infer.contracts.weights import TensorFilesProtocol, WeightFormatProtocol
from infer.errors import CheckpointError, InferError
from infer.weight import Weight

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""By safetensors' names: those of most tensors."""
DUMMY_STD = 0.02
DUMMY_PERIOD = 1_048_573
"""How many values are drawn once and then repeated through all dummy weights. A prime, so that rows of a matrix
differ."""
MAX_HEADER = 16 << 20
"""Bytes of a file's header, which has about a hundred for each tensor: the largest published checkpoints have 140,000
tensors, in many files. To read a longer one takes seconds."""
MAPPED = 32 << 20
"""A file is mapped anew once so many bytes of it have been read, because these count as this process's memory as long
as it is mapped."""


class TensorFiles:
    """A checkpoint's memory-mapped tensors, by name. Each is a view of its file: a caller that keeps it has to copy it.
    Reading them in the order of ``names`` is fastest."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._opened: tuple[Path, Any] | None = None
        self._read = 0

    def names(self) -> list[str]:
        return list(self._files)

    def tensor(self, name: str) -> Tensor:
        tensor = self._view(name)
        self._read += tensor.nbytes
        if self._read >= MAPPED:
            self._opened = None  # the file stays mapped only as long as its tensors live
        return tensor

    def outline(self, name: str) -> Tensor:
        """The tensor without values, on torch's meta device. None of its bytes are read."""
        with self._opening(name) as file:
            about = file.get_slice(name)
            if (dtype := DTYPES.get(about.get_dtype())) is not None:
                return torch.empty(about.get_shape(), dtype=dtype, device="meta")  # ten times as fast as a view
        return self._view(name).to("meta")

    def _view(self, name: str) -> Tensor:
        with self._opening(name) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    @contextmanager
    def _opening(self, name: str) -> Iterator[Any]:
        """The opened file that has the tensor. Raises CheckpointError for whatever keeps the tensor from being read."""
        file = self._files[name]
        if self._opened is None or self._opened[0] != file:
            self._opened = None  # unmap this file before the next is mapped
            self._opened, self._read = (file, _open(file)), 0
        try:
            yield self._opened[1]
        except Exception as error:  # the library raises no error of its own for types that torch lacks
            raise CheckpointError(f"The tensor {name!r} of {file} cannot be read: {error}.") from error


@dataclass(frozen=True)
class PlainFormat:
    """A WeightFormatProtocol in which every tensor of the checkpoint is a weight of the same name."""

    files: TensorFilesProtocol

    def names(self) -> Iterable[str]:
        return self.files.names()

    def weight(self, name: str) -> Weight:
        return self.files.tensor(name)


def tensor_files(folder: Path) -> TensorFiles:
    """The tensors of a folder. Opens all files and compares their tensors' names with the index; raises
    CheckpointError."""
    files = shards(folder)
    listed = set().union(*(names or () for names in files.values()))
    held: dict[str, list[str]] = {}
    for file, names in files.items():
        with _open(folder / file) as shard:
            held[file] = list(shard.keys())
        if names is None:
            continue
        if lacking := sorted(names - set(held[file])):
            raise CheckpointError(f"{folder / file} lacks {lacking[0]!r}, which {INDEX} lists.")
        if extra := sorted(set(held[file]) - names):
            raise CheckpointError(
                f"{folder / file} holds {extra[0]!r}, which {INDEX} "
                f"{'puts in another file' if extra[0] in listed else 'does not list'}."
            )
    places = {file: folder / file for file in held}
    return TensorFiles({name: places[file] for file, names in held.items() for name in names})


class Outlines:
    """A TensorFilesProtocol of the same tensors without values, on torch's meta device: nothing of them is read.

    A weight format may have to know some values, such as zero points, to tell a weight's form: ``weight`` gives it
    those of the weight's smaller tensors, and of the largest if it needs that, too."""

    def __init__(self, files: TensorFilesProtocol) -> None:
        self._files = files
        self._asked: dict[str, int] = {}
        """The tensors that the weight at hand consists of, and their bytes."""
        self._real: set[str] = set()
        """Those of them that are given with their values."""

    def __getattr__(self, name: str) -> Any:
        """What else a container's files have for a format of their own."""
        return getattr(self._files, name)

    def names(self) -> Iterable[str]:
        return self._files.names()

    def tensor(self, name: str) -> Tensor:
        real, files = name in self._real, self._files
        tensor = files.outline(name) if isinstance(files, TensorFiles) and not real else files.tensor(name)
        self._asked[name] = tensor.nbytes
        return tensor if real else tensor.to("meta")

    def weight(self, name: str, format: WeightFormatProtocol) -> Weight:
        """The weight of that name, on the meta device. ``format`` has to have been made of these outlines. Raises
        CheckpointError."""
        self._asked, self._real = {}, set()
        while True:
            try:
                weight = format.weight(name)
                break
            except InferError:
                raise
            except Exception:  # torch has several errors for values that are not there
                largest = max(self._asked, key=lambda each: self._asked[each], default=None)
                more = self._asked.keys() - self._real
                if not more:
                    raise
                self._real |= more - {largest} or more
        return weight.to("meta") if isinstance(weight, Tensor) else weight.to(torch.device("meta"), weight.dtype)


def dummy_tensors(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Random weights: ones for norms, N(0, DUMMY_STD) elsewhere. The values depend only on names and shapes."""
    generator = torch.Generator().manual_seed(0)
    period = (torch.randn(DUMMY_PERIOD, generator=generator) * DUMMY_STD).to(dtype)
    for name, shape in shapes.items():
        if len(shape) == 1 and not name.endswith(".bias"):
            yield name, torch.ones(shape, dtype=dtype)
            continue
        numel = torch.Size(shape).numel()
        values = period.roll(zlib.crc32(name.encode()) % DUMMY_PERIOD)
        yield name, values.repeat(-(-numel // DUMMY_PERIOD))[:numel].view(shape)


def _open(file: Path) -> Any:
    try:
        size = regular(file).stat().st_size
        with file.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
        if MAX_HEADER < header < size:  # whatever else may be wrong with it, the library finds
            raise CheckpointError(
                f"{file} has a header of {header} bytes; infer reads headers of {MAX_HEADER} at most."
            )
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing, though {INDEX} lists it.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error
    except SafetensorError as error:
        with file.open("rb") as stream:
            pointer = stream.read(8) == b"version "
        why = "it is a Git LFS pointer, not the file itself" if pointer else str(error)
        raise CheckpointError(f"{file} is incomplete or damaged: {why}.") from error
