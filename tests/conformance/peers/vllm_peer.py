"""A plugin for pytest in vLLM's checkout: infer's server in place of vLLM's, and nothing in place of vLLM itself."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, MutableSequence, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import anthropic
import openai
import pytest
import scripted
from transformers import AutoTokenizer

CHECKOUT = Path.cwd()
NEEDED = (
    "--enable-prompt-embeds",
    "--tool-server",
    "--speculative-config",
    "--watermark-config",
    "--skip-tokenizer-init",
)
"""Options of servers that infer has nothing like."""


def skip(*_: object, **__: object) -> NoReturn:
    pytest.skip("needs vLLM's own code")


class _Absent(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        skip()

    def __add__(cls, other: object) -> Any:
        skip()


def absent(name: str) -> type:
    """In place of a class or function of vLLM's: whoever calls it is skipped."""
    return _Absent(name, (Exception,), {"__class_getitem__": classmethod(lambda cls, _: cls)})


class Nothing:
    """In place of what describes the machine: it is nothing special."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *_, **__: False


class Hub:
    """In place of the hub: what is fetched is a name."""

    def snapshot_download(self, repo_id: str, **_: object) -> str:
        return repo_id


KNOWN: dict[str, Any] = {
    "current_platform": Nothing(),
    "get_tokenizer": lambda *_, **__: AutoTokenizer.from_pretrained(scripted.FOLDER),
    "hf_api": Hub,
    "VLLM_PATH": CHECKOUT,
    "ROCM_EXTRA_ARGS": [],
    "multi_gpu_only": pytest.mark.skip("needs GPUs"),
    "requires_fp8": pytest.mark.skip("needs GPUs"),
}


class _Module(ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return KNOWN[name] if name in KNOWN else absent(name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "vllm" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class RemoteOpenAIServer:
    """Has the methods of vLLM's class of this name that its tests use."""

    DUMMY_API_KEY = "token"

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **_: object) -> None:
        if found := [name for name in NEEDED if name in vllm_serve_args]:
            pytest.skip(f"needs {found[0]}")
        options: dict[str, str] = {}
        names: list[str] = []
        for each, value in zip(vllm_serve_args, [*vllm_serve_args[1:], ""], strict=True):
            if each.startswith("--"):
                options[each.replace("_", "-")] = value
            elif "=" in each and "lora" in each:
                names.append(each.partition("=")[0])
        # The demo's tokens are shorter.
        length = min(4 * int(options.get("--max-model-len", scripted.CONTEXT)), scripted.CONTEXT)
        chat_template = scripted.template("--reasoning-parser" in options)
        server = {"served_model_name": options.get("--served-model-name", model)}
        if names:  # adapters, which answer as the model does
            server["aliases"] = names  # type: ignore[assignment]
        self._server = scripted.start(
            model={"chat_template": str(chat_template)}, engine={"max_seq_len": length}, server=server
        )

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def url_root(self) -> str:
        return str(self._server.url)

    def url_for(self, *parts: str) -> str:
        return "/".join([self._server.url, *(part.strip("/") for part in parts if part)])

    def _made(self, make: Callable[..., Any], path: str, kwargs: dict[str, Any]) -> Any:
        return make(base_url=self.url_for(path), api_key=self.DUMMY_API_KEY, max_retries=0, timeout=60, **kwargs)

    def get_client(self, **kwargs: Any) -> openai.OpenAI:
        return self._made(openai.OpenAI, "v1", kwargs)  # type: ignore[no-any-return]

    def get_async_client(self, **kwargs: Any) -> openai.AsyncOpenAI:
        return self._made(openai.AsyncOpenAI, "v1", kwargs)  # type: ignore[no-any-return]

    def get_async_client_anthropic(self, **kwargs: Any) -> anthropic.AsyncAnthropic:
        return self._made(anthropic.AsyncAnthropic, "", kwargs)  # type: ignore[no-any-return]


def pytest_configure(config: Any) -> None:
    scripted.follow_script()
    config.pluginmanager.register(scripted.Reports())


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """One model stands for all whose tools are tried. Whether two draws of one format differ is chance."""
    others = [item for item in items if "tests/tool_use/" in item.nodeid and "[hermes]" not in item.nodeid]
    chance = ("::test_structured_outputs_json_chat", "::test_structured_outputs_choice_chat")
    left = [*others, *(item for item in items if item.nodeid.endswith(chance))]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


# Before conftest.py files are imported, which is before ``pytest_configure``.
sys.meta_path.insert(0, _Finder())
sys.modules["pybase64"] = base64
sys.modules["tests.utils"] = _Module("tests.utils")
sys.modules["tests.utils"].__dict__["RemoteOpenAIServer"] = RemoteOpenAIServer
