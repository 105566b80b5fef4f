"""python -m benchmarks.agents [--agent NAME ...] [--shape NAME] [--json FILE] [SETTING ...]

How soon coding agents get the first token of their second turn, whose prompt is in the cache but for what is new. The
agents are the real ones, of `make test-all`, with prompts of their own; the model has a published one's shape and no
trained weights. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from benchmarks.shapes import CONFIGS, write
from tests.agents.recorder import ENDS, MESSAGES, cached, put_together
from tests.agents.starting import AGENTS, GPT, started
from tests.serving import TEMPLATE

import infer_demo
from infer_bench.bench import machine, server
from infer_server.http.sockets import bind, listen

CONTEXT = 1 << 16
FIRST = (b"event: content_block_delta", b'"type": "response.output_text.delta"')
"""What a stream has once it has a token."""
SHORT = {"type": "json_schema", "schema": {"const": "done"}}
"""What answers are held to: a model without trained weights would not end them."""


@dataclass(frozen=True)
class Turn:
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    """From the whole request to the first token, as the agent sees it."""


class Proxy:
    """Between an agent and the server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self.turns: list[Turn] = []

    async def handle(self, http: web.Request) -> web.StreamResponse:
        data, path = await http.read(), http.path
        if http.method == "POST":
            body: dict[str, Any] = json.loads(data)
            key = "output_config" if path == MESSAGES else "text"
            data = json.dumps(body | {key: (body.get(key) or {}) | {"format": SHORT}}).encode()
        names = ("host", "accept-encoding", "content-length")
        headers = {name: value for name, value in http.headers.items() if name.lower() not in names}
        began, first, read = time.perf_counter(), None, b""
        async with self._session.request(
            http.method, self._url + str(http.rel_url), data=data, headers=headers
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(http)
            async for part in answer.content.iter_any():
                read += part
                if first is None and any(mark in read for mark in FIRST):
                    first = time.perf_counter() - began
                if first is not None and ENDS[path] in read and read.endswith(b"\n\n"):
                    self._note(path, read, first)  # before the agent has it, which may leave at once
                await response.write(part)
            await response.write_eof()
            if answer.status != 200:
                print(f"{path} was answered {answer.status}: {read[-500:].decode()}", file=sys.stderr)
        return response

    def _note(self, path: str, read: bytes, ttft_s: float) -> None:
        answer = put_together(path, read)
        found = cached(path, answer)
        total = answer["usage"]["input_tokens"] + (found if path == MESSAGES else 0)
        self.turns.append(Turn(total, found, ttft_s))


async def two_turns(name: str, url: str, folder: Path) -> tuple[Turn, Turn]:
    """The first and second turn of one session, which is gone on with by another process."""
    agent = AGENTS[name]
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        proxy, app = Proxy(session, url), web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", proxy.handle)
        async with listen(app, bind("127.0.0.1", 0)) as own:
            for words in (agent.begin, agent.go_on):
                async with started(agent, own, folder, *words) as process:
                    said, _ = await process.communicate()
                if process.returncode:
                    raise SystemExit(f"{name} ended with code {process.returncode}: {said.decode()}")
    if len(proxy.turns) != 2:
        raise SystemExit(f"{name} asked {len(proxy.turns)} times instead of twice: {said.decode()}")
    first, second = proxy.turns
    return first, second


def checkpoint(folder: Path, shape: str) -> Path:
    """A model of this shape, which reads text by the demo's tokenizer and a small chat template without reasoning."""
    write(folder, {**CONFIGS[shape], "max_position_embeddings": CONTEXT, "eos_token_id": 0})
    source = Path(infer_demo.__file__).parent / "checkpoint"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((source / name).read_text())
    (folder / "template.jinja").write_text(TEMPLATE.replace("{% if enable_thinking %}<think>{% endif %}", ""))
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__)
    parser.add_argument("--agent", nargs="+", choices=["claude", "codex", f"codex-{GPT}"], default=["claude", "codex"])
    parser.add_argument("--shape", choices=list(CONFIGS), default="Qwen3-0.6B")
    parser.add_argument("--json", type=Path)
    args, more = parser.parse_known_args(argv)
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as made:
        os.environ["XDG_STATE_HOME"] = f"{made}/state"
        folder = checkpoint(Path(made, "model"), args.shape)
        settings = {
            "model.path": folder,
            "model.load_format": "dummy",
            "model.chat_template": folder / "template.jinja",
            "engine.max_seq_len": CONTEXT,
            "engine.max_batch_size": 1,
            "log.level": "warning",
            "server.max_body_bytes": 1 << 24,
            "server.aliases": GPT,
        }
        print(f"{'':16}{'turn':>5}{'prompt':>9}{'cached':>9}{'':>8}{'TTFT':>11}{'ratio':>8}")
        for name in args.agent:
            with server([*(f"--{key}={value}" for key, value in settings.items()), *more]) as url:
                turns = asyncio.run(two_turns(name, url, Path(made, name)))
            found[name] = [asdict(turn) for turn in turns]
            for number, turn in enumerate(turns, 1):
                share, ratio = turn.cached_tokens / turn.prompt_tokens, turn.ttft_s / turns[0].ttft_s
                print(
                    f"{name:16}{number:5}{turn.prompt_tokens:9}{turn.cached_tokens:9}{share:8.2%}"
                    f"{turn.ttft_s:9.2f} s{ratio:8.3f}",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "shape": args.shape, "turns": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
