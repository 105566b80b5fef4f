"""Ollama's ``keep_alive``: seconds, or a duration such as 5m or 1h30m."""

from __future__ import annotations

import math
import re

from infer.errors import RequestError

NUMBER = r"(?:\d{1,12}(?:\.\d{0,12})?|\.\d{1,12})"
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = re.compile(f"({NUMBER})(ns|us|µs|μs|ms|s|m|h)")
MOST_CHARS = 64
MOST_S = 1e9
"""Longer than any server runs."""


def keep_alive_s(value: object) -> float | None:
    """Seconds, math.inf for ever (a negative value, as Ollama has it), or None if nothing is said. Raises
    RequestError."""
    if value is None:
        return None
    seconds = None
    if isinstance(value, str) and len(value) <= MOST_CHARS:
        seconds = _duration(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST_S:  # NaN is not
        seconds = float(value)
    if seconds is None or seconds > MOST_S:
        raise RequestError(
            "keep_alive has to be seconds, at most 1e9, or a duration such as '5m' or '1h30m'; a negative one is "
            "for ever.",
            param="keep_alive",
        )
    return math.inf if seconds < 0 else seconds


def _duration(text: str) -> float | None:
    """None if it is none."""
    sign, rest = (-1.0, text[1:]) if text[:1] == "-" else (1.0, text.removeprefix("+"))
    if re.fullmatch(NUMBER, rest):
        return sign * float(rest)
    parts = PART.findall(rest)
    if not parts or "".join(number + unit for number, unit in parts) != rest:
        return None
    return sign * sum(float(number) * UNITS[unit] for number, unit in parts)
