"""What /v1/responses keeps: an SQLite file, which the processes of one machine use together. Its journal (WAL) needs
memory that all of them share, so those of several machines cannot, though they may see the same disk.

Each record is whole: it holds the conversation that led to it, so that others can be deleted or evicted. A response
that is still computed belongs to a process, which holds a lock on a file of its own for as long as it lives. Whoever
finds the lock free knows that nobody will finish the response."""

from __future__ import annotations

import fcntl
import hmac
import logging
import os
import secrets
import sqlite3
import stat
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infer.errors import InferError, SettingsError
from infer_agents.seal import state_folder

log = logging.getLogger(__name__)

VERSION = 2
"""Of the tables. A file of another version is refused."""
BUSY_S = 10.0
"""How many seconds a process waits for others that write."""
DAY_S = 86400.0
OPEN = ("queued", "in_progress")
"""The states of a response that a process computes."""
TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner BLOB NOT NULL, created REAL NOT NULL, status TEXT NOT NULL, runner TEXT NOT NULL,
    size INTEGER NOT NULL, background INTEGER NOT NULL, form BLOB NOT NULL, stop TEXT NOT NULL, tokens BLOB NOT NULL,
    items BLOB NOT NULL, output BLOB NOT NULL, response BLOB NOT NULL
);
CREATE INDEX by_age ON responses (created);
CREATE INDEX by_status ON responses (status) WHERE status IN ('queued', 'in_progress');
CREATE TRIGGER added AFTER INSERT ON responses BEGIN
    UPDATE meta SET value = value + new.size WHERE name = 'bytes';
END;
CREATE TRIGGER removed AFTER DELETE ON responses BEGIN
    UPDATE meta SET value = value - old.size WHERE name = 'bytes';
END;
CREATE TRIGGER changed AFTER UPDATE OF size ON responses BEGIN
    UPDATE meta SET value = value + new.size - old.size WHERE name = 'bytes';
