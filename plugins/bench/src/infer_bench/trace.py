"""A trace: a CSV file with a line for each request, when it arrived and how many tokens it had."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from infer.errors import SettingsError
from infer_bench.bench import Planned

NEEDED = ("arrival_s", "prompt_tokens", "output_tokens")
COLUMNS = (*NEEDED, "session", "prefix", "prefix_tokens", "priority", "user")


class Row(NamedTuple):
    """One request. What a cell does not say is empty or 0."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    session: str = ""
    prefix: str = ""
    prefix_tokens: int = 0
    priority: int = 0
    user: str = ""


def read(path: str) -> list[Row]:
    """The file's rows, of which there is at least one. Raises SettingsError."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            return _rows(path, csv.reader(file))
    except OSError as error:
        raise SettingsError(f"--workload {path} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise SettingsError(f"--workload {path} is no CSV file: {error}.") from None


def _rows(path: str, lines: Iterator[Sequence[str]]) -> list[Row]:
    names = [name.strip() for name in next(lines, [])]
    lacking = [name for name in NEEDED if name not in names]
    unknown = [name for name in names if name not in COLUMNS]
    if lacking or unknown or len({*names}) < len(names):
        why = f"lacks {lacking[0]}" if lacking else f"has {unknown[0]!r}" if unknown else "names a column twice"
        raise SettingsError(
            f"--workload {path}: its first line {why}; it has to name {', '.join(NEEDED)}, and may name "
            f"{', '.join(COLUMNS[len(NEEDED) :])}."
        )
    rows, before = list[Row](), 0.0
    for number, cells in enumerate(lines, 2):
        if not cells:
            continue
        row = _row(f"--workload {path}, line {number}", names, cells)
        if row.arrival_s < before:
            raise SettingsError(
                f"--workload {path}, line {number}: arrival_s is {row.arrival_s:g}, after {before:g}; sort the lines "
                "by it."
            )
        before = row.arrival_s
        rows.append(row)
    if not rows:
        raise SettingsError(f"--workload {path} has no request; give it a line below the first.")
    return rows


def _row(where: str, names: Sequence[str], cells: Sequence[str]) -> Row:
    if len(cells) != len(names):
        raise SettingsError(f"{where} has {len(cells)} cells, but the first line has {len(names)}.")
    said = {name: cell for name, cell in zip(names, cells, strict=True) if cell}

    def number(name: str, least: int) -> int:
        text = said.get(name, "" if name in NEEDED else "0")
        try:
            value = int(text)
        except ValueError:
            raise SettingsError(f"{where}: {name} is {text!r}; it has to be a whole number.") from None
        if value < least:
            raise SettingsError(f"{where}: {name} is {value}; it has to be at least {least}.")
        return value

    try:
        arrival_s = float(said.get("arrival_s", ""))
    except ValueError:
        arrival_s = -1.0
    if not 0 <= arrival_s < float("inf"):
        raise SettingsError(f"{where}: arrival_s is {said.get('arrival_s', '')!r}; it has to be seconds, 0 or more.")
    prompt, output, shared = number("prompt_tokens", 1), number("output_tokens", 1), number("prefix_tokens", 0)
    if ("prefix" in said) != (shared > 0):
        raise SettingsError(f"{where}: prefix and prefix_tokens go together; give both or neither.")
    if shared > prompt:
        raise SettingsError(f"{where}: prefix_tokens is {shared}, more than the {prompt} of prompt_tokens.")
    session, prefix, user = (said.get(name, "") for name in ("session", "prefix", "user"))
    return Row(arrival_s, prompt, output, session, prefix, shared, number("priority", -(1 << 31)), user)


def check(path: str, rows: Sequence[Row], max_seq_len: int) -> None:
    """Raises SettingsError if a sequence cannot be so long as one of the rows."""
    longest = max(rows, key=lambda row: row.prompt_tokens + row.output_tokens)
    if (length := longest.prompt_tokens + longest.output_tokens) > max_seq_len:
        raise SettingsError(
            f"--workload {path} has a request of {length} tokens, prompt and answer together, at arrival_s "
            f"{longest.arrival_s:g}, but a sequence has at most {max_seq_len} positions; raise engine.max_seq_len."
        )


Runs = tuple[tuple[int, int], ...]
"""Tokens as (token id, how many times)."""


def requests(rows: Sequence[Row]) -> Iterator[Planned]:
    """The requests, each made when it is asked for. Prompts with the same ``prefix`` begin alike, and one of a session
    that is known goes on where the last one's answer ended, as far as its prompt_tokens reach; all else is in no other
    prompt. A prompt's own tokens are all the same, and so are those of its answer (``Executor``)."""
    prefixes: dict[str, int] = {}
    sessions: dict[str, Runs] = {}
    for i, row in enumerate(rows):
        begins: Runs = ()
        if row.session in sessions:
            begins = sessions[row.session]
        elif row.prefix:
            begins = ((2 * prefixes.setdefault(row.prefix, len(prefixes)) + 1, row.prefix_tokens),)
        runs: Runs = ()
        left = row.prompt_tokens
        for token, count in (*begins, (2 * i, row.prompt_tokens)):
            if taken := min(count, left):
                runs += ((token, taken),)
                left -= taken
        if row.session:
            sessions[row.session] = (*runs, (runs[-1][0], row.output_tokens))
        prompt: tuple[int, ...] = ()
        for token, count in runs:
            prompt += (token,) * count
        yield Planned(row.arrival_s, prompt, row.output_tokens, row.priority, row.user)
