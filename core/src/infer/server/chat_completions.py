"""POST /v1/chat/completions, whole or streamed."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from aiohttp import web

from infer.contracts.params import StructuredOutputs
from infer.contracts.request import FinishReason, Request, TokenLogprobs
from infer.contracts.server import Route
from infer.contracts.text import PartProtocol
from infer.errors import RequestError
from infer.llm import Completion
from infer.server import answers
from infer.server.http.access import CALLER
from infer.server.http.errors import REQUEST_ID
from infer.server.http.parsing import checked
from infer.server.http.streams import Array
from infer.server.schemas import ChatRequest, NamedCustom, NamedFunction, StreamOptions
from infer.server.service import Events, Json, Service
from infer.server.thoughts import Thoughts
from infer.text.tools import Calls, calls_schema, make_parser


def routes(service: Service, settings: object) -> list[Route]:
    return [
        Route(
            "POST",
            "/v1/chat/completions",
            Chat(service).handle,
            "Go on with a conversation.",
            answers.ChatCompletion,
            ChatRequest,
            answers.ChatChunk,
        )
    ]


class Chat:
    """The handler of POST /v1/chat/completions."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._conversation = service.conversation

    async def handle(self, http: web.Request) -> web.StreamResponse:
        asked = await self._service.read(http, ChatRequest)
        tools = [tool.shown() for tool in asked.offered_tools]
        forced = asked.forced_tools
        if tools and forced is None and self._conversation.tool_format is None:
            raise RequestError(
                "The format in which this model's chat template writes tool calls is unknown; set model.tool_format, "
                "or force a call with tool_choice.",
                param="tools",
            )
        prompt = await self._conversation.prompt(asked, tools)
        overrides: Json = {}
        if forced is not None:
            wanted = [tool.shown() for tool in forced]
            named = isinstance(asked.tool_choice, NamedFunction | NamedCustom)
            most = 1 if named or not asked.parallel_tool_calls else None
            overrides["structured_outputs"] = StructuredOutputs(json_schema=calls_schema(wanted, most))
        params = self._service.served.defaulted(checked(lambda: asked.sampling(**overrides), ChatRequest))
        tags, thinking, end = self._conversation.reasoning(prompt, params)
        requests = await self._service.requests(
            http, [prompt], params, asked, n=asked.n, prefix="chatcmpl", special=False, grammar_after=end
        )
        make = functools.partial(
            make_parser,
            {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools},
            self._conversation.tool_format,
            parallel=asked.parallel_tool_calls,
            forced=forced is not None,
            tags=tags,
            thinking=thinking,
            custom=asked.custom_tools,
        )
        thoughts = [Thoughts(self._service.tokens, tags, thinking) for _ in requests] if tags else []
        id = f"chatcmpl-{http[REQUEST_ID]}"
        told = {} if asked.metadata is None else {"metadata": asked.metadata}
        if asked.stream:
            frame = self._service.frame(id, "chat.completion.chunk")
            response = await self._service.stream(
                http, requests, functools.partial(self._frames, frame, asked, requests, make, thoughts)
            )
            http[CALLER].usage = _detailed(http[CALLER].usage or {}, thoughts)
            return response
        answers, usage = await self._service.whole(http, requests)
        for thought, answer in zip(thoughts, answers, strict=False):
            await self._service.writer.each(thought.push, answer.token_ids, len(answer.token_ids))
        http[CALLER].usage = usage = _detailed(usage, thoughts)
        choices = [await self._choice(i, asked, answer, make()) for i, answer in enumerate(answers)]
        frame = self._service.frame(id, "chat.completion") | told
        return await self._service.answer(http, frame | {"choices": choices, "usage": usage})

    async def _choice(self, index: int, asked: ChatRequest, answer: Completion, parser: PartProtocol) -> Json:
        message: Json = {"role": "assistant", "content": None, "refusal": None}
        calls: list[Json] = []
        numbering = Calls(asked.custom_tools)
        for piece in [*parser.push(answer.text), *parser.flush()]:
            delta = numbering.delta(piece)
            for key in ("content", "reasoning_content"):
                if key in delta:
                    message[key] = (message.get(key) or "") + delta[key]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({key: value for key, value in call.items() if key != "index"})
                elif "custom" in call:
                    calls[-1]["custom"]["input"] += call["custom"]["input"]
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        if calls:
            message["tool_calls"] = calls
        elif message["content"] is None:
            message["content"] = ""
        choice = {
            "index": index,
            "message": message,
            "logprobs": await self.logprobs(answer.logprobs or ()) if asked.logprobs else None,
            "finish_reason": _reason(answer.finish_reason, calls),
            "stop_reason": answer.stop_reason,
        }
        if asked.prompt_logprobs is not None:
            choice["prompt_logprobs"] = await self._service.prompt_logprobs(answer)
        return choice

    async def _frames(
        self,
        frame: Json,
        asked: ChatRequest,
        requests: Sequence[Request],
        make: Callable[[], PartProtocol],
        thoughts: Sequence[Thoughts],
        events: Events,
        usage: Callable[[], Json],
    ) -> AsyncGenerator[Json]:
        options = asked.stream_options or StreamOptions()
        if options.include_usage:
            frame = frame | {"usage": None}
        parsers = [make() for _ in requests]
        numberings = [Calls(asked.custom_tools) for _ in requests]
        for i in range(len(requests)):
            told = {"metadata": asked.metadata} if asked.metadata is not None and i == 0 else {}
            yield frame | told | {"choices": [_delta(i, {"role": "assistant", "content": ""})]}
        async for i, event in events:
            for token in event.token_ids if thoughts else ():
                thoughts[i].push(token)
            pieces = list(parsers[i].push(event.text))
            if event.finish_reason is not None:
                pieces += parsers[i].flush()
            deltas = [numberings[i].delta(piece) for piece in pieces]
            if not deltas and (event.logprobs or event.finish_reason or event.prompt_logprobs):
                deltas = [{}]
            for j, delta in enumerate(deltas):
                choice = _delta(i, delta)
                if j == 0 and event.logprobs:
                    choice["logprobs"] = await self.logprobs(event.logprobs)
                if j == 0 and event.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = await self._service.prompt_logprobs(event)
                if j == len(deltas) - 1 and event.finish_reason is not None:
                    choice["finish_reason"] = _reason(event.finish_reason, numberings[i].count)
                    choice["stop_reason"] = event.stop_reason
                so_far = {"usage": _detailed(usage(), thoughts)} if options.continuous_usage_stats else {}
                yield frame | {"choices": [choice]} | so_far
        if options.include_usage:
            yield frame | {"choices": [], "usage": _detailed(usage(), thoughts)}

    async def logprobs(self, entries: Sequence[TokenLogprobs]) -> Json:
        made = await self._service.writer.each(self._service.tokens.ranked, entries, len(entries))
        return {"content": Array(made), "refusal": None}


def _detailed(usage: Json, thoughts: Sequence[Thoughts]) -> Json:
    """The usage, with the number of tokens that were reasoning, its tags included."""
    return usage | {"completion_tokens_details": {"reasoning_tokens": sum(thought.count for thought in thoughts)}}


def _reason(reason: FinishReason | None, calls: object) -> str | None:
    return "tool_calls" if calls and reason == "stop" else reason


def _delta(index: int, delta: Json) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
