"""The errors that infer raises on purpose. Each text is one sentence or two that name the key, the value and the way
out, and is fit to be shown to whoever caused it."""

from __future__ import annotations

import traceback
from pathlib import Path

MAX_TEXT = 300
"""Characters of a foreign exception's text that we repeat."""


class InferError(Exception):
    """Base of all; the command line prints its text and exits with 2, or 1 for an engine that has failed."""


class SettingsError(InferError):
    """A setting is unknown, malformed or cannot work together with another."""


class PluginError(InferError):
    """A plugin is missing, duplicated, broken or made for another version of the contract."""


class CheckpointError(InferError):
    """A checkpoint is missing, incomplete, corrupt or of an unknown kind."""


class RequestError(InferError):
    """The request cannot be served as asked; the client can mend it."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(InferError):
    """As many requests as allowed are running and waiting; try again later."""


class EngineDeadError(InferError):
    """The engine has stopped and takes no more requests."""


def capital(text: str) -> str:
    """A library's complaint as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def say(error: BaseException) -> str:
    """A foreign exception in one line: its kind, what it says, and the file and line, not ours, that raised it."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # its own text may be at fault
        text = ""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}…"
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    ours = str(Path(__file__).parent)
    places = [(file, line) for file, line in places if "importlib" not in file and not file.startswith(ours)]
    where = f" ({Path(places[-1][0]).name}:{places[-1][1]})" if places else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"
