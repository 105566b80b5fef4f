from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

import infer_llamacpp
from infer_server.testing import serving
from infer_testing import tiny_checkpoint

TEMPLATE = """\
{%- for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}
{%- for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tiny_checkpoint("LlamaForCausalLM")
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    engine, model = {"max_batch_size": 3}, {"chat_template": str(template)}
    with serving(str(folder), plugins=[infer_llamacpp], engine=engine, model=model) as server:
        yield server.url


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_props_say_what_is_served(url: str) -> None:
    props = ask(f"{url}/props")
    assert props["total_slots"] == 3
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["default_generation_settings"]["params"]["temperature"] == 1.0
    assert props["chat_template"] == TEMPLATE
    assert Path(props["model_path"]).is_dir()


def test_a_template_is_applied(url: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert ask(f"{url}/apply-template", {"messages": messages}) == {"prompt": "<system>Be brief.<user>Hi<assistant>"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    given = {"messages": messages[1:], "tools": [tool], "temperature": 0.5}
    assert ask(f"{url}/apply-template", given) == {"prompt": "<user>Hi[f]<assistant>"}


def test_what_cannot_be_applied_is_said(url: str) -> None:
    with pytest.raises(HTTPError) as failure:
        ask(f"{url}/apply-template", {"messages": [{"role": "wizard", "content": "Hi"}]})
    assert failure.value.code == 400
    assert "Unknown role wizard" in json.load(failure.value)["error"]["message"]


def test_the_routes_are_described(url: str) -> None:
    paths = ask(f"{url}/openapi.json")["paths"]
    assert "get" in paths["/props"]
    assert "post" in paths["/apply-template"]
