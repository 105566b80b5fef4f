"""Packed weights that outlive the process: a file of them is mapped at the next start, so that no weight is read from
the checkpoint, quantized and packed again."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import mmap
import os
import re
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from infer.errors import CheckpointError, InferError

log = logging.getLogger(__name__)

LEAST = 64 << 20
"""Fewer bytes are packed sooner than they are found."""
ALIGNED = 64
"""Weights begin at multiples of this; kernels read them by cache lines."""
PAGE = 4096
"""The first weight begins at a multiple of this in the file."""
PIECE = 16 << 20
"""Bytes that are written at a time."""
THREADS = 4
"""How many weights are checked at a time."""
THREAD = "packed weights"
MOST_HEADER = 64 << 20
SUFFIX, VERDICT, COMPARED, UNFINISHED = ".safetensors", ".verdict.json", ".compared.json", ".unfinished"
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Another text after each start of the system; not there on every system."""


class Packing:
    """A PackedMemory that has nothing yet, and remembers what is packed."""

    def __init__(self) -> None:
        self.weights: list[memoryview] = []

    def find(self, nbytes: int) -> memoryview | None:
        return None

    def add(self, weight: memoryview) -> None:
        self.weights.append(weight)


class PackedFile:
    """A PackedMemory of a file. Nobody writes to it, and its pages are shared with other processes."""

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        """Raises CheckpointError if it is damaged or of other weights. The system finds its pages in a thread of their
        own: a start has other things to do meanwhile, and the first pass would stop at each piece of a few pages."""
        with path.open("rb") as file:
            state = _state(file.fileno())
            size = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(min(size, MOST_HEADER)))
                about = header.pop("__metadata__")
                there, checks = json.loads(about["identity"]), json.loads(about["crc32"])
                spans = [[*map(int, header[str(i)]["data_offsets"])] for i in range(len(checks))]
                begin = 8 + size
                end = begin + max((end for _, end in spans), default=0)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"its header is damaged ({error!r})") from None
            if there != identity:
                raise CheckpointError("it is of other weights")
            if os.fstat(file.fileno()).st_size != end:
                raise CheckpointError(f"it has {os.fstat(file.fileno()).st_size} bytes instead of {end}")
            self._memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        self.nbytes = end
        self._weights = [self._memory[begin + a : begin + b] for a, b in spans]
        self._compare(_Compared(path.with_suffix(COMPARED)), state, checks)
        self._coming = iter(self._weights)
        """Those that have not been asked for."""
        threading.Thread(target=self._map_pages, name=THREAD, daemon=True).start()

    def _compare(self, before: _Compared, state: Mapping[str, object], checks: Sequence[int]) -> None:
        """Compare the bytes with their checksums, unless that was done ``before``. Since then nobody has written to the
        file. A fault of the disk would be as new to a process that has it mapped all the time."""
        if before.covers(state):
            before.use()
            return
        with ThreadPoolExecutor(THREADS) as checkers:
            if [*checkers.map(zlib.crc32, self._weights)] != checks:
                raise CheckpointError("its bytes are not those that were written")
        before.write(state)

    def find(self, nbytes: int) -> memoryview | None:
        weight = next(self._coming, None)
        if weight is None or len(weight) != _padded(nbytes):
            raise CheckpointError("its weights are not those that the model has")
        return weight[:nbytes]

    def add(self, weight: memoryview) -> None:
        raise AssertionError("a file has all weights")

    def finish(self) -> None:
        """Raise CheckpointError if there are more weights than the model has."""
        if next(self._coming, None) is not None:
            raise CheckpointError("it has more weights than the model")

    def _map_pages(self) -> None:
        np.frombuffer(self._memory, np.uint8)[::PAGE].max()


