"""``infer launch``: a coding agent that is pointed at a server of infer."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from typing import NamedTuple

from infer.contracts.command import CommandContext, CommandRegistration
from infer.contracts.sections import ServerSettings
from infer.errors import InferError

OPENCODE_MOST = 32_000
"""The most tokens of an answer that opencode asks for."""
CODEX_SILENCE_MS = 1_800_000
"""How long Codex waits for an event, also of a server or a proxy that sends none while it computes."""
NO_KEY = "none"
"""What agents get as a key that want one, for a server that wants none."""


class Server(NamedTuple):
    """The server that an agent is to use."""

    url: str
    """Without ``/v1``."""
    model: str
    context: int
    """How many tokens prompt and answer may have together."""
    key: str | None


class Start(NamedTuple):
    """How an agent is started."""

    arguments: list[str]
    environment: dict[str, str]
    unset: tuple[str, ...] = ()
    """Variables that would have the agent use another server."""


def _claude(server: Server) -> Start:
    names = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    return Start(
        [],
        {
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": server.key or NO_KEY,
            **{f"ANTHROPIC_{name}": server.model for name in names},
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(server.context),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"),
    )


def _codex(server: Server) -> Start:
    provider = {
        "name": "infer",
        "base_url": f"{server.url}/v1",
        "wire_api": "responses",
        "env_key": "INFER_API_KEY",
        "stream_idle_timeout_ms": CODEX_SILENCE_MS,
    }
    settings = {
        "model": server.model,
        "model_context_window": server.context,
        "model_provider": "infer",
        **{f"model_providers.infer.{name}": value for name, value in provider.items()},
    }
    # JSON's strings and integers are TOML's, too.
    return Start(
        [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")],
        {"INFER_API_KEY": server.key or NO_KEY},
    )


def _opencode(server: Server) -> Start:
    # opencode keeps as much of the context free as an answer may take.
    model = {"limit": {"context": server.context, "output": min(server.context // 4, OPENCODE_MOST)}}
    options = {"baseURL": f"{server.url}/v1", "apiKey": server.key or NO_KEY}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {server.model: model}}
    config = {"model": f"infer/{server.model}", "provider": {"infer": provider}}
    return Start([], {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"})


def _qwen(server: Server) -> Start:
    environment = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": server.key or NO_KEY}
    return Start(["--auth-type", "openai"], environment | {"OPENAI_MODEL": server.model})


AGENTS: Mapping[str, Callable[[Server], Start]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
    "qwen": _qwen,
}
"""By the name of its executable, how an agent is told which server to use."""


def _add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("agent", choices=tuple(AGENTS), help="the agent's command; arguments of its own come after --")
    sub.add_argument("--url", help="the server's address; that of server.host and server.port if it is left out")
    sub.add_argument("--name", metavar="MODEL", help="the model's name; the first that the server has if left out")
    sub.add_argument("--print", action="store_true", help="print what starts the agent, for a shell, and start nothing")


def _run(args: argparse.Namespace, context: CommandContext) -> int:
    from infer_server.http.fetching import address  # imported here, so that other commands need not wait for it

    own = context.settings.server
    url = (args.url or address(own)).rstrip("/").removesuffix("/v1")
    start = AGENTS[args.agent](_found(url, args.name, own))
    words = [args.agent, *start.arguments, *args.passed_on]
    if not args.print:
        if shutil.which(args.agent) is None:
            raise InferError(f"{args.agent} is not installed, or not on PATH; --print shows what would be started.")
        kept = {name: value for name, value in os.environ.items() if name not in start.unset}
        os.execvpe(args.agent, words, kept | start.environment)
    unset = (word for name in start.unset for word in ("-u", name))
    print(shlex.join(["env", *unset, *(f"{name}={value}" for name, value in start.environment.items()), *words]))
    return 0


def _found(url: str, name: str | None, own: ServerSettings) -> Server:
    """The server and its model. Raises InferError."""
    from infer_server.http.fetching import served_models

    try:
        models = {model["id"]: model for model in served_models(url, own, "--url")}
    except ValueError:
        raise InferError(f"--url {url!r} is no address such as http://127.0.0.1:8000.") from None
    if not models or (name is not None and name not in models):
        raise InferError(f"--name {name!r} is not served at {url}; there is {', '.join(models) or 'nothing'}.")
    model = models[name or next(iter(models))]
    if (context := model.get("max_model_len")) is None:
        raise InferError(f"What answers at {url} is no server of infer: it does not tell max_model_len.")
    return Server(url, model["id"], context, own.api_keys[0].get_secret_value() if own.api_keys else None)


COMMAND = CommandRegistration(
    "launch",
    _run,
    "start a coding agent that uses a server of infer",
    add_arguments=_add_arguments,
    passes_on=True,
)
