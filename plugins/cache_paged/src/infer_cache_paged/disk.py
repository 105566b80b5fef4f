"""A tier in a folder: a file for each payload, which says itself what it is.

    FOLDER/lock                               held by the process that uses the folder
    FOLDER/GENERATION/NAME                    MAGIC, the head's length, head, payload, digest of all before
    FOLDER/GENERATION/.NAME                   while it is being written

There is no list of the files: whoever opens the folder looks what is there. A file is written under another name and
then renamed, so that a process that is killed leaves either all of it or nothing that counts. Whatever else may have
happened to a file, it is believed only if it has the right size, its digest, and the very head that was asked for."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infer.errors import SettingsError
from infer_cache_paged.tier import BlockKey, Payload

log = logging.getLogger(__name__)

MAGIC = b"infer-kv 1\n"
LENGTH = 4
"""Bytes of the number that says how long the head is."""
DIGEST = 32
"""Bytes of the digest."""
LOCK = "lock"
NAME = re.compile(r"([0-9a-f]{6})-[0-9a-f]{64}\.[0-9a-f]{1,5}")
"""The name of a file; the group is the block's index."""
GENERATION = re.compile(r"[0-9a-f]{32}")
FULL = 0.95
"""To what share of its limit a tier that is full is emptied: files are put in order only once for many of them."""
MOMENT_S = 60.0
"""Uses that are no more than this far apart, in seconds, count as one: the longest prefixes then go first, and a file's
time is written once for many uses."""


@dataclass(slots=True)
class Entry:
    """A file."""

    nbytes: int
    used: float
    """When it was used last, in seconds since 1970, to within MOMENT_S."""