class KeptWeights:
    """The file of an engine's packed weights in a folder that has those of others, too, or a place for it."""

    def __init__(self, folder: Path, most: int, identity: Mapping[str, str]) -> None:
        """All files together have at most ``most`` bytes. ``identity`` is what the bytes of the packed weights depend
        on."""
        self._folder, self._most, self._identity = folder, most, dict(identity)
        self.path = folder / f"{_digest(self._identity)}{SUFFIX}"
        self.mapped = 0
        """Bytes of the file that an engine computes with. They take memory, though the system counts them as free."""
        self.kept = False
        """Whether the weights are in the file, or on their way there."""
        self._file: PackedFile | None = None
        self._leaving = threading.Event()
        self.written = threading.Event()
        """Set once nothing is to be written any more."""

    def open(self) -> PackedFile | None:
        """The file, or None if there is none. It is opened once; one that is of no use is dropped."""
        if self._file is not None:
            return self._file
        try:
            file = PackedFile(self.path, self._identity)
        except FileNotFoundError:
            return None
        except (OSError, CheckpointError) as error:
            self.drop(f"it cannot be read ({error.strerror})" if isinstance(error, OSError) else error)
            return None
        self._file, self.mapped, self.kept = file, file.nbytes, True
        self.written.set()
        log.info("packed weights: mapped from %s", self.path)
        return file

    def drop(self, why: InferError | str) -> None:
        """Remove the file, which is of no use."""
        self._file, self.mapped, self.kept = None, 0, False
        self.written.clear()
        log.warning("packed weights: %s is dropped, and they are packed again: %s", self.path, why)
        with suppress(OSError):  # which ``keep`` will meet again
            _remove(self.path)

    def worth(self, nbytes: int) -> bool:
        """Whether so much is kept: little is packed sooner than it is found, and more than the folder may have is not
        written."""
        return LEAST <= nbytes <= self._most

    def keep(self, weights: Sequence[memoryview]) -> None:
        """Write them to the file, in a thread of its own; ``weights`` do not change any more. What keeps them from
        being written goes to the log."""
        if sum(map(len, weights)) < LEAST:
            self.written.set()
            return
        self.kept = True
        thread = threading.Thread(target=self._keep, args=(weights,), name=THREAD, daemon=True)
        thread.start()

        def leave() -> None:
            """The process ends: it does not wait for the disk, and leaves no half of a file."""
            self._leaving.set()
            thread.join()

        atexit.register(leave)

    def verdict(self, of: Mapping[str, object]) -> KeptVerdict | None:
        """The verdict of a check of such an engine; None if its weights are not kept."""
        return KeptVerdict(self._folder / f"{self.path.stem}.{_digest(of)}{VERDICT}") if self.kept else None

    def _keep(self, weights: Sequence[memoryview]) -> None:
        unfinished = self.path.with_suffix(f".{os.getpid()}{UNFINISHED}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            head, nbytes = self._head(weights), sum(_padded(len(weight)) for weight in weights)
            if (why := self._make_room(len(head) + nbytes)) is not None:
                log.info("packed weights are not kept: %s", why)
                return
            unfinished.unlink(missing_ok=True)
            with open(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                for piece in _pieces([memoryview(head), *weights]):
                    if self._leaving.is_set():
                        return
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())  # it fails where the disk has not taken all
            unfinished.rename(self.path)
            log.info("packed weights: %.1f MiB kept in %s", nbytes / 2**20, self.path)
        except OSError as error:
            log.warning("packed weights cannot be kept in %s: %s", self._folder, error.strerror)
        finally:
            unfinished.unlink(missing_ok=True)
            self.written.set()

    def _head(self, weights: Sequence[memoryview]) -> bytes:
        """The file up to the first weight, as safetensors has it."""
        header: dict[str, Any] = {}
        checks, begin = [], 0
        for i, weight in enumerate(weights):
            end = begin + _padded(len(weight))
            header[str(i)] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
            checks.append(zlib.crc32(bytes(end - begin - len(weight)), zlib.crc32(weight)))
            begin = end
        header["__metadata__"] = {"identity": json.dumps(self._identity), "crc32": json.dumps(checks)}
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % PAGE)
        return len(text).to_bytes(8, "little") + text

    def _make_room(self, nbytes: int) -> str | None:
        """Drop what killed processes have left, and the files that have not been used for longest, until there is room.
        Returns why there is none."""
        for file in self._folder.glob(f"*{UNFINISHED}"):
            found = re.search(r"\.(\d+)$", file.stem)
            if found and not psutil.pid_exists(int(found[1])):
                file.unlink(missing_ok=True)
        if nbytes > self._most:
            return f"they are {nbytes / 2**30:.1f} GiB, and model.weight_cache_gib is {self._most / 2**30:g}"
        files = sorted((file for file in self._folder.glob(f"*{SUFFIX}")), key=_last_used)
        left = self._most - nbytes - sum(file.stat().st_size for file in files)
        while left < 0:
            left += files[0].stat().st_size
            _remove(files.pop(0))
        stats = os.statvfs(self._folder)
        if (free := stats.f_bavail * stats.f_frsize) < 2 * nbytes:
            return f"they are {nbytes / 2**30:.1f} GiB, and the disk has {free / 2**30:.1f} free"
        return None


