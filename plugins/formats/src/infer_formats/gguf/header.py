"""The header of a GGUF file: its settings, and what tensors it holds and where.

Everything here may have been made up by a stranger. A number of the header is compared with the file's size, or with a
limit, before anything is allocated or repeated by it. (The ``gguf`` package's reader does neither, and takes seconds
for a vocabulary.) Every fault raises a CheckpointError of one sentence.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infer.errors import CheckpointError

VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16
"""Of settings, and of tensors; the largest published models have a few thousand."""
MAX_VALUES = 1 << 22
"""In an array; the largest vocabularies have 300,000 tokens and twice as many merges."""
MAX_HEADER = 1 << 28
"""Bytes; a large vocabulary takes 20 MB."""
MAX_DIMENSIONS = 4
ALIGNMENT = "general.alignment"

SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
FLOAT32, STRING, ARRAY = 6, 8, 9
U32, U64 = SCALARS[4], SCALARS[10]


class BlockType(NamedTuple):
    """A type of tensor: so many neighboring values of a row in so many bytes."""

    name: str
    values: int
    nbytes: int


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
OTHER_TYPES = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}


@dataclass(frozen=True)
class TensorInfo:
    type: BlockType
    shape: tuple[int, ...]
    """Rows first, as torch counts; the file has it the other way round."""
    offset: int
    """In the file."""

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.values * self.type.nbytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class Header:
    metadata: Mapping[str, Any]
    """Numbers, truth values, texts, and lists of one of these."""
    tensors: Mapping[str, TensorInfo]
    """In the order in which they lie in the file."""


def read_header(path: Path) -> Header:
    try:
        size = path.stat().st_size
        if size < 24:
            raise CheckpointError(f"{path} is no GGUF file: it has {size} bytes.")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self) -> Header:
        if self._bytes(4) != b"GGUF":
            pointer = self._data[:8] == b"version "
            why = "it is a Git LFS pointer, not the file itself" if pointer else "it does not begin with 'GGUF'"
            raise CheckpointError(f"{self._path} is no GGUF file: {why}.")
        version = self._number(U32)
        if version not in VERSIONS:
            big = "it is big-endian" if version & 0xFFFF == 0 else f"it has version {version}"
            raise CheckpointError(f"{self._path}: {big}, but infer reads little-endian GGUF of the versions 2 and 3.")
        num_tensors, num_settings = self._number(U64), self._number(U64)
        for what, count in (("tensors", num_tensors), ("settings", num_settings)):
            if count > MAX_ENTRIES:
                raise self._damaged(f"it claims {count} {what}")
        metadata: dict[str, Any] = {}
        for _ in range(num_settings):
            key = self._text()
            if key in metadata:
                raise self._damaged(f"it has the setting {key!r} twice")
            metadata[key] = self._value(key, self._number(U32))
        found: dict[str, tuple[BlockType, tuple[int, ...], int]] = {}
        for _ in range(num_tensors):
            name = self._text()
            if name in found:
                raise self._damaged(f"it has the tensor {name!r} twice")
            found[name] = self._tensor(name)
        align = metadata.get(ALIGNMENT, 32)
        if type(align) is not int or not 8 <= align <= 1 << 20 or align & (align - 1):
            raise self._damaged(f"{ALIGNMENT} is {align!r}; it has to be a power of two from 8 to 1048576")
        begin = -(-self._at // align) * align
        tensors = {}
        for name, (kind, shape, offset) in sorted(found.items(), key=lambda item: item[1][2]):
            info = tensors[name] = TensorInfo(kind, shape, begin + offset)
            if offset % align:
                raise self._damaged(f"the tensor {name!r} is not aligned to {align} bytes")
            if info.offset + info.nbytes > len(self._data):
                raise self._damaged(
                    f"the tensor {name!r} ends at byte {info.offset + info.nbytes}, but the file has {len(self._data)}"
                )
        return Header(metadata, tensors)

    def _tensor(self, name: str) -> tuple[BlockType, tuple[int, ...], int]:
        """(type, shape, offset in the part of the file that holds the tensors)"""
        dimensions = self._number(U32)
        if not 0 < dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"the tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._number(U64) for _ in range(dimensions))[::-1]
        number, offset = self._number(U32), self._number(U64)
        kind = TYPES.get(number)
        if kind is None:
            raise CheckpointError(
                f"{self._path}: the tensor {name!r} is of type {OTHER_TYPES.get(number, number)}; infer reads "
                f"{', '.join(each.name for each in TYPES.values())}."
            )
        if not all(shape) or shape[-1] % kind.values:
            raise self._damaged(
                f"the tensor {name!r} has shape {list(shape)}, which {kind.name}, in blocks of {kind.values}, cannot"
            )
        return kind, shape, offset

    def _value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind != ARRAY:
            return self._scalar(key, kind)
        kind, count = self._number(U32), self._number(U64)
        if count > MAX_VALUES:
            raise self._damaged(f"{key} claims {count} values")
        if kind == STRING:
            return [self._text() for _ in range(count)]
        if kind not in SCALARS:
            raise self._damaged(f"{key} is an array of the unknown type {kind}")
        form = SCALARS[kind]
        return np.frombuffer(self._bytes(count * form.size), np.dtype(form.format)).tolist()

    def _scalar(self, key: str, kind: int) -> Any:
        if kind not in SCALARS:
            raise self._damaged(f"{key} is of the unknown type {kind}")
        value = self._number(SCALARS[kind])
        # 1e-6 is stored as 9.99999997e-07; the shortest number that is stored in this way is what was meant.
        return float(str(np.float32(value))) if kind == FLOAT32 else value

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._bytes(form.size))[0]

    def _text(self) -> str:
        at, raw = self._at, self._bytes(self._number(U64))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._damaged(f"the text at byte {at} is not UTF-8") from None

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > min(len(self._data), MAX_HEADER):
            raise self._damaged(
                f"its header goes on beyond the end of the file, at {len(self._data)} bytes"
                if end > len(self._data)
                else f"its header has more than {MAX_HEADER >> 20} MiB"
            )
        raw = self._data[self._at : end]
        self._at = end
        return raw

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is incomplete or damaged: {why}.")