END;
"""


class StoreError(InferError):
    """Something cannot be kept or read. The message names the file."""


class TooLargeError(StoreError):
    """A response is larger than all that the store may hold."""


class FullError(StoreError):
    """There is no room, because nothing may be deleted."""


@dataclass(frozen=True)
class Record:
    """A response, and what a next one needs to go on with it."""

    id: str
    status: str
    response: bytes
    """As clients get it, in JSON."""
    items: bytes
    """The input items that it was made of, those of earlier responses included, in JSON."""
    output: bytes = b"[]"
    """The items that it adds to these, in JSON."""
    form: bytes = b""
    """A digest of what begins a prompt besides the items; a conversation goes on with ``tokens`` if it is equal."""
    tokens: bytes = b""
    """The prompt's and the answer's ids as uint32, without the stop token; none if no prompt can begin with them."""
    stop: str = ""
    """The text of the stop token that ended the answer, if one did."""
    background: bool = False
    runner: str = ""
    """The process that computes it."""


class Store:
    """The records of one file. Methods block, and may be called in any thread. ``owner`` is a digest of the API key
    that a record belongs to; to others it does not exist. ``max_bytes`` bounds the records' sizes, compressed, and
    ``max_age_s`` their ages. Methods raise StoreError.

    Raises SettingsError if the file cannot be used."""

    def __init__(self, path: Path, *, max_bytes: int, max_age_s: float, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._max_bytes, self._max_age_s, self._clock = max_bytes, max_age_s, clock
        self._lock = threading.Lock()
        self.runner, self._held = secrets.token_hex(8), -1
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):  # SQLite's locks end as soon as this process closes the file anywhere
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))  # its other files get this mode
            self._hide()
            self._connection = sqlite3.connect(path, BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                self._salt = self._opened()
            except BaseException:
                self._connection.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise SettingsError(
                f"The store of responses, {path}, cannot be opened ({error}). Move it away, or name another file with "
                "server.agents.store; server.agents.store_max_bytes = 0 does without."
            ) from None

    def _hide(self) -> None:
        """Take from others what rights they have to a file that was made elsewhere, and to its journal."""
        for file in (self.path, *(self.path.with_name(self.path.name + end) for end in ("-wal", "-shm"))):
            with suppress(FileNotFoundError):
                if (mode := stat.S_IMODE(file.stat().st_mode)) & 0o077:
                    file.chmod(0o600)
                    log.warning("%s had the mode %03o; from now on its owner alone can read it", file, mode)

    def _opened(self) -> bytes:
        """Make or check the tables. Returns the salt of owners."""
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON", "journal_size_limit = 1"):
            self._connection.execute(f"PRAGMA {pragma}").fetchall()
        with self._writing() as run:
            (version,) = run("PRAGMA user_version").fetchone()
            if not version:
                for statement in _statements(TABLES):
                    run(statement)
                run("INSERT INTO meta VALUES ('bytes', 0), ('salt', ?)", (secrets.token_bytes(32),))
                run(f"PRAGMA user_version = {VERSION}")
            elif version != VERSION:
                raise sqlite3.DatabaseError(f"its version is {version}, and this infer knows {VERSION}")
            (salt,) = run("SELECT value FROM meta WHERE name = 'salt'").fetchone()
            self._evict(run, 0)
        return bytes(salt)

    def close(self) -> None:
        """Close the file. What this process still computes is then nobody's."""
        with self._lock:
            self._connection.close()
            if self._held >= 0:
                self._lock_file(self.runner).unlink(missing_ok=True)
                os.close(self._held)
                self._held = -1

    def owner(self, key: str) -> bytes:
        """Whose the records are that are written with this API key's digest. The key cannot be told from it."""
        return hmac.digest(self._salt, key.encode(errors="surrogatepass"), "sha256")

    def put(self, owner: bytes, record: Record) -> None:
        """Keep a new record. One that is in progress becomes this process's own."""
        columns = self._packed(record)
        if record.status in OPEN:
            self._hold()
            columns["runner"] = self.runner
        columns |= {"id": record.id, "owner": owner, "created": self._clock(), "background": record.background}
        with self._writing() as run:
            if not self._evict(run, columns["size"]):
                raise FullError("All that the store may hold is taken by responses that are computed now.")
            names = ", ".join(columns)
            run(f"INSERT INTO responses ({names}) VALUES ({', '.join('?' * len(columns))})", (*columns.values(),))

    def update(self, record: Record) -> bool:
        """Take over what is new of a record that this process computes. Returns False if it has been cancelled or
        deleted in the meantime, and is left so."""
        columns = self._packed(record)
        if record.status in OPEN:
            columns["runner"] = self.runner
        with self._writing() as run:
            self._evict(run, columns["size"], record.id)
            values = ", ".join(f"{name} = ?" for name in columns)
            where = "id = ? AND runner = ?"
            return bool(
                run(
                    f"UPDATE responses SET {values} WHERE {where}", (*columns.values(), record.id, self.runner)
                ).rowcount
            )

    def get(self, owner: bytes, id: str) -> Record | None:
        """A record; None if there is none of this owner's, or it is too old."""
        with self._errors():
            row = self._connection.execute(
                "SELECT id, status, response, items, output, form, tokens, stop, background, runner FROM responses "
                "WHERE id = ? AND owner = ? AND created >= ?",
                (id, owner, self._clock() - self._max_age_s),
            ).fetchone()
        if row is None:
            return None
        id, status, *blobs, form, tokens, stop, background, runner = row
        try:
            response, items, output, tokens = map(zlib.decompress, (*blobs, tokens))
        except zlib.error as error:
            raise StoreError(f"In the store of responses, {self.path}, {id} cannot be read: {error}.") from None
        return Record(id, status, response, items, output, form, tokens, stop, bool(background), runner)

    def delete(self, owner: bytes, id: str) -> bool:
        """Returns False if there is none."""
        oldest = self._clock() - self._max_age_s
        with self._writing() as run:
            return bool(
                run("DELETE FROM responses WHERE id = ? AND owner = ? AND created >= ?", (id, owner, oldest)).rowcount
            )

    def finish(self, record: Record, status: str, response: bytes) -> bool:
        """End a record that somebody computes, as cancelled or failed. Returns False if it has ended already."""
        ended = self._packed(replace(record, status=status, response=response, tokens=b""))
        with self._writing() as run:
            self._evict(run, ended["size"], record.id)
            return bool(
                run(
                    "UPDATE responses SET status = ?, runner = '', size = ?, response = ?, tokens = ? WHERE id = ? AND "
                    "runner = ? AND runner != ''",
                    (*(ended[name] for name in ("status", "size", "response", "tokens")), record.id, record.runner),
                ).rowcount
            )

    def still_open(self, ids: Collection[str]) -> set[str]:
        """Those of these records that are still this process's to compute."""
        with self._errors():
            rows = self._connection.execute("SELECT id FROM responses WHERE runner = ?", (self.runner,)).fetchall()
        return {id for (id,) in rows} & set(ids)

    def in_progress(self) -> list[tuple[bytes, str, str]]:
        """Owner, id and runner of each record that a process computes, or was to compute."""
        with self._errors():
            return self._connection.execute(
                "SELECT owner, id, runner FROM responses WHERE status IN ('queued', 'in_progress')"
            ).fetchall()

    def is_gone(self, runner: str) -> bool:
        """Whether the process that was to compute a record has gone. Its lock's file is deleted then."""
        if not runner or runner == self.runner:
            return False
        lock = self._lock_file(runner)
        try:
            file = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock.unlink(missing_ok=True)
            finally:
                os.close(file)
        except FileNotFoundError:
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            raise StoreError(f"Whether {lock} is locked cannot be told: {error}.") from None
        return True

    def _hold(self) -> None:
        """Show other processes that this one lives."""
        with self._lock:
            if self._held >= 0:
                return
            try:
                self._held = os.open(self._lock_file(self.runner), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                fcntl.flock(self._held, fcntl.LOCK_EX)
            except OSError as error:
                raise StoreError(f"Beside {self.path}, a lock cannot be kept: {error}.") from None

    def _lock_file(self, runner: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{runner}.lock")

    def _packed(self, record: Record) -> dict[str, Any]:
        """The columns that change while a response is computed."""
        blobs = {name: zlib.compress(getattr(record, name), 1) for name in ("response", "items", "output", "tokens")}
        size = sum(map(len, blobs.values()))
        if size > self._max_bytes:
            raise TooLargeError(
                f"A response of {size} bytes is not stored: server.agents.store_max_bytes = {self._max_bytes}."
            )
        return {
            **blobs,
            "status": record.status,
            "runner": "",
            "form": record.form,
            "stop": record.stop,
            "size": size,
        }

    def _evict(self, run: Callable[..., sqlite3.Cursor], size: int, id: str = "") -> bool:
        """Delete what is too old, and as many of the oldest records as to have room for one of this size, which takes
        the place of ``id``. What is computed now is kept. Returns whether there is room."""
        run("DELETE FROM responses WHERE created < ?", (self._clock() - self._max_age_s,))
        others = "SELECT value - coalesce((SELECT size FROM responses WHERE id = ?), 0) FROM meta WHERE name = 'bytes'"
        while run(others, (id,)).fetchone()[0] + size > self._max_bytes:
            if not run(
                "DELETE FROM responses WHERE id = (SELECT id FROM responses WHERE runner = '' ORDER BY created, rowid "
                "LIMIT 1)"
            ).rowcount:
                return False
        return True

    @contextmanager
    def _writing(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """A transaction, which takes effect as a whole or not at all."""
        with self._errors():
            run = self._connection.execute
            run("BEGIN IMMEDIATE")
            try:
                yield run
                run("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    run("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """One thread at a time, and SQLite's errors as StoreError once the file is open."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                if not hasattr(self, "_salt"):
                    raise
                raise StoreError(f"The store of responses, {self.path}, fails: {error}.") from error


def _statements(script: str) -> Iterator[str]:
    """The statements of a script. ``executescript`` would end the transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def open_store(path: Path | None, *, max_bytes: int, max_days: float) -> Store | None:
    """The store of the settings. None if it may hold nothing, or if no ``path`` is given and the folder of what infer
    keeps cannot be written to. Raises SettingsError."""
    if not max_bytes:
        return None
    if path is None:
        try:
            path = state_folder() / "responses.db"
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(path.parent, os.W_OK):
                raise PermissionError(f"{path.parent} cannot be written to")
        except (OSError, RuntimeError) as error:  # a RuntimeError, if there is no home
            log.warning("responses are not stored: server.agents.store names no file, and %s", error)
            return None
    return Store(path.expanduser(), max_bytes=max_bytes, max_age_s=max_days * DAY_S)
