"""A plugin for pytest in llama.cpp's checkout: infer's server in place of llama-server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest
import scripted

import infer_llamacpp

ABSENT = {
    "model_draft": "a draft model",
    "lora_files": "adapters in GGUF",
    "mmproj_url": "images",
    "server_embeddings": "an embedding model",
    "server_reranking": "a reranker",
    "slot_save_path": "slots that are saved",
}
"""Options of servers that need what the demo model is not."""


def started(process: Any, **_: object) -> None:
    """In place of ``ServerProcess.start``."""
    if found := [what for name, what in ABSENT.items() if getattr(process, name)]:
        pytest.skip(f"needs {found[0]}")
    if process.model_hf_repo and "gemma" in process.model_hf_repo:
        pytest.skip("needs images")
    chat_template = process.chat_template_file or scripted.template(process.reasoning_format == "deepseek")
    server: dict[str, Any] = {"served_model_name": process.model_alias or "tinyllama", "aliases": ["*"]}
    if process.api_key:
        server["api_keys"] = process.api_key
    length = min(process.n_ctx or scripted.CONTEXT, scripted.CONTEXT) // (process.n_slots or 1)
    running = scripted.start(
        [infer_llamacpp],
        model={"chat_template": str(Path(chat_template).resolve())},
        engine={"max_seq_len": length},
        server=server,
    )
    address = urlsplit(running.url)
    process.server_host, process.server_port = address.hostname, address.port


def addressed(process: Any, path: str, host: str | None = None) -> str:
    """In place of ``ServerProcess.make_url``: llama-server has OpenAI's routes without /v1, too."""
    own = path.startswith(("/chat/completions", "/completions", "/responses", "/models"))
    return f"http://{process.server_host}:{process.server_port}{'/v1' if own else ''}{path}"


def pytest_configure(config: Any) -> None:
    scripted.follow_script()
    config.pluginmanager.register(scripted.Reports())


def streamed(request: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """In place of ``ServerProcess.make_stream_request``: chats' first chunk has no text, where infer and OpenAI have an
    empty one. Nearly all tests of streams would end there."""

    def stream(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for chunk in request(*args, **kwargs):
            for choice in chunk.get("choices", ()):
                if "role" in choice.get("delta", ()) and not choice["delta"].get("content"):
                    choice["delta"]["content"] = None
            yield chunk

    return stream


def scripted_too(item: Any) -> bool:
    """Whether a slow test, which loads a model from the hub, is as good with the script: one model stands for all."""
    return "reasoning_model" in item.name or ("Qwen2.5-7B" in item.name and "chatml" not in item.name)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    utils: Any = sys.modules["utils"]
    utils.ServerProcess.start, utils.ServerProcess.make_url = started, addressed
    utils.ServerProcess.make_stream_request = streamed(utils.ServerProcess.make_stream_request)
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    left = [item for item in items if item.get_closest_marker("slow") and not scripted_too(item)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


# Before conftest.py is imported, which is before ``pytest_configure``.
sys.modules["wget"] = ModuleType("wget")
