"""Ollama's keep_alive."""

from __future__ import annotations

import math

import pytest

from infer.errors import RequestError
from infer_router.durations import keep_alive_s


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((None, None), (0, 0.0), (300, 300.0), (-1, math.inf), (1.5, 1.5), ("5m", 300.0), ("1h30m", 5400.0)),
        *(("0", 0.0), ("0s", 0.0), ("-1m", math.inf), ("+.5s", 0.5), ("100ms", 0.1), ("20", 20.0), ("1e3", ...)),
        *((10**400, ...), (-(10**400), ...), (math.nan, ...), (math.inf, ...), (True, ...), ("", ...), ("5 m", ...)),
        *(("9" * 60 + "h", ...), ("5mm", ...), ("m", ...), ([], ...), ("1h" * 40, ...), ("999999999999h", ...)),
    ],
)
def test_what_it_says(value: object, seconds: object) -> None:
    if seconds is ...:
        with pytest.raises(RequestError, match="keep_alive has to be seconds"):
            keep_alive_s(value)
    else:
        assert keep_alive_s(value) == seconds
