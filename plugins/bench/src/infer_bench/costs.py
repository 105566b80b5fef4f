"""What passes cost on a machine: a linear form with few coefficients, fitted to measured passes, in a file that one can
edit for another machine."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError

from infer.engine.pace import count_pairs
from infer.errors import SettingsError, first_fault

Floats = npt.NDArray[np.float64]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ROUNDS = 5
"""How often a fit is weighted anew."""
UNUSUAL = 3.0
"""A pass that takes this many times as long as expected has been interrupted."""


class Coefficients(BaseModel, extra="forbid", frozen=True):
    """Seconds that each of these takes."""

    request: Seconds = 0.0
    """A request, before it reaches the engine. Others wait meanwhile."""
    step: Seconds
    """A pass, whatever is in it."""
    prompts: Seconds = 0.0
    """A pass that computes more than one token of any sequence; the others may be recorded, and cost less."""
    token: Seconds
    """A token that a pass computes."""
    sequence: Seconds = 0.0
    """A sequence of a pass."""
    position: Seconds = 0.0
    """A position whose K and V a sequence reads in a pass."""
    pair: Seconds = 0.0
    """A token and a position that it attends to."""


class Costs(BaseModel, extra="forbid", frozen=True):
    """The costs of a model on a machine, and what a simulation needs to know of both."""

    model: str = ""
    machine: str = ""
    device: Literal["cpu", "cuda"] = "cpu"
    max_seq_len: int = Field(ge=2)
    cache_tokens: PositiveInt
    """How many positions the cache pool has, unless settings say."""
    windows: tuple[NonNegativeInt, ...] = Field((0,), min_length=1)
    """Per layer, how many positions each one reads; 0 for all before it."""
    passes: NonNegativeInt = 0
    """How many passes the coefficients are fitted to."""
    error: Seconds = 0.0
    """The median of |fitted - measured| / measured over them."""
    seconds: Coefficients

    def of(self, starts: Sequence[int], lens: Sequence[int]) -> float:
        """How many seconds a pass takes that extends sequences by positions [start, start + length)."""
        sequences, tokens = len(lens), sum(lens)
        each, positions = self.seconds, sum(starts) + tokens
        pairs = positions if tokens == sequences else count_pairs(starts, lens)
        fixed = each.step + each.prompts * (tokens > sequences)
        return fixed + each.token * tokens + each.sequence * sequences + each.position * positions + each.pair * pairs

    @classmethod
    def read(cls, path: str) -> Costs:
        """Raises SettingsError."""
        try:
            return cls.model_validate(tomllib.loads(Path(path).read_text()))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise SettingsError(f"--costs {path} cannot be read: {why}; --fit writes such a file.") from None
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"--costs {path} is not TOML: {error}; --fit writes such a file.") from None
        except ValidationError as error:
            fault = first_fault(error)
            key = ".".join(map(str, fault.path))
            if fault.kind == "missing":
                raise SettingsError(f"--costs {path} lacks {key}; --fit writes such a file.") from None
            if fault.kind == "extra_forbidden":
                known = [*Costs.model_fields, *(f"seconds.{name}" for name in Coefficients.model_fields)]
                raise SettingsError(f"--costs {path}: {key} is unknown; it has {', '.join(known)}.") from None
            raise SettingsError(f"--costs {path}: {key} = {fault.value!r}: {fault.text}.") from None

    def text(self) -> str:
        """The file."""
        plain = self.model_dump(exclude={"seconds"})
        return "\n".join(
            (
                "# What a pass costs, fitted by `infer simulate --fit`. Any number may be changed.",
                *(f"{key} = {_toml(value)}" for key, value in plain.items()),
                "",
                "[seconds]",
                *(f"{key} = {value:.4g}" for key, value in self.seconds.model_dump().items()),
                "",
            )
        )


def _toml(value: object) -> str:
    if isinstance(value, str):
        return '"' + "".join(c if c.isprintable() and c not in '"\\' else " " for c in value) + '"'
    return f"{value:.3g}" if isinstance(value, float) else str([*value] if isinstance(value, tuple) else value)


def fit(passes: Sequence[tuple[Sequence[int], Sequence[int], float]]) -> tuple[Coefficients, float]:
    """The coefficients (but ``request``) of passes with these (starts, lens, measured seconds), and their ``error``.
    Least squares with no coefficient below 0, weighted by 1 / expected seconds, then scaled to the time of all
    passes."""
    features = [
        (1, sum(lens) > len(lens), sum(lens), len(lens), sum(starts) + sum(lens), count_pairs(starts, lens))
        for starts, lens, _ in passes
    ]
    x_PC, y_P = np.array(features, dtype=np.float64), np.array([seconds for *_, seconds in passes])
    expected_P, usual_P = y_P, np.ones(len(y_P), dtype=bool)
    for _ in range(ROUNDS):
        # Every second of passes counts the same, be it of one or of many of them.
        root_P = np.sqrt(expected_P)
        coefficients_C = non_negative((x_PC / root_P[:, None])[usual_P], (y_P / root_P)[usual_P])
        expected_P = x_PC @ coefficients_C
        usual_P = y_P < UNUSUAL * expected_P
    # Passes that were interrupted say nothing about the form, but their time passes nevertheless.
    coefficients_C *= y_P.sum() / expected_P.sum()
    names = ("step", "prompts", "token", "sequence", "position", "pair")
    error = float(np.median(np.abs(x_PC @ coefficients_C - y_P) / y_P))
    return Coefficients(**dict(zip(names, coefficients_C.tolist(), strict=True))), error


def non_negative(x_PC: Floats, y_P: Floats) -> Floats:
    """The coefficients of least squares among those that are not negative. There are few columns: every subset of them
    is tried."""
    count = x_PC.shape[1]
    scale_C = np.linalg.norm(x_PC, axis=0)
    scale_C[scale_C == 0] = 1
    best_C, least = np.zeros(count), float(y_P @ y_P)
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            part_PC = x_PC[:, chosen] / scale_C[[*chosen]]
            found_C = np.linalg.lstsq(part_PC, y_P, rcond=None)[0]
            rest_P = part_PC @ found_C - y_P
            if (found_C >= 0).all() and (squares := float(rest_P @ rest_P)) < least:
                best_C, least = np.zeros(count), squares
                best_C[[*chosen]] = found_C / scale_C[[*chosen]]
    return best_C
