"""Chat templates render as transformers renders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.models.checkpoints import tokenizer, write_checkpoint
from tests.serving import TEMPLATE

from infer.assemble.texts import read_texts
from infer.checkpoint import Checkpoint, Folder
from infer.errors import CheckpointError
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer.text.templates import ChatTemplate

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
    assert Checkpoint(Folder(folder)).chat_template is None
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    assert Checkpoint(Folder(folder)).chat_template == "one"
    assert Checkpoint(Folder(folder)).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    config.write_text(json.dumps({"chat_template": several}))
    assert Checkpoint(Folder(folder)).chat_template == "d"
    assert Checkpoint(Folder(folder)).tool_template == "t"
    (folder / "chat_template.jinja").write_text("file")
    assert Checkpoint(Folder(folder)).chat_template == "file"
    assert Checkpoint(Folder(folder)).tool_template is None
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert Checkpoint(Folder(folder)).chat_template == "file"
    assert Checkpoint(Folder(folder)).tool_template == "tools"
    (folder / "additional_chat_templates" / "tool_use.jinja").unlink()
    (folder / "chat_template.jinja").unlink()
    config.write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(CheckpointError, match="neither a text"):
        _ = Checkpoint(Folder(folder)).chat_template


def test_a_served_template_has_that_for_tools(tmp_path: Path) -> None:
    """Unless the settings name a template, which is for all chats."""
    folder = write_checkpoint(tmp_path / "c", "llama")
    several = [{"name": "tool_use", "template": "with"}, {"name": "default", "template": "without"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    (tmp_path / "own.jinja").write_text("own")
    plugins = Plugins.discover()
    for path, expected in (("none", ["without", "with"]), (str(tmp_path / "own.jinja"), ["own", "own"])):
        loaded = load_settings(plugins, env={}, overrides={"model": {"chat_template": path}}, read_file=False)
        template = read_texts(loaded.settings, plugins, Checkpoint(Folder(folder))).template
        assert template is not None
        kept = ChatTemplate(**json.loads(json.dumps(template.state)))  # as another process has it
        assert [kept.render(MESSAGES, tools=tools) for tools in ([], TOOLS)] == expected


def test_special_tokens_of_old_checkpoints(tmp_path: Path) -> None:
    """As transformers reads them: the map counts unless tokenizer_config.json says which tokens were added."""
    folder = write_checkpoint(tmp_path, "llama")
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<pad>"}))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<bos>"}, "eos_token": "<eos>"})
    )
    for how in ({}, {"added_tokens_decoder": {"0": {"content": "<eos>"}}}):
        config.write_text(json.dumps(json.loads(config.read_text()) | how))
        theirs = transformers.AutoTokenizer.from_pretrained(folder).special_tokens_map
        assert Checkpoint(Folder(folder)).special_tokens == theirs


def test_chats_with_tools_have_a_template_of_their_own(tmp_path: Path) -> None:
    """As in Hermes 2 Pro: the default template knows neither tools nor calls."""
    template = ChatTemplate(ROLE, {}, tool_source=HERMES)
    assert template.render(MESSAGES) == ChatTemplate(ROLE, {}).render(MESSAGES)
    assert template.render(MESSAGES, tools=TOOLS) == ChatTemplate(HERMES, {}).render(MESSAGES, tools=TOOLS)
    assert template.style.call == ChatTemplate(HERMES, {}).style.call is not None
    assert ChatTemplate(**template.state).state == template.state


HERMES = "{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
HERMES += "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
ROLE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
KNOWN = "{% for m in messages if m.role in ['system', 'user', 'assistant'] %}<|{{ m.role }}|>{{ m.content }}<|end|>"
KNOWN += "{% endfor %}"
FIRST = "{% if messages[0].role == 'system' %}<|system|>{{ messages[0].content | trim }}<|end|>{% endif %}"
FIRST += "{% for m in messages if m.role == 'user' %}<|user|>{{ m.content }}<|end|>{% endfor %}"
ALTERNATING = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
ALTERNATING += "{{ raise_exception('roles') }}{% endif %}{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
TO_JSON = "{% for m in messages %}{{ {'role': m.role, 'text': m.content} | tojson }}{% endfor %}"
OWN = ROLE + "{# developer #}"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (ROLE, "<|system|>be brief"),
        (KNOWN, "<|system|>be brief"),
        (FIRST, "<|system|>be brief"),
        (OWN, "<|developer|>be brief"),
        (KNOWN + "{# developer #}", "<|system|>be brief"),
        (TO_JSON, '{"role": "system", "text": " be brief\\n"}'),
        (ALTERNATING, None),
        (NO_SYSTEM, None),
    ],
)
def test_no_instruction_vanishes(source: str, shown: str | None) -> None:
    template = ChatTemplate(source, {})
    messages = [{"role": "developer", "content": " be brief\n"}, {"role": "user", "content": "x"}]
    if shown is None:
        with pytest.raises(ValueError, match=r"roles|does not show messages\[0\], of the role 'system'"):
            template.prompt(messages)
    else:
        assert shown in template.prompt(messages).replace("|> be", "|>be")


def test_of_several_instructions_none_vanishes() -> None:
    messages = [{"role": r, "content": f"{r} {i}"} for i, r in enumerate(["system", "user", "assistant", "developer"])]
    assert "<|system|>developer 3" in ChatTemplate(KNOWN, {}).prompt(messages)
    with pytest.raises(ValueError, match=r"messages\[3\]"):
        ChatTemplate(FIRST, {}).prompt(messages)


TRIMMED = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|end|>\n{% endfor %}" + PROMPT


@pytest.mark.parametrize("text", ["for i in ", "ends\n\n", "  inner", "end", "|", "a <|end|> b ", ""])
def test_a_message_goes_on_where_its_text_ends(text: str) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    how = {"add_generation_prompt": False, "continue_final_message": True}
    assert ChatTemplate(ROLE + PROMPT, {}).prompt(messages, **how) == f"<|user|>x<|end|>\n<|assistant|>{text}"
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer())  # type: ignore[no-untyped-call]
    for source in (ROLE + PROMPT, TRIMMED):
        ours = ChatTemplate(source, {}).prompt(messages, **how)
        if text:
            theirs = reference.apply_chat_template(
                messages, chat_template=source, tokenize=False, continue_final_message=True
            )
            # Where a template strips the blanks, so does transformers; here they stay.
            assert ours.rstrip() == str(theirs).rstrip()
        assert ours.endswith(text.lstrip() if source == TRIMMED else text)


def test_what_cannot_go_on() -> None:
    user = {"role": "user", "content": "x"}
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    for source, last, message in (
        (NO_SYSTEM, {"role": "assistant", "content": "a"}, "whose text the chat template shows"),
        (ROLE, {"role": "assistant", "content": "a", "tool_calls": [call]}, "has tool_calls"),
    ):
        with pytest.raises(ValueError, match=message):
            ChatTemplate(source, {}).prompt([user, last], add_generation_prompt=False, continue_final_message=True)


KNOWS_TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|{{ m.role }}|>"
AFTER = "<|end|>{% endfor %}" + PROMPT
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
EACH = "{% for c in m.tool_calls or [] %}{{ c.function.name }}("
STYLES = {
    "either": (KNOWS_TOOLS + "{{ m.content or '' }}" + CALLS + AFTER, False, None, "<tool_call>"),
    "none with calls": (
        KNOWS_TOOLS + "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}" + AFTER,
        False,
        None,
        "<tool_call>",
    ),
    "a text always": (KNOWS_TOOLS + "{{ m.content + '' }}" + CALLS + AFTER, False, "", "<tool_call>"),
    "shows None": (KNOWS_TOOLS + "{{ m.content }}" + CALLS + AFTER, False, "", "<tool_call>"),
    "text arguments": (
        KNOWS_TOOLS + "{{ m.content or '' }}" + EACH + "{{ c.function.arguments + '' }}){% endfor %}" + AFTER,
        True,
        None,
        'look_up({"place"',
    ),
    "shows arguments as they are": (
        KNOWS_TOOLS + "{{ m.content or '' }}" + EACH + "{{ c.function.arguments }}){% endfor %}" + AFTER,
        True,
        None,
        'look_up({"place"',
    ),
    "hides tools": ((KNOWS_TOOLS + "{{ m.content }}" + CALLS + AFTER).replace("tools | tojson", "''"), False, "", None),
    "no calls": (KNOWS_TOOLS + "{{ m.content }}" + AFTER, False, "", None),
}


@pytest.mark.parametrize("name", STYLES)
def test_a_template_is_given_calls_as_it_takes_them(name: str) -> None:
    source, text_arguments, no_content, written = STYLES[name]
    template = ChatTemplate(source, {})
    found = template.style
    assert (found.text_arguments, found.no_content) == (text_arguments, no_content)
    assert (found.call is None) == (written is None)
    if found.call is not None and written is not None:
        assert found.call.startswith(written)
        assert "<|" not in found.call, "neither what begins a turn nor what ends it"
    if name != "no calls":
        function = {"name": "f", "arguments": {"place": "Oslo"}}
        asked = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}
        shown = template.prompt([{"role": "user", "content": "x"}, asked])
        assert '{"place": "Oslo"}' in shown
        assert "None" not in shown


QWQ = KNOWS_TOOLS + "{% set text = m.content %}{% if m.role == 'assistant' and not loop.last %}"
QWQ += "{% set text = m.content.split('</think>')[-1] %}{% endif %}{% if text %}{{ text }}{% endif %}" + CALLS + AFTER


def test_a_message_of_calls_is_followed_by_others() -> None:
    """QwQ's template takes null as the content of the last message, and splits that of all others."""
    template = ChatTemplate(QWQ, {})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"place": "Oslo"}}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "Sunny."}
    shown = template.prompt([{"role": "user", "content": "x"}, asked, result, asked], tools=TOOLS)
    assert shown.count('{"place": "Oslo"}</tool_call><|end|>'.replace("}<", "}}<")) == 2
    assert "None" not in shown


