"""POST /v1/completions, whole or streamed."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NotRequired, Self

from aiohttp import web
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from infer.contracts.request import Event, Request, TokenLogprobs
from infer.contracts.server import Route
from infer.text.detokenizer import ContextDetokenizer, Detokenizer, TokenTexts
from infer_server.events import Events, Json
from infer_server.http.access import CALLER
from infer_server.http.body import Many, TokenIds, one_or_many
from infer_server.http.parsing import checked
from infer_server.http.streams import Array
from infer_server.sampling import SamplingBody, StreamOptions
from infer_server.shapes import Finish, PromptLogprobs, Usage
from infer_server.tokens import number

if TYPE_CHECKING:
    from infer.llm import Completion
    from infer_server.service import Service


class CompletionRequest(SamplingBody):
    """The body of POST /v1/completions."""

    prompt: str | TokenIds | Many[str | TokenIds] = Field(
        union_mode="left_to_right", description="Text or token ids, or a list of these."
    )
    max_tokens: int | None = Field(
        16, ge=0, description="The most tokens to generate; 0 only with echo; null: all that fit."
    )
    echo: bool = Field(False, description="Begin the answer with the prompt; logprobs then include the prompt's.")
    add_special_tokens: bool = Field(True, description="Add the tokenizer's special tokens, such as BOS, to a text.")
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _echoed(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens = 0 asks for no answer, which is possible with echo only")
        return self

    @property
    def prompts(self) -> list[str | TokenIds]:
        return one_or_many(self.prompt)


class LegacyLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Finish | None
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[PromptLogprobs]


class TextCompletion(TypedDict):
    """An answer, or a chunk of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


def routes(service: Service, settings: object) -> list[Route]:
    return [
        Route(
            "POST",
            "/v1/completions",
            Completions(service).handle,
            "Continue texts.",
            TextCompletion,
            CompletionRequest,
            TextCompletion,
        )
    ]


