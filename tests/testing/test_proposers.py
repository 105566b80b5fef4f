"""``check_proposer``: ours and the documented one pass, and it names the bugs that are planted in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tests.core.engine.test_schedulers import documented
from tests.examples import seeded
from tests.testing.planted import Bug, Bugs, caught

from infer.contracts.proposer import DraftRequest, ProposerContext, ProposerProtocol
from infer.contracts.request import Request
from infer_speculation.ngram import NgramProposer, NgramSettings
from infer_speculation.suffix import SuffixProposer, SuffixSettings
from infer_testing import check_proposer
from infer_testing.proposers import VOCAB

MakeProposer = Callable[[ProposerContext], ProposerProtocol]
planted: Bugs[type[NgramProposer]] = Bugs([])
Cycle = documented("class Cycle")["Cycle"]


@pytest.mark.parametrize(
    "make",
    [
        lambda context: NgramProposer(NgramSettings()),
        lambda context: SuffixProposer(SuffixSettings()),
        lambda context: Cycle(8),
    ],
)
@pytest.mark.draws
@seeded()
def test_ours_pass(make: MakeProposer, seed: int) -> None:
    check_proposer(make, seed=seed)


@planted.each
def test_a_planted_bug_is_named(bug: Bug[type[NgramProposer]]) -> None:
    caught(bug, lambda **keys: check_proposer(lambda context: bug.make(NgramSettings()), **keys))


@planted("one token more is proposed than may be", "proposals", r"tokens are proposed for r\d+ where \d may be")
class OneMore(NgramProposer):
    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        return super().propose(
            [draft_request._replace(most=draft_request.most + 1) for draft_request in draft_requests]
        )


@planted("who has no idea is left out", "proposals", r"gives \d proposals for \d draft requests")
class LeavesOut(NgramProposer):
    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [drafts for drafts in super().propose(draft_requests) if drafts]


@planted("ids beyond the vocabulary are proposed", "proposals", r"token \d+ is proposed for r\d+; ids are 0 to 49")
class Beyond(NgramProposer):
    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [[token + VOCAB // 2 for token in drafts] for drafts in super().propose(draft_requests)]


@planted("drafts are added to the engine's list", "proposals", "writes to the tokens of")
class Adds(NgramProposer):
    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        found = super().propose(draft_requests)
        for draft_request, drafts in zip(draft_requests, found, strict=True):
            assert isinstance(draft_request.token_ids, list)
            draft_request.token_ids.extend(drafts)
        return found


@planted("a request that has ended is remembered by its id", "ends", "end has not made it forget|raised IndexError")
class Remembers(NgramProposer):
    def end(self, request_id: str) -> None:
        pass


@planted("a learner writes to what it learns from", "proposals", "learn writes to the tokens of")
class Writes(NgramProposer):
    def learn(self, request: Request, token_ids: Sequence[int]) -> None:
        assert isinstance(token_ids, list)
        token_ids.clear()


@planted("a learner shows everybody what has a salt", "salts", "is proposed after a request with a salt of its own")
class Tells(NgramProposer):
    def learn(self, request: Request, token_ids: Sequence[int]) -> None:
        self.last = [*token_ids]

    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        last = getattr(self, "last", [])
        return super().propose(draft_requests) if not last else [last[: each.most] for each in draft_requests]


@planted("requests that have ended are kept", "ends", "still holds the request's id")
class Hoards(NgramProposer):
    def end(self, request_id: str) -> None:
        super().end(request_id)
        self._over = [*getattr(self, "_over", []), request_id]


@planted("only those that were asked about can end", "proposals", "raised KeyError")
class Strict(NgramProposer):
    def end(self, request_id: str) -> None:
        del self._indices[request_id]