class DiskTier:
    """A TierProtocol. All generations in the folder share ``limit`` bytes; ``head`` is what all heads of this one begin
    with. ``clock`` is in seconds since 1970. Raises SettingsError if the folder cannot be used."""

    def __init__(self, folder: Path, head: bytes, limit: int, *, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._head, self._limit, self._clock = folder, head, limit, clock
        self._generation = hashlib.blake2b(head, digest_size=16).hexdigest()
        self._own = folder / self._generation
        self._guard = threading.Lock()
        self._failing = False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            held = lock(folder)
            self._entries = dict(files(folder, tidy=True)) if held is not None else {}
            """All files, by GENERATION/NAME."""
            self._own.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise SettingsError(
                f"cache.paged.disk is {str(folder)!r}, which cannot be used: {error.strerror}; give a folder that can "
                "be written to, or leave it out."
            ) from error
        if held is None:
            raise SettingsError(
                f"cache.paged.disk is {str(folder)!r}, which another process uses; give each server a folder of its "
                "own."
            )
        self._let_go = weakref.finalize(self, os.close, held)
        self._taken = sum(entry.nbytes for entry in self._entries.values())
        self._make_room(0)
        log.info(
            "cache.paged.disk: %d blocks of this model in %s; %.2f of %.2f GiB are taken",
            *(len(self._names()), self._own, self._taken / 2**30, limit / 2**30),
        )

    def contains(self, name: str) -> bool:
        return f"{self._generation}/{name}" in self._entries

    def get(self, key: BlockKey) -> Payload | None:
        found = self._read(key.name, _size(key))
        if found is None or found[0] == key.head:
            return None if found is None else found[1]
        self._forget(key.name, "it is of other tokens or of another model")
        return None

    def put(self, key: BlockKey, payload: Payload) -> None:
        size = _size(key)
        if size > self._limit:
            return
        path, draft = self._own / key.name, self._own / f".{key.name}"
        start = MAGIC + len(key.head).to_bytes(LENGTH, "little") + key.head
        digest = hashlib.blake2b(start, digest_size=DIGEST)
        digest.update(payload)
        try:
            self._make_room(size)
            draft.unlink(missing_ok=True)
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                for part in (start, payload, digest.digest()):
                    file.write(part)
            draft.replace(path)
        except OSError as error:
            if not self._failing:
                log.warning("cache.paged.disk: nothing is kept for the time being: %s: %s", path, error.strerror)
            self._failing = True
            with suppress(OSError):  # the next start removes it
                draft.unlink(missing_ok=True)
            return
        self._failing = False
        with self._guard:
            self._entries[f"{self._generation}/{key.name}"] = Entry(size, self._clock())
            self._taken += size

    def touch(self, names: Iterable[str]) -> None:
        now = self._clock()
        for name in names:
            entry = self._entries.get(f"{self._generation}/{name}")
            if entry is not None and now - entry.used > MOMENT_S:
                entry.used = now
                with suppress(OSError):  # it is then found to be gone when it is read
                    os.utime(self._own / name, (now, now))

    def first(self) -> tuple[bytes, Payload] | None:
        for name in sorted(self._names()):
            found = self._read(name, self._entries[f"{self._generation}/{name}"].nbytes)
            if found is not None and found[0].startswith(self._head + b"\n"):
                return found
            if found is not None:
                self._forget(name, "it is of another model")
        return None

    def clear(self) -> None:
        for name in self._names():
            self._forget(name)

    def close(self) -> None:
        self._let_go()

    def _names(self) -> list[str]:
        """The files of this generation."""
        return [name.rpartition("/")[2] for name in self._entries if name.startswith(self._generation)]

    def _read(self, name: str, size: int) -> tuple[bytes, Payload] | None:
        """The head and payload of a file; None if it is not whole, and it is then forgotten."""
        try:
            return read(self._own / name, size)
        except ValueError as error:
            self._forget(name, str(error))
        except OSError as error:
            self._forget(name, error.strerror or "it cannot be read")
        return None

    def _forget(self, name: str, why: str = "") -> None:
        """Remove a file of this generation, and say why."""
        if why and self.contains(name):
            log.warning("cache.paged.disk: %s is removed: %s", self._own / name, why)
        self._remove(f"{self._generation}/{name}")

    def _remove(self, name: str) -> None:
        with self._guard:
            entry = self._entries.pop(name, None)
            self._taken -= entry.nbytes if entry is not None else 0
        with suppress(OSError):  # what is left of it is found at the next start
            (self._folder / name).unlink(missing_ok=True)

    def _make_room(self, nbytes: int) -> None:
        """Remove what was used least recently, if there is no room for so many more bytes."""
        if self._taken + nbytes <= self._limit:
            return
        order = [(int(e.used / MOMENT_S), -_index(name), name) for name, e in [*self._entries.items()]]
        for _, _, name in sorted(order):
            if self._taken + nbytes <= FULL * self._limit:
                break
            self._remove(name)


def lock(folder: Path) -> int | None:
    """Take the folder for this process, until the descriptor is closed; None if another has it. Raises OSError."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


def files(folder: Path, *, tidy: bool = False) -> Iterator[tuple[str, Entry]]:
    """The files in a folder, by GENERATION/NAME, beside a process that may write there. With ``tidy``, drafts and empty
    generations are removed, and the log names what is not a tier's. Raises OSError."""
    for generation, kind in _within(folder):
        if not GENERATION.fullmatch(generation.name) or not stat.S_ISDIR(kind.st_mode):
            if tidy and generation.name != LOCK:
                log.warning("cache.paged.disk: %s is not a tier's, and ignored", generation)
            continue
        for file, about in _within(generation):
            if not stat.S_ISREG(about.st_mode) or not NAME.fullmatch(file.name.removeprefix(".")):
                if tidy:
                    log.warning("cache.paged.disk: %s is not a tier's, and ignored", file)
            elif not file.name.startswith("."):
                yield f"{generation.name}/{file.name}", Entry(about.st_size, about.st_mtime)
            elif tidy:
                file.unlink()
        if tidy:
            with suppress(OSError):  # it is not empty
                generation.rmdir()


def _within(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """What is in a folder, by name, but for what goes meanwhile. Raises OSError."""
    paths = list[Path]()
    with suppress(FileNotFoundError):
        paths += folder.iterdir()
    for path in sorted(paths):
        with suppress(FileNotFoundError):
            yield path, path.lstat()


def read(path: Path, size: int) -> tuple[bytes, Payload]:
    """The head and payload of a file of that size. Raises OSError, or ValueError if it is not whole."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size != size:
            raise ValueError(f"it has {about.st_size} bytes instead of {size}")
        data, filled = bytearray(size), 0
        with memoryview(data) as rest:
            while filled < size and (count := file.readinto(rest[filled:])):
                filled += count
    view, begin = memoryview(data), len(MAGIC) + LENGTH
    whole = filled == size >= begin + DIGEST and view[: len(MAGIC)] == MAGIC
    if not whole or hashlib.blake2b(view[:-DIGEST], digest_size=DIGEST).digest() != view[-DIGEST:]:
        raise ValueError("its digest is not that of its content")
    middle = begin + int.from_bytes(view[len(MAGIC) : begin], "little")
    return bytes(view[begin:middle]), view[middle:-DIGEST]


def _size(key: BlockKey) -> int:
    """Bytes of a payload's file."""
    return len(MAGIC) + LENGTH + len(key.head) + key.nbytes + DIGEST


def _index(name: str) -> int:
    """The index of the block whose file has that name."""
    found = NAME.search(name)
    return int(found[1], 16) if found else 0
