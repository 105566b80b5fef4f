"""`infer cache`: what is in the folder of cache.paged.disk, and an end to it."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from infer.contracts.command import CommandContext, CommandRegistration
from infer.errors import InferError, SettingsError

if TYPE_CHECKING:
    from infer_cache_paged.disk import Entry

WORDS = ("dtype", "device", "kernels")
"""What is told of a generation, besides the checkpoint's digest."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "purge"), metavar="ACTION", help="list or purge")
    parser.add_argument(
        "generation",
        nargs="?",
        metavar="GENERATION",
        help="purge this one alone: the beginning of a name that is listed",
    )


def run(args: argparse.Namespace, context: CommandContext) -> int:
    """List what is kept on disk, or remove it."""
    from infer_cache_paged.disk import files, lock  # imported here, so that other commands need not wait

    folder: Path | None = context.settings.cache.paged.disk  # type: ignore[attr-defined]  # the plugin's own table
    if folder is None:
        raise SettingsError(
            "cache.paged.disk is not set, so nothing is kept on disk; name the folder by --cache.paged.disk FOLDER."
        )
    if args.generation and args.action == "list":
        raise SettingsError(f"infer cache list lists all there is; leave {args.generation!r} out.")
    folder = folder.expanduser()
    found: defaultdict[str, dict[Path, Entry]] = defaultdict(dict)
    held = None
    try:
        if folder.is_dir():
            if args.action == "purge" and (held := lock(folder)) is None:
                raise InferError(f"A server uses {folder}; stop it, then purge.")
            for name, entry in files(folder, tidy=args.action == "purge"):
                if name.startswith(args.generation or ""):
                    found[name.partition("/")[0]][folder / name] = entry
        if args.action == "list":
            _list(folder, found)
        else:
            _purge(folder, found)
    except OSError as error:
        raise InferError(f"{error.filename or folder}: {error.strerror}.") from error
    finally:
        if held is not None:
            os.close(held)
    return 0


def _list(folder: Path, found: dict[str, dict[Path, Entry]]) -> None:
    for generation, entries in found.items():
        nbytes, used = sum(e.nbytes for e in entries.values()), max(e.used for e in entries.values())
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(used))
        print(f"{generation}  {len(entries)} blocks, {nbytes / 2**20:.1f} MiB, used {when}: {_about(entries)}")
    if not found:
        print(f"{folder} has no blocks.")


def _purge(folder: Path, found: dict[str, dict[Path, Entry]]) -> None:
    count = nbytes = 0
    for generation, entries in found.items():
        for path, entry in entries.items():
            path.unlink()
            count, nbytes = count + 1, nbytes + entry.nbytes
        with suppress(OSError):  # somebody has put something else there
            (folder / generation).rmdir()
    print(f"{count} blocks of {nbytes / 2**20:.1f} MiB are removed from {folder}.")


def _about(entries: dict[Path, Entry]) -> str:
    """A generation in words, by the first of its files that is whole."""
    from infer_cache_paged.disk import read

    for path, entry in entries.items():
        with suppress(OSError, ValueError):
            about = json.loads(read(path, entry.nbytes)[0].partition(b"\n")[0])
            words = [about[word].removesuffix("{}").strip() for word in WORDS]
            return ", ".join([f"checkpoint {about['checkpoint'][:12]}", *words])
    return "nothing of it is whole"


COMMAND = CommandRegistration("cache", run, "list or remove what cache.paged.disk keeps", add_arguments=_add_arguments)
