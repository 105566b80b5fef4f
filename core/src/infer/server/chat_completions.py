"""POST /v1/chat/completions, whole or streamed."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from aiohttp import web

from infer.contracts.params import StructuredOutputs
from infer.contracts.protocols import PartProtocol, Route
from infer.contracts.request import FinishReason, Request, TokenLogprobs
from infer.errors import RequestError
from infer.llm import Completion
from infer.server import answers
from infer.server.http_errors import REQUEST_ID
from infer.server.parsing import checked
from infer.server.schemas import ChatRequest, StreamOptions
from infer.server.service import Events, Json, Service
from infer.server.writing import Array
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
        tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()]
        forced = asked.forced_tools
        if asked.tool_choice == "none":
            tools = []
        elif tools and forced is None and self._conversation.tool_format is None:
            raise RequestError(
                "This model's chat template writes tool calls in no format that is known here; set model.tool_format, "
                "or force a call with tool_choice.",
                param="tools",
            )
        prompt = await self._conversation.prompt(asked, tools)
        overrides: Json = {}
        if forced is not None:
            wanted = [tool.model_dump(exclude_none=True) for tool in forced]
            one = asked.tool_choice != "required" or not asked.parallel_tool_calls
            overrides["structured_outputs"] = StructuredOutputs(json_schema=calls_schema(wanted, 1 if one else None))
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
        )
        id = f"chatcmpl-{http[REQUEST_ID]}"
        if asked.stream:
            frame = self._service.frame(id, "chat.completion.chunk")
            return await self._service.stream(
                http, requests, functools.partial(self._frames, frame, asked, requests, make)
            )
        answers, usage = await self._service.whole(http, requests)
        choices = [await self._choice(i, asked, answer, make()) for i, answer in enumerate(answers)]
        frame = self._service.frame(id, "chat.completion")
        return await self._service.answer(http, frame | {"choices": choices, "usage": usage})

    async def _choice(self, index: int, asked: ChatRequest, answer: Completion, parser: PartProtocol) -> Json:
        message: Json = {"role": "assistant", "content": None, "refusal": None}
        calls: list[Json] = []
        numbering = Calls()
        for piece in [*parser.push(answer.text), *parser.flush()]:
            delta = numbering.delta(piece)
            for key in ("content", "reasoning_content"):
                if key in delta:
                    message[key] = (message.get(key) or "") + delta[key]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({"id": call["id"], "type": call["type"], "function": call["function"]})
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
        events: Events,
        usage: Callable[[], Json],
    ) -> AsyncGenerator[Json]:
        options = asked.stream_options or StreamOptions()
        if options.include_usage:
            frame = frame | {"usage": None}
        parsers = [make() for _ in requests]
        numberings = [Calls() for _ in requests]
        for i in range(len(requests)):
            yield frame | {"choices": [_delta(i, {"role": "assistant", "content": ""})]}
        async for i, event in events:
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
                yield frame | {"choices": [choice]} | ({"usage": usage()} if options.continuous_usage_stats else {})
        if options.include_usage:
            yield frame | {"choices": [], "usage": usage()}

    async def logprobs(self, entries: Sequence[TokenLogprobs]) -> Json:
        made = await self._service.writer.each(self._service.tokens.ranked, entries, len(entries))
        return {"content": Array(made), "refusal": None}


def _reason(reason: FinishReason | None, calls: object) -> str | None:
    return "tool_calls" if calls and reason == "stop" else reason


def _delta(index: int, delta: Json) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
