"""The types of answers. Each endpoint's ``Route`` names its own, and /openapi.json describes them to clients;
``tests/clients`` checks real answers against that description."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    error: ErrorBody


class CachedTokens(TypedDict):
    cached_tokens: int


class ReasoningTokens(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[ReasoningTokens]
    """In chats."""


class LegacyLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]
FinishReason = Literal["stop", "length", "tool_calls"]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[PromptLogprobs]


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RankedDocument(TypedDict):
    index: int
    document: NotRequired[dict[str, str]]
    relevance_score: float


class Reranked(TypedDict):
    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


class PairScore(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class Scores(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: EmbeddingUsage


class TextCompletion(TypedDict):
    """An answer, or a chunk of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChosenLogprob]
    refusal: None


class Function(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: Function


class Custom(TypedDict):
    name: str
    input: str


class CustomToolCall(TypedDict):
    id: str
    type: Literal["custom"]
    custom: Custom


class Message(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall | CustomToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metadata: NotRequired[dict[str, str]]


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class CustomDelta(TypedDict):
    name: NotRequired[str]
    input: str


class ToolCallDelta(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[FunctionDelta]
    custom: NotRequired[CustomDelta]


class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[int | str | None]
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    metadata: NotRequired[dict[str, str]]
    """In the first chunk."""


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChosenLogprob]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[ReasoningText]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class Response(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    background: bool
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputReasoning | OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(TypedDict):
    """One of OpenAI's ``response.*`` events. Its other fields depend on its type."""

    type: str
    sequence_number: int


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


class TokenizerInfo(TypedDict):
    tokenizer_class: str
    vocab_size: int
    max_model_len: int
    special_tokens: dict[str, str]
    chat_template: str | None


class YesNo(TypedDict):
    type: Literal["noul", "yes_no"]
    noul: float


class Choice(TypedDict):
    type: Literal["choice"]
    choice: str
    probabilities: dict[str, float]
    confidence: float


class Score(TypedDict):
    """``probabilities`` and ``legend`` are keyed by the level's number."""

    type: Literal["score"]
    score: float
    probabilities: dict[str, float]
    legend: dict[str, str]
    confidence: float


class SystemOneUsage(TypedDict):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class SystemOne(TypedDict):
    id: str
    object: Literal["decision"]
    model: str
    answers: dict[str, YesNo | Choice | Score]
    usage: SystemOneUsage


class PredicateAnswer(TypedDict):
    type: Literal["predicate"]
    name: str | None
    probability: float


class OptionProbability(TypedDict):
    value: str | bool
    probability: float


class ChoiceAnswer(TypedDict):
    type: Literal["choice"]
    name: str | None
    choice: str | bool
    probabilities: list[OptionProbability]
    confidence: float


class LevelProbability(TypedDict):
    value: int
    label: str
    probability: float


class ScoreAnswer(TypedDict):
    type: Literal["score"]
    name: str | None
    score: float
    probabilities: list[LevelProbability]
    confidence: float


class CachedAndWrittenTokens(CachedTokens):
    cache_write_tokens: int


class DecisionUsage(SystemOneUsage):
    input_tokens_details: CachedAndWrittenTokens
    output_tokens_details: ReasoningTokens


class Decision(TypedDict):
    id: str
    object: Literal["decision"]
    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: DecisionUsage


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int
    quantization: str | None
    exact: bool
    default_sampling_params: dict[str, float]


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Status(TypedDict):
    status: str
