"""What commands share: arguments for settings and for sampling parameters, and tables."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from infer.contracts.params import SamplingParams
from infer.errors import InferError, capital, first_fault
from infer.plugins import Plugins
from infer.settings import Settings

PLAIN_PARAMS = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""The sampling parameters that have a flag."""
NAMED = {"MODEL": "model.path"}
LOADING = {"--model": "model.path", "--max-model-len": "engine.max_seq_len"}
SERVING = {
    "--host": "server.host",
    "--port": "server.port",
    "--api-key": "server.api_keys",
    "--served-model-name": "server.served_model_name",
}
"""Short names for the settings that users type most; other servers use the same names."""


class _Plain(argparse.Action):
    """A flag or a positional argument that stands for a setting."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        key = str(self.const)
        given: list[str] = namespace.__dict__.setdefault("plain_settings", [])
        if any(word.startswith(f"--{key}=") for word in given):
            parser.error(f"{key} is given twice; the second is {values!r}.")
        given.append(f"--{key}={values}")


def add_settings(sub: argparse.ArgumentParser, flags: Mapping[str, str]) -> None:
    """Add arguments that stand for settings; ``flags`` maps each argument's name to a setting's key."""
    sections = {name: field.annotation for name, field in Settings.model_fields.items()}
    for flag, key in flags.items():
        section, name = key.split(".")
        text = sections[section].model_fields[name].description  # type: ignore[union-attr]
        names: dict[str, Any] = {} if flag.startswith("--") else {"nargs": "?"}
        sub.add_argument(flag, action=_Plain, const=key, default=argparse.SUPPRESS, help=f"{key}: {text}", **names)


def add_sampling(sub: argparse.ArgumentParser) -> None:
    for name in PLAIN_PARAMS:
        flag = {"action": "store_true", "default": None} if name == "ignore_eos" else {}
        many = {"action": "append"} if name == "stop" else {}
        text = SamplingParams.model_fields[name].description
        sub.add_argument(f"--{name.replace('_', '-')}", help=text, **flag, **many)  # type: ignore[arg-type]


def sampling(args: argparse.Namespace, defaults: dict[str, object]) -> SamplingParams:
    """The sampling parameters given by the arguments of ``add_sampling``. Raises InferError."""
    given = {name: v for name in PLAIN_PARAMS if (v := getattr(args, name, None)) is not None}
    try:
        return SamplingParams.model_validate(defaults | given)
    except ValidationError as error:
        fault = first_fault(error)
        if not fault.path:
            raise InferError(f"{capital(fault.text)}.") from None
        flag = str(fault.path[0]).replace("_", "-")
        raise InferError(f"--{flag} {fault.value}: {fault.text}.") from None


def new_timeline(flag: str, file: str, plugins: Plugins) -> Path:
    """Make sure that there is an observer ``timeline``, which writes a page of an engine's steps, and begin its file
    anew. Raises InferError."""
    if not any(offer.name == "timeline" for offer in plugins.offers["observer"]):
        raise InferError(
            f"{flag} needs the plugin that writes the page: pip install infer-console.{plugins.culprits()}"
        )
    plugins.get("observer", "timeline", flag)
    try:
        Path(file).write_bytes(b"")
    except OSError as error:
        raise InferError(f"{flag} {file} cannot be written: {error.strerror}.") from None
    return Path(file).absolute()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows with their columns aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