class KeptVerdict:
    """What a check of exactness has found, in a file beside the weights."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[str] | None:
        """The faults that were found; None if it is not known."""
        try:
            found = json.loads(self._path.read_bytes())["faults"]
            return [str(fault) for fault in found]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, faults: Sequence[str]) -> None:
        _write(self._path, {"faults": list(faults)}, "the verdict on exactness")


class _Compared:
    """That a file of weights was compared with its checksums, noted beside it. The note's date says when the weights
    were last used."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def covers(self, state: Mapping[str, object]) -> bool:
        try:
            return state["boot"] is not None and bool(json.loads(self._path.read_bytes()) == state)
        except (OSError, ValueError):
            return False

    def use(self) -> None:
        with suppress(OSError):  # a folder that cannot be written to, or a note that has just gone
            os.utime(self._path)

    def write(self, state: Mapping[str, object]) -> None:
        _write(self._path, state, "that packed weights were compared")


def weights_folder() -> Path:
    """Beside what the hub's own library keeps of downloads."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "infer-weights"


def _state(file: int) -> dict[str, object]:
    """What is something else once somebody has written to the file, or the system has started again, and reads it from
    the disk again."""
    stat = os.fstat(file)
    try:
        boot = BOOT.read_text().strip()
    except OSError:
        boot = None
    return {"boot": boot, "place": [stat.st_dev, stat.st_ino], "times": [stat.st_mtime_ns, stat.st_ctime_ns]}


def _last_used(path: Path) -> float:
    """When a file of weights was written or used, whichever was later."""
    compared = path.with_suffix(COMPARED)
    times = [0.0]
    for file in (path, compared):
        with suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(times)


def _write(path: Path, value: Mapping[str, object], what: str) -> None:
    """Write a small file as a whole, or say in the log why not."""
    unfinished = path.with_suffix(f".{os.getpid()}{UNFINISHED}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(value))
        unfinished.rename(path)
    except OSError as error:
        log.warning("%s cannot be kept in %s: %s", what, path.parent, error.strerror)


def _remove(path: Path) -> None:
    """A file of weights, its verdicts, and that it was compared."""
    for beside in (*path.parent.glob(f"{path.stem}.*{VERDICT}"), path.with_suffix(COMPARED)):
        beside.unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _digest(of: Mapping[str, object]) -> str:
    return hashlib.blake2b(json.dumps(of, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def _pieces(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    """All bytes of the file, with each part padded."""
    for part in parts:
        for begin in range(0, len(part), PIECE):
            yield part[begin : begin + PIECE]
        if rest := _padded(len(part)) - len(part):
            yield memoryview(bytes(rest))
