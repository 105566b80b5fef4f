"""The command line: infer serve | generate | chat | demo | bench | plugins | settings."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from infer.commands import bench, demo
from infer.contracts.params import SamplingParams
from infer.errors import EngineDeadError, InferError, capital
from infer.plugins import Plugins
from infer.settings import Loaded, Settings, describe, describe_schema, load_settings, schema, split_arguments
from infer.slots import SLOTS

PLAIN_PARAMS = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Sampling parameters that a command line can say."""
NAMED = {"MODEL": "model.path"}
LOADING = {"--model": "model.path", "--max-model-len": "engine.max_seq_len"}
SERVING = {
    "--host": "server.host",
    "--port": "server.port",
    "--api-key": "server.api_keys",
    "--served-model-name": "server.served_model_name",
}
"""Plain names of the settings that everyone types; other servers have the same."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 for failed work, 2 for what the user can mend."""
    parser = _parser()
    settings_argv, rest = split_arguments(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(rest)
    settings_argv += getattr(args, "plain_settings", ())
    try:
        return _run(args, settings_argv)
    except InferError as error:
        print(f"infer: {error}", file=sys.stderr)
        return 1 if isinstance(error, EngineDeadError) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has left; keep the interpreter from complaining when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Plain(argparse.Action):
    """A flag or an argument that is a setting's other name."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        key = str(self.const)
        given: list[str] = namespace.__dict__.setdefault("plain_settings", [])
        if any(word.startswith(f"--{key}=") for word in given):
            parser.error(f"{key} is given twice; the second is {values!r}.")
        given.append(f"--{key}={values}")


def _plain(sub: argparse.ArgumentParser, flags: Mapping[str, str]) -> None:
    sections = {name: field.annotation for name, field in Settings.model_fields.items()}
    for flag, key in flags.items():
        section, name = key.split(".")
        text = sections[section].model_fields[name].description  # type: ignore[union-attr]
        names: dict[str, Any] = {} if flag.startswith("--") else {"nargs": "?"}
        sub.add_argument(flag, action=_Plain, const=key, default=argparse.SUPPRESS, help=f"{key}: {text}", **names)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infer",
        description="LLM inference whose every backend is a plugin.",
        epilog="Any setting can be given as --section.key value; `infer settings` lists them.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"infer {version('infer-core')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help, epilog=parser.epilog, allow_abbrev=False)
        sub.add_argument("--settings", metavar="FILE", help="settings file (default: INFER_SETTINGS, ./settings.toml)")
        return sub

    serve = command("serve", "serve the model over HTTP")
    _plain(serve, NAMED | LOADING | SERVING)
    generate = command("generate", "answer prompts on the terminal")
    generate.add_argument("prompts", nargs="*", help="texts; none reads one from standard input")
    chat = command("chat", "talk with the model on the terminal")
    chat.add_argument("--system", metavar="TEXT", help="what the conversation begins with")
    _plain(chat, NAMED | LOADING)
    _plain(generate, LOADING)
    for sub in (generate, chat):
        for name in PLAIN_PARAMS:
            flag = {"action": "store_true", "default": None} if name == "ignore_eos" else {}
            many = {"action": "append"} if name == "stop" else {}
            text = SamplingParams.model_fields[name].description
            sub.add_argument(f"--{name.replace('_', '-')}", help=text, **flag, **many)  # type: ignore[arg-type]
    timeline = command("demo", "print a timeline of steps, chunked prefill on and off side by side")
    demo.add_arguments(timeline)
    measure = command("bench", "measure the workloads over HTTP")
    bench.add_arguments(measure)
    for sub in (timeline, measure):
        _plain(sub, LOADING)
    plugins = command("plugins", "list what is installed, what is chosen, and why")
    plugins.add_argument("--json", action="store_true")
    settings = command("settings", "show each setting's value and source")
    settings.add_argument("--json", action="store_true")
    settings.add_argument("--json-schema", action="store_true", help="print the schema of settings.toml")
    return parser


def _run(args: argparse.Namespace, settings_argv: Sequence[str]) -> int:
    plugins = Plugins.discover()
    if args.command == "settings" and args.json_schema:
        print(json.dumps(schema(plugins).model_json_schema(), indent=2))
        return 0
    loaded = load_settings(plugins, file=args.settings, argv=settings_argv)
    logging.basicConfig(
        level=loaded.settings.log.level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    match args.command:
        case "serve":
            from infer.server.app import run

            run(loaded.settings, plugins)
            return 0
        case "generate":
            return _generate(args, loaded, plugins)
        case "chat":
            from infer.commands import chat

            return chat.main(loaded.settings, plugins, _params(args, {"max_tokens": None}), args.system)
        case "demo":
            return demo.main(loaded.settings, plugins, args)
        case "bench":
            file = ("--settings", args.settings) if args.settings else ()
            return bench.main(args, [*file, *settings_argv])
        case "plugins":
            return _plugins(args, loaded, plugins)
        case _:
            return _settings(args, loaded, plugins)


def _params(args: argparse.Namespace, defaults: dict[str, object]) -> SamplingParams:
    from pydantic import ValidationError

    given = {name: v for name in PLAIN_PARAMS if (v := getattr(args, name, None)) is not None}
    try:
        return SamplingParams.model_validate(defaults | given)
    except ValidationError as error:
        first = error.errors()[0]
        what = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            raise InferError(f"{capital(what)}.") from None
        flag = str(first["loc"][0]).replace("_", "-")
        raise InferError(f"--{flag} {first['input']}: {what}.") from None


def _generate(args: argparse.Namespace, loaded: Loaded, plugins: Plugins) -> int:
    from infer.llm import LLM

    params = _params(args, {"max_tokens": 128})
    prompts = args.prompts if args.prompts and args.prompts != ["-"] else [sys.stdin.read()]
    with LLM.from_settings(loaded.settings, plugins) as llm:
        params = llm.served.defaulted(params)
        if len(prompts) > 1:
            answers = llm.generate(prompts, params)
            for prompt, answer in zip(prompts, answers, strict=True):
                print(f"{prompt}{answer.text}\n")
            return int(any(answer.finish_reason == "error" for answer in answers))
        print(prompts[0], end="", flush=True)
        for event in llm.stream(prompts[0], params):
            print(event.text, end="", flush=True)
        print()
        if event.finish_reason == "error":
            print(f"infer: {event.error}", file=sys.stderr)
        return int(event.finish_reason == "error")


def _plugins(args: argparse.Namespace, loaded: Loaded, plugins: Plugins) -> int:
    """The resolved table; exit code 2 when a choice cannot be made."""
    from infer.assemble import choose_device

    rows: list[dict[str, str]] = []
    failed = None
    for slot, offers in plugins.offers.items():
        chosen, why, all_of_them = None, "", ""
        about, asked = SLOTS[slot], "auto"
        if about.setting is not None:
            section, key = about.setting.split(".")
            asked = getattr(getattr(loaded.settings, section), key)
            why = f"{about.setting} = {asked} (from {loaded.sources[about.setting]})"
        if about.when and asked == "auto":
            all_of_them, why = "when met", about.when
        elif about.setting is None:
            all_of_them = "yes"
        else:
            try:
                device = choose_device(loaded.settings.model.device).type
                chosen = None if asked == "none" else plugins.choose(slot, loaded.settings, [device])
            except InferError as error:
                failed = error
        for offer in offers:
            unavailable = offer.registration.unavailable
            taken = offer is chosen or (all_of_them and not unavailable)
            rows.append(
                {
                    "slot": slot,
                    "name": offer.name,
                    "distribution": offer.distribution,
                    "version": offer.version,
                    "chosen": (all_of_them or "yes") if taken else "no",
                    "why": why if taken else unavailable or "",
                    "description": offer.registration.description,
                }
            )
    for b in plugins.broken:
        rows.append(
            {
                "slot": "-",
                "name": "-",
                "distribution": b.distribution,
                "version": b.version,
                "chosen": "broken",
                "why": b.reason,
                "description": "",
            }
        )
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        columns = ("slot", "name", "distribution", "version", "chosen", "why", "description")
        print(_table([columns, *(tuple(row[c] for c in columns) for row in rows)]))
    if failed is not None:
        raise failed
    return 0


def _settings(args: argparse.Namespace, loaded: Loaded, plugins: Plugins) -> int:
    values = dict(describe(loaded.settings))
    if args.json:
        both = {key: {"value": value, "source": loaded.sources[key]} for key, value in values.items()}
        print(json.dumps(both, indent=2, default=str))
        return 0
    descriptions = {key: text for key, text, _ in describe_schema(schema(plugins))}
    rows = [
        (key, json.dumps(value, default=str), loaded.sources[key], descriptions[key]) for key, value in values.items()
    ]
    print(_table([("key", "value", "source", "what it is"), *rows]))
    return 0


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
