"""What commands share: arguments for sampling parameters, and tables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pydantic import ValidationError

from infer.contracts.params import SamplingParams
from infer.errors import InferError, capital, first_fault

PLAIN_PARAMS = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""The sampling parameters that have a flag."""


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


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows with their columns aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
