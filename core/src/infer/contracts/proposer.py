"""The contract of proposers, which guess how sequences go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from infer.contracts.cache import CachePoolProtocol
from infer.contracts.kernels import KernelsProtocol
from infer.contracts.model import DraftHead, ModelProtocol
from infer.contracts.registration import Registration
from infer.contracts.sections import EngineSettings

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import Tensor

    from infer.contracts.request import Request


class DraftRequest(NamedTuple):
    """What a proposer is asked for one sequence."""

    request: Request
    """The request, the same object each time. A request's id is unique among those that have not ended."""
    token_ids: Sequence[int]
    """The tokens of the prompt and of the answer so far. The engine's own list, to be read during the call only. From
    call to call it grows, and does not change otherwise."""
    most: int
    """How many draft tokens may be proposed; at least 1."""


class ProposerProtocol(Protocol):
    """Guesses how sequences go on. A wrong guess costs time, but changes no answer: the engine computes all draft
    tokens in one pass and takes them as long as they equal the tokens that it draws.

    It runs in the engine's thread, between two passes. If it raises, the log says so, and the engine goes on without
    speculation."""

    def propose(self, draft_requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        """For each draft request, up to ``most`` token ids that may come next, the likelier the better, or none. Not
        every sequence is asked about in every step."""

    def end(self, request_id: str) -> None:
        """The request has ended, whether it was asked about or not: forget it."""


class Computed(NamedTuple):
    """What a pass computes of one sequence: positions [start, start + length)."""

    request: Request
    """As ``DraftRequest.request``."""
    token_ids: Sequence[int]
    """As ``DraftRequest.token_ids``, without drafts. It may end with tokens that are not known yet (PENDING)."""
    start: int
    length: int
    prefill: bool
    """Whether the positions are of tokens that the sequence had when it was admitted, all of which are known. The
    others are a decoded token and the drafts after it, some of which may turn out to be wrong; a later pass then starts
    at the first of these."""


@runtime_checkable
class ReadingProposer(ProposerProtocol, Protocol):
    """A proposer that reads hidden states. They are kept for it, and only then."""

    def read(self, computed: Sequence[Computed], hidden_TD: Tensor) -> None:
        """A pass has been launched. ``hidden_TD`` has the hidden states of the sequences' positions, end to end; other
        rows may follow. The last columns, as many as the draft head's ``hidden_size``, are what it reads; the others
        are of the model after its final norm. A later pass may overwrite them, so copy what is kept. Do not wait for
        the device.

        Of a prefix that the cache holds already, nothing is read, and a sequence that has lost its slot is computed,
        and read, again."""


@runtime_checkable
class LearningProposer(ProposerProtocol, Protocol):
    """A proposer that learns from whole answers."""

    def learn(self, request: Request, token_ids: Sequence[int]) -> None:
        """The request has ended with these tokens of the prompt and the answer, to be read during the call only;
        ``end`` comes next. It may have been asked about or not. What is learned from a request with a ``cache_salt``
        must not change what is proposed for others: how long their answers take would tell of it."""


class SecondModel(NamedTuple):
    """A second model that has been loaded."""

    model: ModelProtocol
    pool: CachePoolProtocol
    """A cache pool of its own."""
    tokenizer: Tokenizer
    max_seq_len: int
    """How many positions a sequence may have in it, at most those of the first model."""
    max_chunk: int | None = None
    """The most positions by which one pass may extend a sequence; None: any number."""


class OwnHead(NamedTuple):
    """The draft head of the model that is served, of the same checkpoint or of one of its own."""

    head: DraftHead
    pool: CachePoolProtocol
    """A cache pool of its own."""
    dtype: torch.dtype
    """Of hidden states."""


@dataclass(frozen=True)
class ProposerContext:
    """What a proposer is made from."""

    engine: EngineSettings
    tokenizer: Tokenizer
    vocab_size: int
    max_seq_len: int
    device: torch.device
    kernels: KernelsProtocol
    load: Callable[[str], SecondModel]
    """Loads a further checkpoint (a folder, file, hub id or bundled name) by the settings of the first. Call it
    while the proposer is made. Raises InferError."""
    own_head: OwnHead | None = None
    """Only for a proposer whose registration asks for it."""


class ProposerFactory(Protocol):
    """Makes a proposer of draft tokens; ``settings`` is its own table, ``[engine.NAME]``."""

    def __call__(self, context: ProposerContext, settings: Any) -> ProposerProtocol: ...


@dataclass(frozen=True)
class ProposerRegistration(Registration[ProposerFactory]):
    """A proposer that says whether it needs a draft head."""

    draft_head: bool = False
    """Whether the model is loaded with its draft head (``DraftingModel``) for it. A model that has none is refused."""
    head_path: Callable[[Any], str] | None = None
    """For a draft head of another checkpoint (``LayerReadingHead``): the path that the proposer's settings give. Raises
    SettingsError if they give none."""

    @property
    def reads(self) -> bool:
        """Whether hidden states are kept for it."""
        return self.draft_head or self.head_path is not None
