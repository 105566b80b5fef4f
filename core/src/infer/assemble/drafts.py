"""Speculation of an engine in the making: who proposes, and what passes with drafts cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from infer.contracts.cache import CachePoolProtocol, TruncatingPool
from infer.contracts.proposer import ProposerProtocol
from infer.contracts.sections import EngineSettings
from infer.engine.payoff import Costs, Payoff, measure
from infer.engine.runner import Runner
from infer.engine.speculation import Speculation
from infer.errors import SettingsError
from infer.plugins.discovery import Offer

log = logging.getLogger(__name__)


def speculation(
    offer: Offer,
    make: Callable[[], ProposerProtocol],
    runner: Runner,
    pool: CachePoolProtocol,
    engine: EngineSettings,
    *,
    max_seq_len: int,
    vocab_size: int,
    lag: int,
) -> Speculation:
    """Has the offer's proposer made, and decides by what passes take how many drafts pay. Raises SettingsError if the
    pool cannot take positions back."""
    if not isinstance(pool, TruncatingPool):
        raise SettingsError(
            f'engine.speculation is "{offer.name}", but {type(pool).__name__} cannot take positions back '
            "(truncate), as wrong draft tokens require; choose another cache.backend, or none."
        )
    proposer, began = make(), time.perf_counter()
    rows = min(engine.max_batch_size * (1 + engine.max_draft_tokens), max_seq_len)
    plain, drafts = measure(runner, pool, pool.truncate, rows)
    times = ", ".join(f"{1e3 * plain[rows]:.1f} or {1e3 * drafts[rows]:.1f} for {rows}" for rows in plain)
    seconds = time.perf_counter() - began
    log.info("speculation by %s; ms of a pass without or with drafts, by rows: %s (%.1f s)", offer.name, times, seconds)
    return Speculation(
        proposer,
        offer.whose,
        pool,
        Payoff(Costs(plain, drafts), waits=lag > 0),
        truncate=pool.truncate,
        most=engine.max_draft_tokens,
        max_tokens_per_step=engine.max_tokens_per_step,
        vocab_size=vocab_size,
    )
