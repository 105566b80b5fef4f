"""Conversations with tools, whose chat templates drop reasoning and write tools' JSON anew, as those of families with
recurrent layers do: how much of each prompt comes from the cache, and that this changes no bit of an answer."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from tests.puppet import Puppet, say
from tests.serving import Body, Running, chatty, retokened, running
from tests.support import CONFIGS, build_model, random_tensors
from torch import Tensor

from infer import PLUGIN_API, hookimpl
from infer.contracts.model import ModelRegistration, Pass
from infer.contracts.params import SamplingParams
from infer.text.templates import ChatTemplate
from infer_models import infer_models
from infer_server.replies import Reply, ToolUse

LONGEST = 16384
LOUD = 40.0
"""How much a logit is raised: what is told is likeliest by far, and the others are reported beside it."""
CHATML = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")


class Actors:
    """Families whose models say what they are told, as ``Puppet`` does, and compute all else as they always do."""

    INFER_PLUGIN_API = PLUGIN_API

    @hookimpl
    def infer_models(self) -> list[ModelRegistration]:
        return [ModelRegistration("actor", self.make, "says what it is told", architectures=("Actor",))]

    @staticmethod
    def make(config: Any, context: Any, settings: Any) -> Any:
        (family,) = [each for each in infer_models() if each.name == config["acts_as"]]
        model: Any = family.factory(config, context, family.settings())
        forward, logits = model.forward, model.logits

        def placed(batch: Pass) -> Tensor:
            positions_N = batch.positions_T if batch.rows_N is None else batch.positions_T[batch.rows_N]
            return torch.cat([forward(batch), positions_N[:, None].float()], 1)

        def told(hidden_ND: Tensor) -> Tensor:
            logits_NV: Tensor = logits(hidden_ND[:, :-1].contiguous())
            tokens_N = Puppet.said[hidden_ND[:, -1].long()]
            return logits_NV + LOUD * torch.nn.functional.one_hot(tokens_N, logits_NV.shape[1])

        model.forward, model.logits = placed, told
        return model


QWEN = """\
{%- macro turn(role, text) %}{{ '<|im_start|>' ~ role ~ '\\n' ~ text ~ '<|im_end|>\\n' }}{% endmacro -%}
{%- set begin = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set listed -%}
{%- for tool in tools or [] %}{{ '\\n' ~ tool | tojson }}{% endfor -%}
{%- endset -%}
{%- if listed or begin %}{{ turn('system', ('Tools:' ~ listed ~ '\\n\\n' if listed else '') ~ begin) }}{% endif -%}
{%- set at = namespace(asked=0) -%}
{%- for message in messages %}{% if message.role == 'user' %}{% set at.asked = loop.index0 %}{% endif %}{% endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{{ turn('user', message.content) }}
{%- elif message.role == 'assistant' -%}
{%- set said -%}
{%- set thought = (message.reasoning_content or '') | trim -%}
{%- if loop.index0 > at.asked %}{{ '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' }}{% endif -%}
{{ (message.content or '') | trim }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}
{%- for key, value in call.function.arguments | items -%}
{{ '<parameter=' ~ key ~ '>\\n' ~ (value if value is string else value | tojson) ~ '\\n</parameter>\\n' }}
{%- endfor -%}
{{ '</function>\\n</tool_call>' }}
{%- endfor -%}
{%- endset -%}
{{ turn('assistant', said) }}
{%- elif message.role == 'tool' %}{{ turn('user', '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif -%}
"""
GRANITE = """\
{%- macro turn(role, text) -%}
{{ '<|start_of_role|>' ~ role ~ '<|end_of_role|>' ~ text ~ '<|end_of_text|>\\n' }}
{%- endmacro -%}
{%- set begin = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set listed -%}
{%- for tool in tools or [] %}{{ '\\n' ~ tool | tojson }}{% endfor -%}
{%- endset -%}
{%- if listed or begin %}{{ turn('system', begin ~ ('\\nTools:' ~ listed if listed else '')) }}{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{{ turn('user', message.content) }}
{%- elif message.role == 'assistant' -%}
{%- set calls -%}
{%- for call in message.tool_calls or [] -%}
{%- set written = {'name': call.function.name, 'arguments': call.function.arguments} | tojson -%}
{{ '<tool_call>\\n' ~ written ~ '\\n</tool_call>' }}
{%- endfor -%}
{%- endset -%}
{{ turn('assistant', (message.content or '') ~ calls) }}
{%- elif message.role == 'tool' %}{{ turn('user', '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif -%}
"""
LFM = """\
{%- macro turn(role, text) %}{{ '<|im_start|>' ~ role ~ '\\n' ~ text ~ '<|im_end|>\\n' }}{% endmacro -%}
{%- set begin = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set listed = ("List of tools: " ~ tools | tojson) if tools else '' -%}
{%- if begin or listed %}{{ turn('system', begin ~ '\\n' ~ listed) }}{% endif -%}
{%- set at = namespace(last=-1) -%}
{%- for message in messages %}{% if message.role == 'assistant' %}{% set at.last = loop.index0 %}{% endif %}
{%- endfor -%}
{%- for message in messages -%}
{%- set text = message.content or '' -%}
{%- if message.role == 'assistant' -%}
{%- set thought = '<think>' ~ message.reasoning_content ~ '</think>' if message.reasoning_content else '' -%}
{{ turn('assistant', (thought if loop.index0 == at.last else '') ~ text) }}
{%- elif message.role != 'system' %}{{ turn(message.role, text) }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


class Style(NamedTuple):
    """A family, and a template with the structure of its own: what it drops, and what it writes anew."""

    family: str
    template: str
    tokens: Sequence[str]
    """The tokenizer's, of which the second one ends a message."""
    config: Mapping[str, Any]
    """Of a model whose state takes about as much memory as K and V of so many tokens as in one of the family's."""
    opening: str

    def write(self, thought: str, text: str) -> str:
        """What the model says."""
        if self.family == "qwen3_5":  # whose template has opened the reasoning
            return f"{thought}\n</think>\n\n{text}{self.tokens[1]}"
        return f"<think>{thought}</think>{text}{self.tokens[1]}" if self.family == "lfm2" else text + self.tokens[1]

    def call(self, name: str, arguments: Body) -> str:
        """A call as the template would not write it."""
        if self.family == "qwen3_5":
            values = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
            return f"\n<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>"
        if self.family == "lfm2":
            values = (f"{key} = {json.dumps(value)}" for key, value in arguments.items())
            return f"<|tool_call_start|>[{name}({', '.join(values)})]<|tool_call_end|>"
        written = json.dumps({"name": name, "arguments": arguments}, separators=(" , ", " : "))
        return f"<tool_call>{written}</tool_call>"


STYLES = {
    "qwen3.5": Style(
        "qwen3_5",
        QWEN,
        (*CHATML, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        {"linear_num_value_heads": 16, "linear_key_head_dim": 64, "linear_value_head_dim": 48},
        "<|im_start|>assistant",
    ),
    "granite 4": Style(
        "granite_hybrid",
        GRANITE,
        ("<|start_of_role|>", "<|end_of_text|>", "<|end_of_role|>", "<tool_call>", "</tool_call>"),
        {"mamba_n_heads": 16, "mamba_d_head": 16, "mamba_expand": 8, "mamba_d_state": 192},
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    "lfm2": Style("lfm2", LFM, (*CHATML, "<|tool_call_start|>", "<|tool_call_end|>"), {}, "<|im_start|>assistant"),
}
WORDS = "the kettle sang while rain ran down each window and nobody in the kitchen cared to look at any of it"


class Writer:
    """Makes texts up, the same ones each time."""

    def __init__(self) -> None:
        self._draw = random.Random(12)

    def __call__(self, words: int) -> str:
        return " ".join(self._draw.choice(WORDS.split()) for _ in range(words))

    def tool(self, name: str) -> Body:
        properties = {
            "place": {"type": "string", "description": self(20)},
            "days": {"type": "integer", "description": self(20)},
        }
        parameters = {"type": "object", "properties": properties, "required": ["place", "days"]}
        return {"type": "function", "function": {"name": name, "description": self(40), "parameters": parameters}}


def checkpoint(folder: Path, style: Style) -> Body:
    """The section ``model`` of a server of a tiny model of the family, which says what it is told."""
    ids = retokened(folder, *style.tokens)
    config = {**CONFIGS[style.family], **style.config, "vocab_size": 4096, "max_position_embeddings": LONGEST}
    save_file(dict(random_tensors(build_model(config, torch.float32).expected())), folder / "model.safetensors")
    config |= {"architectures": ["Actor"], "acts_as": style.family}
    for name, value in (("config", config), ("generation_config", {"eos_token_id": ids[style.tokens[1]]})):
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "template.jinja").write_text(style.template)
    path = str(folder / "template.jinja")
    return {"path": str(folder), "chat_template": path, "family": "actor", "dtype": "float32"}


async def answer(server: Running, conversation: Body, text: str) -> tuple[Body, float, Any]:
    """The model's next message, which it is told, the share of the prompt that came from the cache, and logprobs."""
    _, counted, _ = await server.post(conversation, "/tokenize")
    told = await say(server, counted["count"], text)
    asked = {"temperature": 0, "logprobs": True, "top_logprobs": 3, "max_tokens": len(told) + 1}
    status, answered, _ = await server.post(conversation | asked, "/v1/chat/completions")
    assert status == 200, answered
    (choice,), usage = answered["choices"], answered["usage"]
    message = {key: value for key, value in choice["message"].items() if value is not None}
    return message, usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"], choice["logprobs"]


@pytest.mark.slow
@pytest.mark.parametrize("name", STYLES)
async def test_nearly_all_of_each_prompt_comes_from_the_cache(name: str, tmp_path: Path) -> None:
    """From the second of twelve turns on, in which the model calls no tool, or one, or two one after the other. The
    budget for states is the default one. The last answers are those of a server without a cache."""
    style, write, shares = STYLES[name], Writer(), list[float]()
    model, engine = checkpoint(tmp_path, style), {"max_seq_len": LONGEST, "max_batch_size": 4}
    tools = [write.tool(f"look_{i}") for i in range(20)]
    messages: list[Body] = [{"role": "system", "content": write(400)}]
    Puppet.said.zero_()
    async with running([Actors()], model=model, engine=engine) as server:

        async def following(text: str) -> Body:
            asked = {"messages": [*messages], "tools": tools}, style.write(write(10), text)
            message, share, logprobs = await answer(server, *asked)
            messages.append(message)
            shares.append(share)
            last[:] = [*last[-2:], (asked, logprobs)]
            return message

        last: list[tuple[tuple[Body, str], Any]] = []
        for turn in range(12):
            messages.append({"role": "user", "content": write(10)})
            for step in range(turn % 3):
                (call,) = (await following(style.call(f"look_{turn}", {"place": write(4), "days": step})))["tool_calls"]
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": write(10)})
            await following(write(10))
    assert min(shares[1:]) >= 0.95, shares
    Puppet.said.zero_()
    cache = {"paged": {"prefix_caching": False}}
    async with running([Actors()], model=model, engine=engine, cache=cache) as server:
        for asked, logprobs in last:
            _, share, alone = await answer(server, *asked)
            assert (share, alone) == (0, logprobs)


@pytest.mark.parametrize("name", STYLES)
def test_how_a_template_begins_the_assistants_messages(name: str) -> None:
    assert ChatTemplate(STYLES[name].template, {}).style.opening == STYLES[name].opening


def test_a_template_that_takes_few_conversations_has_no_known_beginning() -> None:
    source = "{% if messages | length > 1 %}{{ raise_exception('One.') }}{% endif %}{{ messages[0].content }}"
    assert ChatTemplate(source, {}).style.opening == ""


@pytest.mark.parametrize(("steps", "forks"), [(0, (9,)), (1, (9,)), (2, (6, 9)), (3, (3, 9)), (4, ())])
def test_where_later_prompts_may_leave_a_prompt(steps: int, forks: tuple[int, ...]) -> None:
    """After the user's last message, and where the assistant's last one begins; the last opening is the answer's."""
    reply = Reply("", SamplingParams(), ToolUse(), None, None, False, (), opening=(7, 8), steps=steps)
    assert reply.forks([1, 7, 8, 2, 7, 8, 7, 7, 8, 3, 7, 8]) == forks
    assert replace(reply, opening=()).forks([1, 7, 8]) == ()


@pytest.mark.parametrize("states", [False, True])
async def test_a_prompt_is_searched_for_forks_if_the_pool_has_a_use_for_them(
    states: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it has where the model has states."""
    searched: list[int] = []

    def forks(reply: Reply, ids: Sequence[int]) -> tuple[int, ...]:
        searched.append(len(ids))
        return ()

    monkeypatch.setattr(Reply, "forks", forks)
    model = checkpoint(tmp_path, STYLES["lfm2"]) if states else chatty(tmp_path)
    async with running([Actors()], model=model, engine={"max_seq_len": 512}) as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        _, answered, _ = await server.post(body, "/v1/chat/completions")
    assert searched == ([answered["usage"]["prompt_tokens"]] if states else [])