@pytest.mark.parametrize(
    "shown",
    [
        '{"description": "{{ f.description }}", "parameters": {{ f.parameters | tojson }}}',
        "{{ '// ' + f.description }}{% for name in f.parameters.properties %}{{ name }}{% endfor %}",
        "{{ tool | tojson }}",
    ],
)
def test_a_tool_may_lack_description_and_parameters(shown: str) -> None:
    """Cohere's template writes both as they are, and gpt-oss's adds the description to a text. Where a template can do
    without, it gets what the client gave."""
    source = (
        "{% for tool in tools or [] %}{% set f = tool.function %}{{ f.name }}: "
        + shown
        + "{{ '\\n' }}{% endfor %}"
        + ROLE
    )
    template = ChatTemplate(source, {})
    bare = {"type": "function", "function": {"name": "f"}}
    found = template.prompt([{"role": "user", "content": "x"}], tools=[bare, *TOOLS])
    first, second, _ = found.split("\n", 2)
    assert first in (
        'f: {"description": "", "parameters": {"type": "object", "properties": {}}}',
        "f: // ",
        'f: {"type": "function", "function": {"name": "f"}}',
    )
    assert "ä < b & c" in second


def test_arguments_that_are_no_object_are_refused_only_where_the_template_needs_one() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"place": "Os'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}, asked]
    source = KNOWS_TOOLS + "{{ m.content or '' }}" + CALLS + AFTER
    assert '{\\"place\\": \\"Os' in ChatTemplate(source, {}).prompt(messages)
    each = source.replace(
        "c.function | tojson }}", "c.function.name }}{% for k, v in c.function.arguments.items() %}{{ k }}"
    )
    template = ChatTemplate(each.replace("</tool_call>", "{{ v }}{% endfor %}</tool_call>"), {})
    with pytest.raises(ValueError, match=r"^messages\[1\].tool_calls\[0\].function.arguments must be a JSON object"):
        template.prompt(messages)
    call["function"] = {"name": "f", "arguments": {"place": "Oslo"}}
    assert "placeOslo" in template.prompt(messages)


@pytest.mark.parametrize("opened", ["<think>\n", "<think>\n\n</think>\n\n", "<|channel|>", ""])
def test_a_call_is_told_from_how_a_turn_begins(opened: str) -> None:
    """Where the prompt opens a reasoning that the history does not show, both may begin alike."""
    source = KNOWS_TOOLS + "{{ m.content or '' }}" + CALLS + AFTER.replace("<|assistant|>", "<|assistant|>" + opened)
    assert str(ChatTemplate(source, {}).style.call).startswith('<tool_call>{"name"')
