"""Proposers of draft tokens: n-grams of the text itself, and a second, smaller model."""

from __future__ import annotations

from infer import hookimpl
from infer.contracts.proposer import ProposerFactory
from infer.contracts.registration import Registration
from infer_speculation.draft import DraftProposer, DraftSettings
from infer_speculation.ngram import NgramProposer, NgramSettings

INFER_PLUGIN_API = 2


@hookimpl
def infer_proposers() -> list[Registration[ProposerFactory]]:
    return [
        Registration(
            "ngram",
            lambda context, settings: NgramProposer(settings),
            "what followed the same tokens earlier in prompt and answer",
            NgramSettings,
            priority=10,
        ),
        Registration("draft", DraftProposer, "a second, smaller model", DraftSettings),
    ]
