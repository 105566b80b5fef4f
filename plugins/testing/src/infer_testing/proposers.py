"""What ``ProposerProtocol`` promises, tried on one proposer with requests whose texts grow."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tokenizers import Tokenizer, models

from infer.contracts.params import SamplingParams
from infer.contracts.proposer import DraftRequest, LearningProposer, ProposerContext, ProposerProtocol, SecondModel
from infer.contracts.request import Request
from infer.contracts.sections import EngineSettings
from infer.errors import InferError
from infer.kernels.reference import ReferenceKernels
from infer_testing.suite import Suite, Violation

VOCAB = 50
LONGEST = 200
MakeProposer = Callable[[ProposerContext], ProposerProtocol]


@dataclass
class Proposers:
    """What makes the proposer that is tried."""

    make: MakeProposer

    def proposer(self) -> ProposerProtocol:
        tokenizer = Tokenizer(models.WordLevel({chr(0x100 + id): id for id in range(VOCAB)}))
        cpu, kernels = torch.device("cpu"), ReferenceKernels()
        return self.make(ProposerContext(EngineSettings(), tokenizer, VOCAB, LONGEST, cpu, kernels, _no_second))


def _no_second(path: str) -> SecondModel:
    raise InferError("The kit has no second model for a proposer to load.")


SUITE: Suite[Proposers] = Suite("check_proposer")
check = SUITE.check


def check_proposer(make: MakeProposer, *, only: Sequence[str] = (), seed: int = 0, case: int | None = None) -> None:
    """Try everything that ``ProposerProtocol`` promises on the proposers that ``make`` makes. ``only`` names checks,
    ``case`` one case of each. Raises ConformanceError."""
    SUITE.enforce(Proposers(make), only=only, seed=seed, case=case)


def requested(tokens: Sequence[int], id: str) -> Request:
    return Request(tuple(tokens), SamplingParams(max_tokens=100), id=id)


def text_of(draw: random.Random) -> list[int]:
    """One that repeats itself, as a proposer may hope."""
    stem = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 8))]
    return [draw.randrange(VOCAB) if draw.random() < 0.1 else stem[i % len(stem)] for i in range(draw.randint(1, 60))]


def end(proposer: ProposerProtocol, request: Request, tokens: list[int]) -> None:
    """Tell the proposer that a request has ended with these tokens."""
    before = [*tokens]
    if isinstance(proposer, LearningProposer):
        proposer.learn(request, tokens)
    proposer.end(request.id)
    if tokens != before:
        raise Violation(f"learn writes to the tokens of {request.id}, which are the engine's own")


def checked(draft_requests: Sequence[DraftRequest], found: Any) -> list[list[int]]:
    """The proposals. Raises Violation if they are not what was asked for."""
    try:
        proposals = [[*proposal] for proposal in found]
    except TypeError:
        raise Violation(f"propose gives {found!r}, not a list of token ids per draft request") from None
    if len(proposals) != len(draft_requests):
        raise Violation(f"propose gives {len(proposals)} proposals for {len(draft_requests)} draft requests")
    for draft_request, proposal in zip(draft_requests, proposals, strict=True):
        if len(proposal) > draft_request.most:
            raise Violation(
                f"{len(proposal)} tokens are proposed for {draft_request.request.id} where {draft_request.most} may be"
            )
        for token in proposal:
            if isinstance(token, bool) or not isinstance(token, int):
                raise Violation(
                    f"{token!r} is proposed for {draft_request.request.id}: a {type(token).__name__}, not a token id"
                )
            if not 0 <= token < VOCAB:
                raise Violation(f"token {token} is proposed for {draft_request.request.id}; ids are 0 to {VOCAB - 1}")
    return proposals


@check(
    "propose gives one list per draft request, of at most so many ids of the vocabulary, and leaves the texts alone", 60
)
def proposals(p: Proposers, draw: random.Random) -> None:
    proposer = p.proposer()
    texts: dict[str, tuple[Request, list[int]]] = {}
    for step in range(25):
        if len(texts) < 5 and draw.random() < 0.3:
            text = text_of(draw)
            texts[f"r{step}"] = requested(text, f"r{step}"), text
        draft_requests = [
            DraftRequest(request, text, draw.choice([1, 2, 8]))
            for request, text in texts.values()
            if draw.random() < 0.7 and len(text) < LONGEST - 10
        ]
        before = [[*draft_request.token_ids] for draft_request in draft_requests]
        found = checked(draft_requests, proposer.propose(draft_requests))
        for draft_request, old in zip(draft_requests, before, strict=True):
            if list(draft_request.token_ids) != old:
                raise Violation(
                    f"propose writes to the tokens of {draft_request.request.id}, which are the engine's own"
                )
        for draft_request, proposal in zip(draft_requests, found, strict=True):
            _, text = texts[draft_request.request.id]
            text += [*proposal[: draw.randint(0, len(proposal))], draw.randrange(VOCAB)]
        if texts and draw.random() < 0.2:
            end(proposer, *texts.pop(draw.choice([*texts])))
    proposer.end("never asked about")


@check("A request that has ended is forgotten: its id may come again for another text, and nothing of it stays", 3)
def ends(p: Proposers, draw: random.Random) -> None:
    proposer, fresh = p.proposer(), p.proposer()
    old, new = [1, 2, 3, 4] * 8, text_of(draw)
    for text, each in ((old, proposer), (new, proposer)):
        request = requested(text, "r")
        draft_request = DraftRequest(request, list(text), 8)
        last = checked([draft_request], each.propose([draft_request]))[0]
        each.end("r")
    request = requested(new, "r")
    draft_request = DraftRequest(request, list(new), 8)
    expected = checked([draft_request], fresh.propose([draft_request]))[0]
    if last != expected:
        raise Violation(
            f"for an id that was another request's before, {last} is proposed; a new proposer proposes {expected}: "
            "end has not made it forget"
        )
    id = "".join(["kept", str(draw.randrange(10**6))])
    request, lists = requested(new, id), [list(new) for _ in range(3)]
    held = (id, request, *lists)
    before = [sys.getrefcount(x) for x in held]
    for i in range(len(lists)):
        checked([DraftRequest(request, lists[i], 8)], proposer.propose([DraftRequest(request, lists[i], 8)]))
    end(proposer, request, lists[-1])
    gc.collect()
    after = [sys.getrefcount(x) for x in held]
    for what, least, count in zip(("id", "request", *["text"] * 3), before, after, strict=True):
        if count > least:
            raise Violation(f"after end, the proposer still holds the request's {what}: its memory grows for ever")


@check("What is learned from a request with a cache_salt changes nothing for others", 20)
def salts(p: Proposers, draw: random.Random) -> None:
    proposer, fresh = p.proposer(), p.proposer()
    secret = [draw.randrange(VOCAB) for _ in range(60)]
    end(proposer, replace(requested(secret[:1], "secret"), cache_salt="mine"), secret)
    for salt in ("", "other"):
        text = secret[: draw.randint(20, 50)]
        request = replace(requested(text[:1], "asks"), cache_salt=salt)
        found, expected = (
            checked([draft_request], each.propose([draft_request]))[0]
            for each, draft_request in ((each, DraftRequest(request, list(text), 8)) for each in (proposer, fresh))
        )
        if found != expected:
            raise Violation(f"{found} is proposed after a request with a salt of its own, and {expected} without it")
        for each in (proposer, fresh):
            each.end("asks")
