"""How models write tool calls and mark reasoning."""

from __future__ import annotations

import functools

from infer import hookimpl
from infer.contracts.registration import Registration
from infer.contracts.text import ReasoningFactory, ReasoningTags, ToolFormatRegistration
from infer.text.tool_formats.reader import Script, scripted
from infer_tool_formats import gemma, harmony, mistral, objects, python, sections, xml

INFER_PLUGIN_API = 2


@hookimpl
def infer_tool_formats() -> list[ToolFormatRegistration]:
    """Those that nothing need announce are tried last."""
    xmls = {
        "xml": "functions and their parameters as tags (Qwen3-Coder, Nemotron 3, Seed-OSS)",
        "glm": "keys and values of arguments in tags (GLM 4.5 and later, Hunyuan 3)",
        "minimax": "tags with the names of functions (MiniMax M2 and M3)",
        "dsml": "tags with types of arguments (DeepSeek V3.2 and V4)",
        "minicpm": "tags with names, and CDATA (MiniCPM5)",
        "kimi3": "tags of special tokens (Kimi K3)",
    }
    sectioned = {
        "deepseek": "JSON behind the name, in a section of calls (DeepSeek V3, V3.1 and R1)",
        "kimi": "JSON behind a call's id, in a section of calls (Kimi K2)",
        "solar": "JSON behind the name, in special tokens (Solar Open)",
    }
    return [
        ToolFormatRegistration(
            "tags",
            scripted(objects.tagged),
            "JSON objects between tags (Qwen, Hermes, Command, Apertus, Nemotron Nano, GigaChat)",
            marks=objects.TOKENS,
            forms=(objects.FORM,),
            syntax=objects.TAGGED_SYNTAX,
            unless=(objects.KEYED,),
        ),
        *(
            ToolFormatRegistration(
                name,
                scripted(functools.partial(xml.xml, name=name)),
                says,
                marks=xml.TOKENS[name],
                forms=xml.FORMS.get(name, ()),
                syntax=xml.SYNTAX.get(name, ()),
            )
            for name, says in xmls.items()
        ),
        *(
            ToolFormatRegistration(
                name,
                scripted(functools.partial(sections.sections, name=name)),
                says,
                marks=sections.TOKENS[name],
                forms=sections.FORMS[name],
                syntax=sections.SYNTAX[name],
            )
            for name, says in sectioned.items()
        ),
        ToolFormatRegistration(
            "action",
            scripted(objects.announced),
            "JSON objects behind Action: (Command R)",
            forms=(objects.FORM,),
            syntax=objects.ANNOUNCED_SYNTAX,
        ),
        ToolFormatRegistration(
            "gemma",
            scripted(gemma.gemma),
            "objects with tokens around strings (Gemma 4)",
            marks=gemma.TOKENS,
            forms=gemma.FORMS,
            syntax=gemma.SYNTAX,
        ),
        ToolFormatRegistration(
            "mistral",
            scripted(mistral.mistral),
            "JSON behind [TOOL_CALLS] (Mistral)",
            marks=mistral.TOKENS,
            forms=mistral.FORMS,
            syntax=mistral.SYNTAX,
        ),
        ToolFormatRegistration(
            "harmony",
            scripted(harmony.harmony),
            "messages to functions, in channels (gpt-oss)",
            marks=harmony.TOKENS,
            forms=harmony.FORMS,
        ),
        ToolFormatRegistration(
            "python",
            scripted(python.python),
            "Python's calls (Llama 4, LFM2)",
            priority=-10,
            marks=python.TOKENS,
            syntax=python.SYNTAX,
        ),
        ToolFormatRegistration(
            "json",
            scripted(objects.bare),
            "bare JSON objects (Llama 3)",
            priority=-20,
            marks=(objects.PYTHON_TAG,),
            forms=(objects.FORM,),
            syntax=objects.BARE_SYNTAX,
        ),
    ]


@hookimpl
def infer_reasoning_formats() -> list[Registration[ReasoningFactory]]:
    channels = ReasoningTags(
        harmony.OPENING,
        harmony.CLOSING,
        lambda tools: Script(functools.partial(harmony.harmony, tools=tools)),
        harmony.FORMS,
    )
    tags = {
        "think": ("<think>", "</think>", "between <think> tags"),
        "minimax_m3": ("<mm:think>", "</mm:think>", "between <mm:think> tags (MiniMax M3)"),
        "hunyuan": ("<think:opensource>", "</think:opensource>", "between <think:opensource> tags (Hunyuan 3)"),
        "gemma": ("<|channel>thought", "<channel|>", "in the channel thought (Gemma 4)"),
        "command": ("<|START_THINKING|>", "<|END_THINKING|>", "between <|START_THINKING|> tags (Command)"),
        "apertus": ("<|inner_prefix|>", "<|inner_suffix|>", "between <|inner_prefix|> tags (Apertus)"),
        "mistral": ("[THINK]", "[/THINK]", "between [THINK] tags (Magistral, Ministral 3)"),
        "seed": ("<seed:think>", "</seed:think>", "between <seed:think> tags (Seed-OSS)"),
    }
    return [
        *(
            # Templates of others name </think> as well, to take it out of a history.
            Registration(name, _between(opening, closing), says, priority=0 if name == "think" else 5)
            for name, (opening, closing, says) in tags.items()
        ),
        Registration("harmony", lambda settings: channels, "in the channel analysis (gpt-oss)", priority=10),
    ]


def _between(opening: str, closing: str) -> ReasoningFactory:
    return lambda settings: ReasoningTags(opening, closing)
