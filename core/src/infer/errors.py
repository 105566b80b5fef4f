"""The errors that infer raises on purpose. Each text is one sentence or two that name the key, the value and the way
out, and is fit to be shown to whoever caused it."""

from __future__ import annotations


class InferError(Exception):
    """Base of all; the command line prints its text and exits with 2."""


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
