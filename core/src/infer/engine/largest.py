"""A trial of the largest pass that the settings allow, before the cache takes what memory is left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from infer import device as devices
from infer.cache import KVStorage, StateManager, StateStorage
from infer.contracts.cache import CacheContext
from infer.contracts.model import ModelProtocol, Pass
from infer.contracts.params import MAX_LOGPROBS, SamplingParams
from infer.engine.runner import SCORED_ROWS
from infer.engine.sampler import make_draws, score
from infer.errors import InferError


def activation_bytes(model: ModelProtocol, context: CacheContext, max_tokens: int | None, max_chunk: int) -> int:
    """The most bytes that one pass takes besides weights and cache: of up to ``max_tokens`` tokens, if there is such a
    limit, in chunks of up to ``max_chunk``, with the logits of a full batch. A pass of that size is computed, except on
    a CPU: ``infer.device.taken_by``. ``context`` is what the pool will be made from. Raises InferError if memory does
    not suffice for it."""
    chunk = min(max_chunk, context.max_seq_len)
    tokens = context.max_batch_size * chunk
    if max_tokens is not None:
        tokens = min(tokens, max_tokens)
    lens = [min(chunk, tokens - begin) for begin in range(0, tokens, chunk)]

    stored = 0

    @torch.inference_mode()
    def run() -> None:
        nonlocal stored
        device = context.device
        storage = KVStorage(replace(context, max_batch_size=len(lens), max_seq_len=chunk), len(lens), chunk)
        stored = storage.nbytes
        slots = np.arange(len(lens))
        view = storage.view(slots.astype(np.int32)[:, None], [0] * len(lens), lens)
        if context.states:
            states = StateStorage(context.states, StateManager(len(lens)), len(lens), device)
            stored += states.nbytes
            view.states = states.view(slots, [0] * len(lens), lens)
        ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        positions = torch.cat([torch.arange(n, device=device) for n in lens])
        hidden = model.forward(Pass(ids, positions, view))
        rows = max(context.max_batch_size, SCORED_ROWS)
        logits = model.logits(hidden[torch.arange(rows, device=device) % tokens])

        draws = make_draws([SamplingParams(temperature=1.0, top_k=50, top_p=0.9)] * rows, device, [0.5] * rows)
        drawn = context.kernels.sample(logits, draws).clamp(min=0)
        score(logits, drawn, [MAX_LOGPROBS] * rows).read()

    try:
        return devices.taken_by(run, context.device) - stored
    except torch.OutOfMemoryError as error:
        raise InferError(
            f"A pass of {tokens} tokens does not fit into memory ({error}); lower engine.max_tokens_per_step or "
            "engine.max_batch_size."
        ) from error
