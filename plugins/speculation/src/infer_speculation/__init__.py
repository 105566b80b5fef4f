"""Proposers of draft tokens: n-grams of the text itself, a second, smaller model, and the model's own draft head."""

from __future__ import annotations

from collections.abc import Sequence

from infer import hookimpl
from infer.contracts.proposer import ProposerFactory, ProposerRegistration
from infer.contracts.registration import Registration
from infer_speculation.draft import DraftProposer, DraftSettings
from infer_speculation.mtp import MTPProposer
from infer_speculation.ngram import NgramProposer, NgramSettings

INFER_PLUGIN_API = 2


@hookimpl
def infer_proposers() -> Sequence[Registration[ProposerFactory]]:
    return [
        Registration(
            "ngram",
            lambda context, settings: NgramProposer(settings),
            "what followed the same tokens earlier in prompt and answer",
            NgramSettings,
            priority=10,
        ),
        Registration("draft", DraftProposer, "a second, smaller model", DraftSettings),
        ProposerRegistration("mtp", MTPProposer, "the model's own head for multi-token prediction", draft_head=True),
    ]
