"""Speculation: a proposer guesses how sequences go on, one pass computes the guesses with the sequences' own tokens,
and those that equal what is drawn are kept. What is drawn at a position depends only on the request, the position and
the logits, so answers are those of decoding one by one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Set
from collections.abc import Sequence as Seq
from itertools import islice
from typing import TYPE_CHECKING

from infer.contracts.cache import CachePoolProtocol
from infer.contracts.proposer import Computed, DraftRequest, LearningProposer, ProposerProtocol, ReadingProposer
from infer.contracts.scheduler import PENDING, Sequence, Work, Works
from infer.engine.payoff import Payoff, Plan
from infer.engine.processors import LogitsProcessor
from infer.errors import PluginError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

Passes = list[Seq[Work]]
Drafts = tuple[int, ...]


class Speculation:
    """Adds draft tokens to a step's decodes, and finds out which of them were right.

    Drafts take only what the scheduler has left: they stay within the step's token limit, and nobody is preempted for
    them. A proposer that fails is not asked again."""

    def __init__(
        self,
        proposer: ProposerProtocol,
        whose: str,
        pool: CachePoolProtocol,
        payoff: Payoff,
        *,
        truncate: Callable[[int, int], None],
        most: int,
        max_tokens_per_step: int | None,
        vocab_size: int,
    ) -> None:
        """``whose`` names the proposer in the log. ``truncate`` is the pool's, which takes positions back. ``most`` is
        how many drafts a sequence verifies at once, at most."""
        self._proposer: ProposerProtocol | None = proposer
        self._whose = whose
        self._pool = pool
        self._truncate = truncate
        self._payoff = payoff
        self._most = most
        self._limit = max_tokens_per_step
        self._vocab_size = vocab_size
        self._guesses: dict[Sequence, tuple[int, int]] = {}
        """Tokens that were proposed and not verified, each with its index in the sequence."""
        self.wants_drafts = False
        """Whether drafts are wanted for the next step, which the proposer can make only if it knows all tokens."""
        self._extended = 0.0
        """When ``extend`` last returned, on ``time.perf_counter``."""

    def extend(self, passes: Seq[Seq[Work]], processors: Mapping[Sequence, LogitsProcessor]) -> Passes:
        """The passes, with draft tokens for those that decode. Those whose last token is not known yet get none."""
        self.wants_drafts = False
        extended = [*passes] if self._proposer is None else self._with_drafts(passes, processors)
        self._extended = time.perf_counter()
        return extended

    def _with_drafts(self, passes: Seq[Seq[Work]], processors: Mapping[Sequence, LogitsProcessor]) -> Passes:
        self._compare()
        passes, taken = [*passes], sum(work.length for works in passes for work in works)
        for i, works in enumerate(passes):
            most = {
                sequence: min(self._most, sequence.max_len - len(sequence.tokens) - 1)
                for sequence, _, length, draws, decode, _ in works
                if decode and length == draws == 1
            }
            if not most:
                continue
            plan = self._payoff.plan(sum(work.length for work in works), most)
            self.wants_drafts = self.wants_drafts or bool(plan.counts or plan.guessing)
            known = Plan(
                {sequence: count for sequence, count in plan.counts.items() if not sequence.pending},
                [sequence for sequence in plan.guessing if not sequence.pending],
            )
            left = None if self._limit is None else self._limit - taken
            drafts = self._drafts(known, processors, left) if known.counts or known.guessing else {}
            if drafts:
                passes[i] = [
                    work if (found := drafts.get(work.sequence)) is None else _verifying(work, found) for work in works
                ]
                taken += sum(map(len, drafts.values()))
        return passes

    def _compare(self) -> None:
        """Compare the guesses with the tokens that are known by now."""
        for sequence, (at, token) in [*self._guesses.items()]:
            if at < len(sequence.tokens) - sequence.pending:
                del self._guesses[sequence]
                self._payoff.guessed(sequence, sequence.tokens[at] == token)

    def _drafts(
        self, plan: Plan, processors: Mapping[Sequence, LogitsProcessor], left: int | None
    ) -> dict[Sequence, Drafts]:
        """The drafts to verify for which there is room, ``left`` tokens in all. The guesses are kept."""
        began = time.perf_counter()
        draft_requests = {**plan.counts, **dict.fromkeys(plan.guessing, 1)}
        proposals = self._propose(
            [DraftRequest(sequence.request, sequence.tokens, count) for sequence, count in draft_requests.items()]
        )
        proposed = dict(zip(draft_requests, proposals, strict=False))
        found: dict[Sequence, Drafts] = {}
        counts: dict[Sequence, int] = {}
        for sequence, drafts in proposed.items():
            if sequence not in plan.counts:
                if drafts:
                    counts[sequence] = 1
                    self._guesses[sequence] = len(sequence.tokens), drafts[0]
                continue
            if left is not None:
                drafts = drafts[:left]
            if drafts and (how := processors.get(sequence)):
                drafts = drafts[: how.accepts(sequence.tokens[how.num_seen :], drafts)]
            assert sequence.slot is not None, "who decodes has a slot"
            if drafts and self._pool.grow(sequence.slot, len(sequence.tokens) + len(drafts)):
                found[sequence] = drafts
                counts[sequence] = len(drafts)
                left = None if left is None else left - len(drafts)
        self._payoff.proposed(plan, counts, time.perf_counter() - began)
        return found

    def _propose(self, draft_requests: Seq[DraftRequest]) -> list[Drafts]:
        assert self._proposer is not None
        try:
            return self._checked(draft_requests, self._proposer.propose(draft_requests))
        except (Exception, SystemExit):
            self._fail()
            return []

    def _fail(self) -> None:
        log.exception("%s failed; the engine goes on without speculation", self._whose)
        self._proposer = None

    def _checked(self, draft_requests: Seq[DraftRequest], proposals: Seq[Seq[int]]) -> list[Drafts]:
        """The proposals, cut at the first token that the model does not have. Raises PluginError."""
        if len(proposals) != len(draft_requests):
            raise PluginError(
                f"{self._whose} was asked for {len(draft_requests)} sequences and proposed for {len(proposals)}."
            )
        checked = []
        for draft_request, proposal in zip(draft_requests, proposals, strict=True):
            drafts = tuple(map(int, islice(proposal, draft_request.most + 1)))
            if len(drafts) > draft_request.most:
                raise PluginError(
                    f"{self._whose} proposed more than the {draft_request.most} tokens that were asked for."
                )
            known = (i for i, token in enumerate(drafts) if not 0 <= token < self._vocab_size)
            checked.append(drafts[: next(known, len(drafts))])
        return checked

    def verify(self, works: Seq[Work], of: Seq[int], tokens: Seq[int | None]) -> Set[int]:
        """Compare the drafts of a pass with the tokens that were drawn, token n for sequence ``of[n]``, and take the
        wrong ones back. Every sequence then has as many PENDING tokens as there are tokens for it. Returns the indices
        of the other tokens: they were drawn after a wrong draft."""
        wrong: set[int] = set()
        first = {b: n for n, b in reversed([*enumerate(of)])}
        for b, (sequence, _, _, draws, _, drafts) in enumerate(works):
            if not drafts or sequence.slot is None:
                continue
            right, n = 0, first[b]
            # A row that yields no token is left to the next step, which then knows that it is not to blame a draft.
            while right < len(drafts) and tokens[n + right] == drafts[right] and tokens[n + right + 1] is not None:
                right += 1
            wrong.update(range(n + right + 1, n + draws))
            if right < len(drafts):
                sequence.num_computed -= len(drafts) - right
                self._truncate(sequence.slot, sequence.num_computed)
            sequence.tokens += [PENDING] * right
            sequence.proposed += len(drafts)
            self._payoff.verified(sequence, len(drafts), right)
        return wrong

    def read(self, works: Works, hidden_TD: Tensor) -> None:
        """Show a proposer that reads them the hidden states of a pass that has been launched."""
        if isinstance(self._proposer, ReadingProposer):
            computed = [
                Computed(sequence.request, sequence.tokens, start, length, not decode)
                for sequence, start, length, _, decode, _ in zip(*works.columns, strict=True)
            ]
            try:
                self._proposer.read(computed, hidden_TD)
            except (Exception, SystemExit):
                self._fail()

    def learn(self, passes: Seq[Seq[Work]]) -> None:
        """Learn what the step has cost since ``extend`` returned its passes."""
        seconds = time.perf_counter() - self._extended
        if len(passes) == 1 and all(work.decode for work in passes[0]):
            rows, drafts = (sum(counts) for counts in zip(*((w.length, len(w.drafts)) for w in passes[0]), strict=True))
            self._payoff.learn(rows, drafts, seconds)

    def end(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._payoff.end(sequence)
        self._guesses.pop(sequence, None)
        if self._proposer is not None:
            try:
                if isinstance(self._proposer, LearningProposer):
                    self._proposer.learn(sequence.request, sequence.tokens[: len(sequence.tokens) - sequence.pending])
                self._proposer.end(sequence.id)
            except (Exception, SystemExit):
                self._fail()


def _verifying(work: Work, drafts: Drafts) -> Work:
    count = len(drafts)
    return work._replace(length=work.length + count, draws=work.draws + count, drafts=drafts)
