"""The served model, as whatever prepares requests for the engine knows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from infer.contracts.grammar import GrammarProtocol
from infer.contracts.params import SamplingParams
from infer.contracts.request import Request, too_long
from infer.contracts.sections import EngineSettings
from infer.contracts.text import ReasoningTags
from infer.engine.confirmation import Verdict
from infer.text.encoding import Encoder, TooLongError
from infer.text.grammars import Grammars
from infer.text.templates import ChatTemplate
from infer.text.tool_formats import ToolFormat

if TYPE_CHECKING:
    from infer.assemble.adapters import LoadedAdapters


@dataclass(frozen=True)
class Served:
    """What the client's side needs to know about the served model."""

    name: str
    tokenizer: Tokenizer
    encoder: Encoder
    template: ChatTemplate | None
    tool_formats: Sequence[ToolFormat]
    """How the model may write tool calls: as the settings say, or all that are installed, in the order to try."""
    reasoning: ReasoningTags | None
    """The tags around the model's reasoning; None if it does not reason."""
    grammars: Grammars
    vocab_size: int
    max_seq_len: int
    cache_tokens: int
    """How many positions the cache holds."""
    sampling: Mapping[str, Any]
    """Default sampling parameters: the checkpoint's, or none if ``model.generation_config`` says so."""
    quantization: str | None
    """How the weights are quantized: as ``model.quantization`` or the checkpoint says; None if they are not."""
    hidden_size: int | None
    """Of the hidden states, of which embeddings are made; None if config.json does not say."""
    pooling: str
    """What embeddings are made of: ``last``, ``mean``, or what the checkpoint says and infer does not know."""
    verdict: Verdict
    """Of the check at the start."""
    engine: EngineSettings
    """As they are on this device: see ``for_device``."""
    forking: bool = False
    """Whether the cache pool is a ForkingPool, which wants to know ``Request.forks``."""
    adapters: LoadedAdapters | None = None
    """None if the settings ask for none and let none be loaded."""

    @property
    def exact(self) -> bool:
        """Whether answers do not depend, bit for bit, on batching and chunking, as far as the check has found."""
        return self.verdict.exact

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The token ids of a text. Raises RequestError if it is too long for the model."""
        try:
            return self.encoder(text, special=special, most=self.max_seq_len - 1)
        except TooLongError as error:
            raise too_long(error.count, self.max_seq_len) from None

    def defaulted(self, params: SamplingParams | None = None) -> SamplingParams:
        """``params`` with the default sampling parameters for those that are not set."""
        params = params or SamplingParams()
        unset = {name: value for name, value in self.sampling.items() if name not in params.model_fields_set}
        return params.model_copy(update=unset) if unset else params

    def request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        special: bool = True,
        grammar: GrammarProtocol | None = None,
        forks: Callable[[Sequence[int]], tuple[int, ...]] | tuple[int, ...] = (),
        **fields: Any,
    ) -> Request:
        """Make a checked Request: tokenize the prompt, with the tokenizer's leading special tokens if ``special``, and
        compile its structured outputs unless ``grammar`` is given. ``forks`` are ``Request.forks``, or find them among
        the tokens if the pool wants them, and ``fields`` are passed to ``Request.make``. A long text or a new grammar
        takes a while. Raises RequestError."""
        ids = self.encode(prompt, special=special) if isinstance(prompt, str) else prompt
        if grammar is None and params.structured_outputs is not None:
            grammar = self.grammars.compile(params.structured_outputs)
        return Request.make(
            tuple(ids),
            params,
            vocab_size=self.vocab_size,
            max_seq_len=self.max_seq_len,
            grammar=grammar,
            forks=forks if isinstance(forks, tuple) else forks(ids) if self.forking else (),
            **fields,
        )
