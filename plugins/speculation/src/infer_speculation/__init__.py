"""Proposers of draft tokens: n-grams of the text itself or of all answers, a second, smaller model, and draft heads of
the model."""

from __future__ import annotations

from collections.abc import Sequence

from infer import hookimpl
from infer.contracts.proposer import ProposerFactory, ProposerRegistration
from infer.contracts.registration import Registration
from infer_speculation.draft import DraftProposer, DraftSettings
from infer_speculation.heads import EagleSettings, HeadProposer
from infer_speculation.ngram import NgramProposer, NgramSettings
from infer_speculation.suffix import SuffixProposer, SuffixSettings

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
        Registration(
            "suffix",
            lambda context, settings: SuffixProposer(settings),
            "what followed the same tokens in the text itself or in other answers",
            SuffixSettings,
        ),
        Registration("draft", DraftProposer, "a second, smaller model", DraftSettings),
        ProposerRegistration("mtp", HeadProposer, "the model's own head for multi-token prediction", draft_head=True),
        ProposerRegistration(
            "eagle3",
            HeadProposer,
            "an EAGLE-3 head, in a checkpoint of its own",
            EagleSettings,
            head_path=EagleSettings.head_path,
        ),
    ]
