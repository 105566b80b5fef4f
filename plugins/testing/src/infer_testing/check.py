"""`infer check`: tries what the contract of a plugin's extension point promises on one installed part."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.contracts.command import CommandContext, CommandRegistration
from infer.errors import InferError, one_line

if TYPE_CHECKING:
    from infer.plugins.discovery import Offer
    from infer_testing.suite import Suite

CALL = (
    'a JSON object with "text", which is a call as the model writes it, and its "name" and "arguments"; also "schema", '
    'that of the arguments, if the format needs it, and "two", an answer of two calls, where that is not "text" twice'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", metavar="SLOT:NAME", help=f"what to check; SLOT is one of {', '.join(_SUBJECTS)}")
    parser.add_argument("--call", metavar="FILE", help=f"of a tool format: {CALL}")
    parser.add_argument("--checkpoint", metavar="DIR", help="of a model or weights: the checkpoint that is read")
    parser.add_argument(
        "--against",
        default="auto",
        metavar="WHAT",
        help="what a model's logits are compared with: transformers, none, or auto, which is transformers where it is "
        "installed; and the plain checkpoint that weights were quantized from",
    )
    parser.add_argument("--only", action="append", default=[], metavar="CHECK", help="only this check; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of the cases that are drawn (default: 0)")
    parser.add_argument("--case", type=int, help="only this case, as a failure names it")


def run(args: argparse.Namespace, context: CommandContext) -> int:
    """Print a line per check, and what replays each that fails. Raises InferError if there is no such part."""
    import torch

    slot, _, name = args.part.partition(":")
    if slot not in _SUBJECTS or not name:
        raise InferError(f"{args.part!r} names no part; write SLOT:NAME, where SLOT is one of {', '.join(_SUBJECTS)}.")
    if context.settings.log.level == "info":  # which says of each pool how large it is
        logging.getLogger().setLevel(logging.WARNING)
    torch.set_num_threads(context.settings.kernels.threads or 1)  # tiny tensors gain nothing from more
    offer = context.plugins.get(slot, name, f"The {slot} plugin to check")
    suite, subject = _SUBJECTS[slot](args, context, offer)
    counts = {"ok": 0, "skipped": 0, "failed": 0}
    command = " ".join(("infer check", *context.argv, args.part, *_words(args)))
    for outcome in suite.outcomes(subject, only=args.only, seed=args.seed, case=args.case, command=command):
        print(outcome, flush=True)
        counts["failed" if outcome.violation else "skipped" if outcome.skipped else "ok"] += 1
    print(f"{offer.whose}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
    return int(counts["failed"] > 0)


def _words(args: argparse.Namespace) -> Iterator[str]:
    """The arguments that a replay repeats."""
    for name, default in (("settings", None), ("call", None), ("checkpoint", None), ("against", "auto")):
        if (value := getattr(args, name, None)) != default:
            yield from (f"--{name}", str(value))


def _kernels(args: argparse.Namespace, context: CommandContext, offer: Offer) -> tuple[Suite[Any], Any]:
    from infer.assemble.devices import choose_device
    from infer_testing import kernels

    device = choose_device(context.settings.model.device)
    made = offer.build(context.settings, device)
    return kernels.SUITE, kernels.Provider(made, device, kv_dtypes=offer.kv_dtypes)


def _cache(args: argparse.Namespace, context: CommandContext, offer: Offer) -> tuple[Suite[Any], Any]:
    from infer_testing.pool_machine import Pools
    from infer_testing.pools import SUITE

    return SUITE, Pools(lambda given: offer.build(context.settings, given), offer.kv_dtypes, offer.states)


def _scheduler(args: argparse.Namespace, context: CommandContext, offer: Offer) -> tuple[Suite[Any], Any]:
    from infer_testing import schedulers

    make = lambda given: offer.build(context.settings, given)  # noqa: E731
    return schedulers.SUITE, schedulers.Schedulers(make, offer.chunks)


def _model(args: argparse.Namespace, context: CommandContext, offer: Offer) -> tuple[Suite[Any], Any]:
    from infer_testing import models

    if args.against not in ("auto", "transformers", "none"):
        raise InferError(f"--against {args.against}: a model is compared with auto, transformers or none.")
    folder = _checkpoint(args)
    return models.SUITE, models.Models(folder, context.plugins, context.settings, offer, args.against)


def _weights(args: argparse.Namespace, context: CommandContext, offer: Offer) -> tuple[Suite[Any], Any]:
    from infer.checkpoint import Folder
    from infer_testing import formats

    stored, plain = Folder(_checkpoint(args)), None
    if args.against != "auto":
        files = Folder(Path(args.against)).tensors()
        plain = {name: files.tensor(name) for name in files.names()}
    make = lambda config, files: offer.build(context.settings, config, files)  # noqa: E731
    return formats.SUITE, formats.Formats(make, stored.config(), stored.tensors(), plain)


def _proposer(args: argparse.Namespace, context: CommandContext, offer: Offer) -> tuple[Suite[Any], Any]:
    from infer_testing import proposers

    return proposers.SUITE, proposers.Proposers(lambda given: offer.build(context.settings, given))


def _tool_format(args: argparse.Namespace, context: CommandContext, offer: Offer) -> tuple[Suite[Any], Any]:
    from infer_testing import tool_formats

    make = lambda tools: offer.build(context.settings, tools)  # noqa: E731
    return tool_formats.SUITE, tool_formats.ToolFormats(make, **_call(args.call))


def _grammar(args: argparse.Namespace, context: CommandContext, offer: Offer) -> tuple[Suite[Any], Any]:
    from infer_testing import grammars

    return grammars.SUITE, grammars.Backends(offer.registration.factory, offer.own(context.settings))


def _call(file: str | None) -> dict[str, Any]:
    """What ``--call`` says. Raises InferError."""
    if file is None:
        raise InferError(f"A tool format is tried on a call: give --call FILE, {CALL}.")
    try:
        given = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InferError(f"--call {file} cannot be read: {one_line(error)}.") from None
    kinds = {"text": str, "name": str, "arguments": dict, "schema": dict, "two": str}
    call: dict[str, Any] = {"schema": {"type": "object"}, "two": ""} | (given if isinstance(given, dict) else {})
    if set(call) != set(kinds) or not call["text"] or not all(isinstance(call[key], kinds[key]) for key in kinds):
        raise InferError(f"--call {file} has to hold {CALL}.")
    return call


def _checkpoint(args: argparse.Namespace) -> Path:
    if args.checkpoint is None:
        raise InferError("This is tried on a checkpoint: give --checkpoint DIR.")
    return Path(args.checkpoint)


_SUBJECTS: dict[str, Callable[[argparse.Namespace, CommandContext, Offer], tuple[Suite[Any], Any]]] = {
    "kernels": _kernels,
    "cache": _cache,
    "scheduler": _scheduler,
    "model": _model,
    "weights": _weights,
    "proposer": _proposer,
    "tool_format": _tool_format,
    "grammar": _grammar,
}
"""Per slot, the suite and what it tries."""

COMMAND = CommandRegistration(
    "check", run, "try what a plugin's contract promises on an installed part", add_arguments=add_arguments
)