class Completions:
    """The handler of POST /v1/completions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, http: web.Request) -> web.StreamResponse:
        body = await self._service.read(http, CompletionRequest, place=True)
        overrides: Json = {"max_tokens": 1} if body.max_tokens == 0 else {}
        if body.echo and body.logprobs is not None:
            overrides["prompt_logprobs"] = body.logprobs
        params = self._service.served.defaulted(checked(lambda: body.sampling(**overrides), CompletionRequest))
        requests = await self._service.requests(
            http, body.prompts, params, body, n=body.n, special=body.add_special_tokens
        )
        frame = self._service.frame(http, requests[0].id.removesuffix("-0"), "text_completion")
        if body.stream:
            frames = functools.partial(self._frames, frame, body, requests)
            response = await self._service.stream(http, requests, frames)
            http[CALLER].usage = _requested_usage(http[CALLER].usage or {}, body)
            return response
        answers, usage = await self._service.whole(http, requests)
        http[CALLER].usage = _requested_usage(usage, body)
        choices, writings = [], self._writings(body, requests)
        for writing, answer in zip(writings, answers, strict=True):
            if body.max_tokens == 0:
                answer.text, answer.token_ids, answer.logprobs = "", [], None
                answer.finish_reason, answer.stop_reason = "length", None
            choices.append(await self._choice(body, writing, answer))
        return await self._service.answer(http, frame | {"choices": choices, "usage": _requested_usage(usage, body)})

    async def _frames(
        self,
        frame: Json,
        body: CompletionRequest,
        requests: Sequence[Request],
        events: Events,
        usage: Callable[[], Json],
    ) -> AsyncGenerator[Json]:
        options = body.stream_options or StreamOptions()
        if options.include_usage:
            frame = frame | {"usage": None}
        writings = self._writings(body, requests)
        async for i, event in events:
            if body.max_tokens == 0:
                nothing = Event(event.request_id, prompt_logprobs=event.prompt_logprobs)
                event = nothing._replace(finish_reason="length" if event.finish_reason else None)
            if not (event.text or event.logprobs or event.finish_reason or event.prompt_logprobs):
                continue
            choice = await self._choice(body, writings[i], event)
            so_far = {"usage": _requested_usage(usage(), body)} if options.continuous_usage_stats else {}
            yield frame | {"choices": [choice]} | so_far
        if options.include_usage:
            yield frame | {"choices": [], "usage": _requested_usage(usage(), body)}

    def _writings(self, body: CompletionRequest, requests: Sequence[Request]) -> list[_Writing]:
        prompts = [_Echo(prompt) if body.echo else None for prompt in body.prompts]
        follow = self._service.texts.follow
        return [
            _Writing(i, each, follow(each.prompt_token_ids) if scored(body) else None, prompts[i // body.n])
            for i, each in enumerate(requests)
        ]

    async def _choice(self, body: CompletionRequest, writing: _Writing, part: Completion | Event) -> Json:
        """What ``part`` adds to an answer, which may be all of it. The first of it begins with the prompt's echo."""
        choice: Json = {
            "index": writing.index,
            "text": part.text,
            "logprobs": None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        tokens, entries = part.token_ids, list[TokenLogprobs | None](part.logprobs or ())
        begins: list[int] = []
        if writing.detokenizer is not None:
            push = functools.partial(begin, writing.detokenizer)
            begins = await self._service.writer.each(push, tokens, len(tokens))
        if (echo := writing.echo) is not None:
            if echo.text is None:  # once per prompt: its answers share the echo
                echo.text, echo.begins = await self._echoed(writing.request, body, echo.prompt)
            begins = [len(echo.text) + place for place in begins]
            if not writing.begun:
                choice["text"] = echo.text + part.text
                if writing.detokenizer is not None and part.prompt_logprobs is not None:
                    entries = [*part.prompt_logprobs, *entries]
                    tokens, begins = [*writing.request.prompt_token_ids, *tokens], echo.begins + begins
        writing.begun = True
        if entries:
            choice["logprobs"] = await self._logprobs(tokens, entries, begins)
        if body.prompt_logprobs is not None and part.prompt_logprobs is not None:
            choice["prompt_logprobs"] = await self._service.prompt_logprobs(part)
        return choice

    async def _echoed(
        self, request: Request, body: CompletionRequest, prompt: str | Sequence[int]
    ) -> tuple[str, list[int]]:
        """The prompt's text, and the index in it at which each token begins. The text of a prompt of token ids includes
        special tokens. A prompt that is a text is returned as it is; special tokens that the tokenizer adds to it begin
        where the token after them begins."""
        if isinstance(prompt, str) and not scored(body):
            return prompt, []
        tokenizer, ids = self._service.served.tokenizer, request.prompt_token_ids
        detokenizer = TokenTexts(tokenizer, skip_special_tokens=False).follow(())

        def push(token: int) -> tuple[str, int]:
            return detokenizer.push(token), detokenizer.begins

        pushed = await self._service.writer.each(push, ids, len(ids))
        pieces, begins = [piece for piece, _ in pushed], [begins for _, begins in pushed]
        if not isinstance(prompt, str):
            return "".join(pieces) + (detokenizer.flush() if body.max_tokens == 0 else ""), begins
        added = tokenizer.encode("", add_special_tokens=body.add_special_tokens).ids
        first = next((i for i, (one, other) in enumerate(zip(ids, added, strict=False)) if one != other), len(added))
        shift = "".join(pieces).find(prompt, begins[first] if first < len(ids) else 0)
        if shift < 0:  # the tokenizer has normalized the text, so that only it knows each token's place in the original
            (encoding,) = await asyncio.to_thread(
                tokenizer.encode_batch, [prompt], add_special_tokens=body.add_special_tokens
            )
            begins, shift = [begin for begin, _ in encoding.offsets], 0
        return prompt, [min(max(place - shift, 0), len(prompt)) for place in begins]

    async def _logprobs(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], begins: Sequence[int]
    ) -> Json:
        """Log-probabilities in the format of the completions endpoint. The entry of a prompt's first token is None.
        ``begins`` are the indices at which the tokens' texts begin or, if a stop string holds them back, would begin. A
        token that continues a character begins where the character does."""
        quoted = self._service.tokens.quoted

        def write(token: int, entry: TokenLogprobs | None, begin: int) -> tuple[bytes, bytes, bytes, bytes]:
            chosen = top = "null"
            if entry is not None:
                # Tokens with the same text share a key, which gets the likeliest one's value.
                likely = {quoted(entry.token_id): entry.logprob} | {quoted(t): p for t, p in reversed(entry.top)}
                chosen = number(entry.logprob)
                top = f"{{{', '.join([f'{text}: {number(p)}' for text, p in likely.items()])}}}"
            return quoted(token).encode(), chosen.encode(), top.encode(), str(begin).encode()

        rows = zip(token_ids, entries, begins, strict=True)
        written = await self._service.writer.each(lambda row: write(*row), rows, len(token_ids))
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: Array([row[i] for row in written]) for i, name in enumerate(names)}


def scored(body: CompletionRequest) -> bool:
    """Whether the request asks for log-probabilities of its answer's tokens."""
    return body.logprobs is not None or body.logprob_token_ids is not None


def begin(detokenizer: Detokenizer | ContextDetokenizer, token_id: int) -> int:
    """Push the next token, and return the index, in characters, at which its text begins."""
    detokenizer.push(token_id)
    return detokenizer.begins


@dataclass
class _Echo:
    """A prompt that its answers begin with, and, once they do, its text and where its tokens begin in that."""

    prompt: str | Sequence[int]
    text: str | None = None
    begins: list[int] = field(default_factory=list)


@dataclass
class _Writing:
    """An answer that is being written."""

    index: int
    request: Request
    detokenizer: Detokenizer | ContextDetokenizer | None
    """Finds where its tokens begin, if their log-probabilities are asked for."""
    echo: _Echo | None
    begun: bool = False


def _requested_usage(usage: Json, body: CompletionRequest) -> Json:
    """The usage without the token that the engine makes at least, where none was asked for."""
    return usage | {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]} if body.max_tokens == 0 else usage
