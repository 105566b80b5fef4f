"""``Request`` and ``Event``: all that passes between the client's side (server, ``LLM``) and the engine."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from infer.contracts.params import SamplingParams
from infer.errors import RequestError

if TYPE_CHECKING:
    from infer.contracts.adapters import Adapter
    from infer.contracts.grammar import GrammarProtocol

FinishReason = Literal["stop", "length", "abort", "error", "timeout"]
Pooling = Literal["last", "mean"]
"""Which of a prompt's final hidden states make an embedding: the last token's, or all of them."""


class ThinkingTokens(NamedTuple):
    """The tokens between which a model reasons at the beginning of its answer."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    opened: bool
    """Whether the prompt ends with the opening ones."""


class Owner(NamedTuple):
    """On whose behalf a request is computed."""

    key: str = ""
    """Stands for the API key, and is not the key itself; empty if there is none."""
    user: str = ""
    """The end user, as whoever has the key calls them; empty if unknown."""


NOBODY = Owner()
NAMESPACE = "\0"
"""Begins the salts of requests with adapters."""


def is_of_base(prefix_salt: str) -> bool:
    """Whether requests with this ``Request.prefix_salt`` have no adapter."""
    return not prefix_salt.startswith(NAMESPACE) or prefix_salt.startswith(2 * NAMESPACE)


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


def too_long(count: int | str, max_seq_len: int) -> RequestError:
    """The error for a prompt of ``count`` tokens."""
    return RequestError(
        f"This model's maximum context length is {max_seq_len} tokens, and one of them is needed for the answer, but "
        f"the prompt has {count} tokens. Shorten the prompt or raise engine.max_seq_len.",
        param="prompt",
        code="context_length_exceeded",
    )


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it. The client's side makes it; nobody changes it."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    id: str = field(default_factory=new_request_id)
    seed: int = 0
    """``params.seed``, or a random one if the client gave none."""
    cache_salt: str = ""
    """Only requests of equal salt, and of adapters of equal content, share cached tokens."""
    priority: int = 0
    """Requests with lower numbers are admitted earlier and preempted later."""
    owner: Owner = NOBODY
    group: str = ""
    """The same for all requests that ask for answers to one prompt; empty for a request that is alone."""
    grammar: GrammarProtocol | None = None
    """``params.structured_outputs``, compiled."""
    grammar_after: tuple[int, ...] = ()
    """The grammar applies only after these tokens (the end of reasoning), in this order. Other tokens may come between
    them, but the first begins the search anew. Empty: it applies from the first token on."""
    thinking: ThinkingTokens | None = None
    """What ``params.thinking_token_budget`` is about; None if the answer holds no reasoning."""
    forks: tuple[int, ...] = ()
    """Where later prompts may leave this one, each as the number of tokens before it: a chat template may render what
    follows in another way. A hint for the cache."""
    pooling: Pooling | None = None
    """If set, nothing is generated: the answer is the prompt's embedding."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """The client's trace headers, for observers."""
    adapter: Adapter | None = None
    """The adapter that changes the model for this request alone; None for the base."""
    timeout_s: float | None = None
    """It ends with the reason "timeout" if it has not ended so long after its ``arrival``."""
    arrival: float = field(default_factory=time.perf_counter)
    """On the engine's clock, in seconds."""

    @classmethod
    def make(
        cls,
        prompt_token_ids: list[int] | tuple[int, ...],
        params: SamplingParams,
        *,
        vocab_size: int,
        max_seq_len: int,
        id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        owner: Owner = NOBODY,
        group: str = "",
        grammar: GrammarProtocol | None = None,
        grammar_after: tuple[int, ...] = (),
        thinking: ThinkingTokens | None = None,
        forks: tuple[int, ...] = (),
        pooling: Pooling | None = None,
        trace: Mapping[str, str] | None = None,
        adapter: Adapter | None = None,
        timeout_s: float | None = None,
    ) -> Request:
        """Check token ids and length against the model. ``params.max_tokens`` may be more than the context has room
        for: the answer then ends where the context does. Raises RequestError with a message meant for the client."""
        assert (grammar is None) == (params.structured_outputs is None)
        n = len(prompt_token_ids)
        if n == 0:
            raise RequestError("The prompt is empty: give at least one token.", param="prompt")
        if n >= max_seq_len:
            raise too_long(n, max_seq_len)
        # Clients cannot know how many tokens a chat template makes of their messages, so a large max_tokens means all
        # that fit. A least number that does not fit is a promise that nobody could keep.
        if n + params.min_tokens > max_seq_len:
            raise RequestError(
                f"This model's maximum context length is {max_seq_len} tokens, but the prompt has {n} tokens and "
                f"min_tokens asks for at least {params.min_tokens} more. Lower min_tokens or shorten the prompt.",
                param="min_tokens",
                code="context_length_exceeded",
            )
        if params.thinking_token_budget is not None and thinking is None:
            raise RequestError(
                "thinking_token_budget is for conversations with a model that reasons; leave it out.",
                param="thinking_token_budget",
            )
        for name, ids in (
            ("prompt", prompt_token_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
            ("logprob_token_ids", params.logprob_token_ids or ()),
        ):
            if bad := next((i for i in ids if not 0 <= i < vocab_size), None):
                raise RequestError(
                    f"{name} holds token id {bad}, but this model's ids are 0 to {vocab_size - 1}.",
                    param=name,
                )
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        return cls(
            tuple(prompt_token_ids),
            params,
            id or new_request_id(),
            seed,
            cache_salt or "",
            priority,
            owner,
            group,
            grammar,
            grammar_after,
            thinking,
            forks,
            pooling,
            trace or {},
            adapter,
            timeout_s,
        )

    @property
    def prefix_salt(self) -> str:
        """What stands before the prompt where a cache shares tokens: the salt and the adapter's content. No salt that a
        client may choose makes a request share tokens with another adapter's, or the base's with an adapter's."""
        if self.adapter is not None:
            return f"{NAMESPACE}{self.adapter.digest}{NAMESPACE}{self.cache_salt}"
        return NAMESPACE + self.cache_salt if self.cache_salt.startswith(NAMESPACE) else self.cache_salt


class TokenLogprobs(NamedTuple):
    """A token's log-probability (natural log, before temperature, penalties and filters), and those of the likeliest
    tokens, or of the tokens that the request named."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token."""
    top: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):
    """What is new about one request. Only its last event has a ``finish_reason``, and every request gets one."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token id, if requested."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Only in the first event, if requested: None for the first prompt token, then one per prompt token."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the answer, if one did."""
    error: str | None = None
    num_cached: int = 0
    """How many prompt tokens the cache already held."""
    param: str | None = None
    """The request parameter that caused the error, if one did."""
    embedding: bytes | None = None
    """In the last event of a request with ``pooling``: the pooled hidden state, not normalized, as fp32 values."""
    started: bool = False
    """In the last event: whether the request took part in a pass, or only waited."""
