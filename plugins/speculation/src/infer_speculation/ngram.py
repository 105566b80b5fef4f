"""Drafts without a model: where the text's last tokens stand earlier in prompt and answer, what followed them there may
follow again (prompt lookup, Saxena, 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, Field, PositiveInt, model_validator

from infer.contracts.proposer import DraftRequest

BITS = 20
"""How many bits of a token id go into an n-gram's key. Two n-grams that share a key only make a bad draft."""
REMEMBERED = 1 << 14
"""How many positions of a sequence can be found at least, once it has so many; and twice as many at most."""
AT_ONCE = 4096
"""How many tokens are taken in per step: a few milliseconds' work. There is nothing to find until all are."""


class NgramSettings(BaseModel, extra="forbid"):
    longest: PositiveInt = Field(4, le=32, description="tokens at the text's end that are looked up first")
    shortest: PositiveInt = Field(2, le=32, description="tokens at the text's end that are looked up last")

    @model_validator(mode="after")
    def _ordered(self) -> NgramSettings:
        if self.shortest > self.longest:
            raise ValueError(f"shortest = {self.shortest} is above longest = {self.longest}")
        return self


class Index:
    """Where each n-gram of a growing text occurred last, for n from ``shortest`` to ``longest``. Taking in a token
    takes constant time, and the memory is bounded: of a long text, the older part is forgotten."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(shortest, longest + 1)
        self._masks = [(1 << BITS * size) - 1 for size in self._sizes]
        self._last = 0
        """The key of the last ``longest`` tokens, the last token in the lowest bits."""
        self.num_tokens = 0
        self._new: list[dict[int, int]] = [{} for _ in self._sizes]
        self._old: list[dict[int, int]] = [{} for _ in self._sizes]
        """Per n, the position behind the last occurrence of each n-gram."""

    def take(self, tokens: Sequence[int]) -> None:
        """Take in the text's tokens from ``num_tokens`` on; the last n-grams are entered once it is known what follows
        them."""
        last, token_mask = self._last, (1 << BITS) - 1
        entries = list(zip(self._sizes, self._masks, self._new, strict=True))
        whole = self._masks[-1]
        for position, token in enumerate(tokens[self.num_tokens :], self.num_tokens):
            for size, mask, found in entries:
                if position >= size:
                    found[last & mask] = position
            last = (last << BITS | token & token_mask) & whole
            if position % REMEMBERED == 0 and position:
                self._old, self._new = self._new, [{} for _ in self._sizes]
                entries = list(zip(self._sizes, self._masks, self._new, strict=True))
        self._last, self.num_tokens = last, len(tokens)

    def find(self) -> int | None:
        """The position that followed the last occurrence of the longest n-gram that the text ends with; None if it ends
        with none that it has had before."""
        for i in reversed(range(len(self._sizes))):
            if self.num_tokens >= self._sizes[i]:
                key = self._last & self._masks[i]
                if (at := self._new[i].get(key, self._old[i].get(key))) is not None:
                    return at
        return None


class NgramProposer:
    """A ProposerProtocol that copies from the text itself."""

    def __init__(self, settings: NgramSettings) -> None:
        self._settings = settings
        self._indices: dict[str, Index] = {}

    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._propose(draft_request) for draft_request in draft_requests]

    def _propose(self, draft_request: DraftRequest) -> list[int]:
        at = self._find(draft_request)
        return [] if at is None else self._copied(draft_request.token_ids, at, draft_request.most)

    def _find(self, draft_request: DraftRequest) -> int | None:
        """The position of the tokens to copy; None if there are none."""
        index = self._indices.get(draft_request.request.id)
        if index is None:
            index = self._indices[draft_request.request.id] = Index(self._settings.shortest, self._settings.longest)
        tokens = draft_request.token_ids
        index.take(tokens[: index.num_tokens + AT_ONCE] if len(tokens) - index.num_tokens > AT_ONCE else tokens)
        return index.find() if index.num_tokens == len(tokens) else None

    def _copied(self, tokens: Sequence[int], at: int, most: int) -> list[int]:
        drafts = list(tokens[at : at + most])
        while len(drafts) < most:  # the text repeats itself: what was proposed goes on the same way
            drafts.append(drafts[len(drafts) - (len(tokens) - at)])
        return drafts

    def end(self, request_id: str) -> None:
        self._indices.pop(request_id, None)
