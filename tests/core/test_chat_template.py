"""Chat templates render as transformers renders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.models.checkpoints import tokenizer, write_checkpoint
from tests.serving import TEMPLATE

from infer.chat_template import ChatTemplate
from infer.checkpoint import Checkpoint
from infer.errors import CheckpointError

TOOLS = [{"type": "function", "function": {"name": "f", "description": "ä < b & c", "parameters": {"b": 1, "a": [2]}}}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "  hi <there>  "},
    {
        "role": "assistant",
        "content": "<think>x</think>ok",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": "ü"}}}],
    },
    {"role": "tool", "content": "42"},
]
SOURCES = {
    "small": TEMPLATE,
    "whitespace": "{% for m in messages %}\n    {% if loop.first %}\n  {{ bos_token }}\n    {% endif %}\n{{ m.role }}\n"
    "{% endfor %}\n",
    "loopcontrols": "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% endfor %}",
    "tojson": "{{ tools | tojson(indent=2) }}{{ messages | tojson }}{{ messages[0] | tojson(sort_keys=true) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ custom }}",
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("prompted", [True, False])
def test_as_transformers_renders(name: str, prompted: bool) -> None:
    reference = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer(), bos_token="<bos>", eos_token="<eos>"
    )
    how: dict[str, Any] = {"tools": TOOLS, "add_generation_prompt": prompted, "custom": "&", "enable_thinking": True}
    expected = reference.apply_chat_template(MESSAGES, chat_template=SOURCES[name], tokenize=False, **how)
    ours = ChatTemplate(SOURCES[name], {"bos_token": "<bos>", "eos_token": "<eos>"})
    assert ours.render(MESSAGES, **how) == expected


def test_what_a_template_cannot_do() -> None:
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 1 / 0 }}",
    ):
        with pytest.raises(ValueError, match="the chat template says"):
            ChatTemplate(source, {}).render(MESSAGES)
    with pytest.raises(ValueError, match="not valid"):
        ChatTemplate("{% if %}", {}).render(MESSAGES)


def test_where_checkpoints_keep_them(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", "llama")
    assert Checkpoint(folder).chat_template is None
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    assert Checkpoint(folder).chat_template == "one"
    assert Checkpoint(folder).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    config.write_text(json.dumps({"chat_template": several}))
    assert Checkpoint(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert Checkpoint(folder).chat_template == "file"
    (folder / "chat_template.jinja").unlink()
    config.write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(CheckpointError, match="neither a text"):
        _ = Checkpoint(folder).chat_template
