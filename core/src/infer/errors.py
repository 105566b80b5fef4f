"""The errors that infer raises on purpose. Each message is one sentence or two that name the key, the value and the way
out, and is meant for the user who caused it."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from pydantic_core import ValidationError

INDEXED = ("infer-kernels-triton", "infer-models-transformers", "infer-otel", "infer-ray")
"""Distributions of ours that need more from the package index than infer-engine does."""
MAX_TEXT = 300
"""The most characters of a foreign exception's text that a message repeats."""
MAX_MESSAGE = 1000
"""The most characters of a message about a checkpoint, whose names and values may be of any length."""
LIBRARIES = sys.stdlib_module_names | {"aiohttp", "infer_server", "infer_testing", "numpy", "pydantic", "torch"}
"""Packages whose lines do not tell a plugin's author where a mistake is."""


class InferError(Exception):
    """The base of all. The command line prints its message and exits with ``exit_code``."""

    exit_code: ClassVar[int] = 2
    """1 if the engine has failed."""


class SettingsError(InferError):
    """A setting is unknown, malformed or incompatible with another."""


class PluginError(InferError):
    """A plugin is missing, duplicated, broken or made for another version of the contract."""


class CheckpointError(InferError):
    """A checkpoint is missing, incomplete, corrupt or of an unknown kind. The message repeats what strangers wrote, so
    what cannot be printed is escaped, and what is too long loses its middle."""

    def __init__(self, message: str) -> None:
        super().__init__(in_short(message, MAX_MESSAGE))


class RequestError(InferError):
    """The request cannot be served as it is, but the client can correct it. ``param`` is the parameter at fault."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(InferError):
    """No more requests are taken for now; try again in ``retry_after_s`` seconds."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeoutError(InferError):
    """The request has not ended in time."""

    code: ClassVar[str] = "timeout"


class EngineDeadError(InferError):
    """The engine has stopped and takes no more requests."""

    exit_code = 1


class Fault(NamedTuple):
    """One thing that pydantic found wrong."""

    path: tuple[int | str, ...]
    """Where, from the outside in; empty where it concerns the whole."""
    value: Any
    text: str
    """What is wrong, without a period."""
    kind: str
    """pydantic's name for that."""
    context: dict[str, Any]


def faults(error: ValidationError) -> list[Fault]:
    """All that pydantic found wrong, in its order."""
    return [
        Fault(each["loc"], each["input"], _text(each["msg"]), each["type"], each.get("ctx", {}))
        for each in error.errors(include_url=False)
    ]


def _text(message: str) -> str:
    """pydantic's message in the words of JSON and TOML, which have arrays and no tuples."""
    message = re.sub(r" after validation, not .*", "", message.removeprefix("Value error, "))
    return message.replace("Tuple should", "Array should").replace("valid tuple", "valid array")


def first_fault(error: ValidationError) -> Fault:
    return faults(error)[0]


def in_short(text: str, most: int) -> str:
    """``text`` with escapes for what cannot be printed; its middle is left out if it has more than ``most``
    characters."""
    half = most // 2
    for _ in range(2):  # before, because escaping takes time, and after, because it makes texts longer
        text = text if len(text) <= most else f"{text[:half]}…{text[1 - half :]}"
        text = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    return text


def capital(text: str) -> str:
    """``text`` with a capital letter, to begin a sentence with a library's message."""
    return text[:1].upper() + text[1:]


def installing(package: str) -> str:
    """The command that installs a distribution of ours from ``dist``, the folder of wheels that `make dist` makes.
    Whoever publishes a package of that name on an index is not asked."""
    own = f"pip install -r dist/{package}.txt"
    return f"pip install -r dist/{package}.needs.txt && {own}" if package in INDEXED else own


def one_line(error: BaseException) -> str:
    """A foreign exception in one line: its type, its text, and the innermost file and line outside infer's core, and
    outside libraries if there is one."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # its __str__ may fail, too
        text = ""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}…"
    ours = str(Path(__file__).parent)
    places = [
        (frame.f_globals.get("__name__", "").partition(".")[0], f" ({_short(Path(file))}:{line})")
        for frame, line in traceback.walk_tb(error.__traceback__)
        if "importlib" not in (file := frame.f_code.co_filename) and not file.startswith(ours)
    ]
    own = [where for package, where in places if package not in LIBRARIES]
    where = own[-1] if own else places[-1][1] if places else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"


def _short(file: Path) -> str:
    """A file by its name, and by its package's where all packages have a file of that name."""
    return f"{file.parent.name}/{file.name}" if file.name == "__init__.py" else file.name
