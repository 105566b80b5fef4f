"""How models write tool calls. Plugins register the formats, by ``infer_tool_formats``."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from infer.contracts.text import CallForm, CallSyntax, PartProtocol, Tools
from infer.errors import PluginError

log = logging.getLogger(__name__)


class ToolFormat(NamedTuple):
    """An installed format. ``reader`` makes the parser of one answer that may call the given tools."""

    name: str
    reader: Callable[[Tools], PartProtocol]
    forms: tuple[CallForm, ...] = ()
    """The ways to write a call in which the checkpoint may be held to a grammar; none if it cannot be."""
    syntax: tuple[CallSyntax, ...] = ()
    """The ways to write an answer that consists of calls; none if no grammar says so."""
    marks: tuple[str, ...] = ()
    """``ToolFormatRegistration.marks``."""


def recognize(formats: Iterable[ToolFormat], text: str, tools: Tools, call: tuple[str, object]) -> ToolFormat | None:
    """The first format that reads ``text`` as the one call (name, arguments) and nothing else; None if there is none. A
    plugin's format that fails is passed over, and the log says why."""
    for format in formats:
        texts = {"call": "", "arguments": "", "content": "", "reasoning": ""}
        try:
            part = format.reader(tools)
            for piece in [*part.push(text), *part.flush()]:
                texts[piece.kind] += piece.text
            if texts["call"] == call[0] and json.loads(texts["arguments"]) == call[1] and not texts["content"].strip():
                return format
        except ValueError:
            continue
        except PluginError as error:
            log.warning("model.tool_format: auto passes over %s: %s", format.name, error)
    return None
