"""Structured outputs. llguidance does the work."""

from __future__ import annotations

from pydantic import BaseModel

from infer.contracts.grammar import GrammarBackendFactory, GrammarBackendProtocol, Vocabulary
from infer.contracts.registration import Registration, hookimpl  # a child process imports this, and not all of infer

INFER_PLUGIN_API = 2


@hookimpl
def infer_grammar_backends() -> list[Registration[GrammarBackendFactory]]:
    return [Registration("llguidance", make, "JSON schemas, regular expressions, grammars in Lark's notation")]


def make(vocabulary: Vocabulary, settings: BaseModel) -> GrammarBackendProtocol:
    from infer_llguidance.backend import LLGuidance  # when there is a model, since importing it takes a while

    return LLGuidance(vocabulary)
