"""The task that clients work through, and what they make of it, without imports that a client's own process lacks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

KEY = "sesame"
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "%s"}}</tool_call>'
SAID = (f"Let me see. {CALL % 'Rome'}{CALL % 'Oslo'}", CALL % "Lima", "Sunny everywhere.")
"""What the scripted model answers after no result of a tool, after two, and after three."""
PLAIN = "Well: é, \\u00e9 and\n{}."
"""What it answers where it has no tools."""
THOUGHT = "Rome, Oslo and Lima."
"""What it thinks before each answer."""
FUNCTION: Any = {
    "name": "get_weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
RANDOM = {"id", "created", "created_at", "completed_at", "timestamp"}


def get_weather(city: str) -> str:
    """The weather of a place."""
    return f"Sunny in {city}."


def prompt(thought: str = THOUGHT) -> str:
    """What the model reads of the whole task and a further question, if its reasoning has come back as ``thought``."""
    thinks = f"<think>{thought}</think>" if thought else ""
    return (
        f"# user: hi\n# assistant: {thinks}{SAID[0]}\n# tool: Sunny in Rome.\n# tool: Sunny in Oslo.\n"
        f"# assistant: {thinks}{SAID[1]}\n# tool: Sunny in Lima.\n# assistant: {thinks}{SAID[2]}\n# user: more\n"
        "# assistant: <think>"
    )


def same(value: Any, apart: Collection[str] = ()) -> Any:
    """A value without its ids and times, what is null in it, and the fields ``apart``."""
    if isinstance(value, dict):
        kept = {
            key: same(inner, apart)
            for key, inner in value.items()
            if key not in RANDOM and not key.endswith("_id") and key not in apart
        }
        return {key: inner for key, inner in kept.items() if inner not in (None, {}, [])}
    return [same(inner, apart) for inner in value] if isinstance(value, list | tuple) else value
