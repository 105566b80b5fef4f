"""Drafts without a model, of the answers to all requests: where the text's last tokens stand in the text itself or in
an answer that has ended, what followed them there may follow again (suffix decoding; Oliaro et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

import numpy as np
from pydantic import Field, PositiveInt

from infer.contracts.proposer import DraftRequest
from infer.contracts.request import Request
from infer_speculation.ngram import NgramProposer, NgramSettings

SIZES = (16, 8, 4)
"""How many tokens are looked up in other answers. A match of fewer says little about what another one goes on with."""
LONGEST = 32
"""How many tokens of a match are counted."""
NOTHING = -1
"""Stands between two answers."""
WORD = (1 << 64) - 1
POWERS = [pow(0x9E3779B97F4A7C15, i + 1, 1 << 64) for i in range(SIZES[0])]

Words = np.ndarray[tuple[int], np.dtype[np.uint64]]


class SuffixSettings(NgramSettings):
    longest: PositiveInt = Field(4, le=32, description="tokens that are looked up first in the text itself")
    shortest: PositiveInt = Field(2, le=32, description="tokens that are looked up last in the text itself")
    answers: int = Field(
        1 << 20, ge=1 << 10, le=1 << 24, description="tokens of other answers that are remembered, of 16 bytes each"
    )


class Answers:
    """The tokens of answers, end to end, the newest in place of the oldest, and where each n-gram of them occurred
    last. Taking in an answer takes time proportional to its length, and looking one up constant time."""

    def __init__(self, capacity: int) -> None:
        # Pages of zeros take no memory before they are written. Nothing is found at 0, so zeros are no entries.
        self._tokens = np.zeros(capacity, np.int32)
        self._tokens[0] = NOTHING
        self._bits = capacity.bit_length() - 1
        self._tables = {size: np.zeros(1 << self._bits, np.int32) for size in SIZES}
        """Per n, the index behind the last n-gram of each key. Those that share a key displace each other, and entries
        outlive what they were made of, so whoever looks up compares the tokens."""
        self._at = 1

    def add(self, answer: Sequence[int]) -> None:
        if len(answer) <= SIZES[-1]:  # nobody would find it
            return
        tokens = np.fromiter(answer, np.int32, len(answer))[1 - len(self._tokens) :]
        if self._at + len(tokens) + 1 > len(self._tokens):
            self._tokens[self._at - 1 :] = NOTHING
            self._at = 1
        end = self._at + len(tokens)
        self._tokens[self._at : end] = tokens
        self._tokens[end : end + 1] = NOTHING
        followed = tokens[:-1].astype(np.uint64)  # the last n-gram has nothing behind it
        for size, table in self._tables.items():
            if len(followed) >= size:
                keys = _keys(followed, size)
                # Of the same n-gram, the last one stays; if numpy ever chose another, that would be right, too.
                table[keys >> np.uint64(64 - self._bits)] = np.arange(self._at + size, end)
        self._at = end + 1

    def find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """The index of what followed the longest n-gram that the tokens end with, and how many tokens before it are
        the same, up to ``LONGEST``; None if there is none."""
        backwards = tokens[: -SIZES[0] - 1 : -1]
        for size, table in self._tables.items():
            if len(backwards) < size:
                continue
            at = table.item((sum(map(mul, backwards[:size], POWERS)) & WORD) >> 64 - self._bits)
            if at and self._tokens.item(at - 1) == backwards[0]:
                same = matching(tokens, self._tokens[max(0, at - LONGEST) : at].tolist())
                if same >= size:
                    return at, same
        return None

    def after(self, at: int, most: int) -> list[int]:
        """Up to ``most`` tokens of the answer, from an index on."""
        found: list[int] = self._tokens[at : at + most].tolist()
        return found[: found.index(NOTHING)] if NOTHING in found else found


class SuffixProposer(NgramProposer):
    """A ProposerProtocol that copies from the text itself or from other answers, whichever has more of the text's last
    tokens. It proposes at most as many tokens as these are. Requests with a ``cache_salt`` neither see the answers of
    others nor show them theirs, since how long an answer takes would tell of them."""

    def __init__(self, settings: SuffixSettings) -> None:
        super().__init__(settings)
        self._answers = Answers(settings.answers)

    def _propose(self, draft_request: DraftRequest) -> list[int]:
        request, tokens, most = draft_request
        own = self._find(draft_request)
        same = 0 if own is None else matching(tokens, tokens[max(0, own - LONGEST) : own])
        there = None if request.cache_salt else self._answers.find(tokens)
        if there is not None and there[1] > same:
            return self._answers.after(there[0], min(most, there[1]))
        return [] if own is None else self._copied(tokens, own, min(most, same))

    def learn(self, request: Request, token_ids: Sequence[int]) -> None:
        if not request.cache_salt:
            self._answers.add(token_ids[len(request.prompt_token_ids) :])


def matching(tokens: Sequence[int], before: Sequence[int]) -> int:
    """How many of the last tokens of two texts are the same."""
    count = min(len(tokens), len(before))
    for n in range(1, count + 1):
        if tokens[-n] != before[-n]:
            return n - 1
    return count


def _keys(tokens: Words, size: int) -> Words:
    """A number of 64 bits for each n-gram of that size, of which the highest bits are mixed best."""
    count = len(tokens) - size + 1
    keys = np.zeros(count, np.uint64)
    for i in range(size):
        keys += tokens[i : i + count] * np.uint64(POWERS[size - 1 - i])
    return keys
