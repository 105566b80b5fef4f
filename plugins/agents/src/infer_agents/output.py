"""The output items of a response, and the events that tell of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from aiohttp import web

from infer.contracts.request import Event, FinishReason
from infer.contracts.text import PartProtocol, Piece
from infer_agents.response_tools import Offer
from infer_server.calling import call_id
from infer_server.events import Events, Json
from infer_server.http.errors import error_of
from infer_server.http.streams import Array
from infer_server.http.wire import ErrorBody
from infer_server.thoughts import Thoughts
from infer_server.tokens import Tokens

if TYPE_CHECKING:
    from infer_agents.records import Save

Kind = Literal["reasoning", "message", "function_call", "custom_tool_call"]
PREFIXES: Mapping[Kind, str] = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
"""What the ids of items begin with."""
CALLS: Mapping[str, tuple[str, str]] = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""Where items that are calls have their text, and what its events are called."""


class Output:
    """Builds an answer's output items as it arrives, and makes the stream's events.

    ``offers`` are the tools that may be called, by the names that the model is shown. ``tokens`` encodes
    log-probabilities, if these are wanted, and ``encrypt`` makes ``encrypted_content`` of reasoning, if that is.
    ``summary`` means that the reasoning is told as its summary, too.
    """

    def __init__(
        self,
        response: Json,
        parser: PartProtocol,
        offers: Mapping[str, Offer],
        thoughts: Thoughts | None,
        tokens: Tokens | None,
        *,
        encrypt: Callable[[str], str] | None = None,
        summary: bool = False,
    ) -> None:
        self._response = response
        self._parser = parser
        self._offers = offers
        self._thoughts = thoughts
        self._tokens = tokens
        self._encrypt = encrypt
        self._summary = summary
        self._done: list[Json] = []
        self._item: Json | None = None
        self._texts: list[str] = []
        self._logprobs: list[bytes] = []
        self._unsent: list[bytes] = []
        """The log-probabilities of tokens that no delta has carried yet."""

    def begin(self) -> Iterator[Json]:
        yield self._event("created", response=self._response)
        yield self.idle()

    def idle(self) -> Json:
        """The event that may come again while there is nothing to tell."""
        return self._event("in_progress", response=self._response)

    def push(self, news: Event) -> Iterator[Json]:
        thought = [self._thoughts is not None and self._thoughts.push(id) for id in news.token_ids]
        if self._tokens is not None:
            entries = zip(news.logprobs, thought, strict=True)
            self._unsent += [self._tokens.ranked(entry) for entry, hidden in entries if not hidden]
        yield from self._emit(self._parser.push(news.text))

    def end(self, reason: FinishReason | None, usage: Json) -> Iterator[Json]:
        yield from self._emit(self._parser.flush())
        whole = reason == "stop"
        status = "completed" if whole else "incomplete"
        if self._unsent or (self._item is None and not self._done):
            yield from self._emit([Piece("content", "")])
        yield from self._close(status)
        self._response = self._response | {
            "status": status,
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "output": self._done,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._thoughts.count if self._thoughts else 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        yield self._event(status, response=self._response)

    def failed(self, error: ErrorBody) -> Json:
        """The event that ends a response that fails."""
        code = error["code"] or ("invalid_prompt" if error["type"] == "invalid_request_error" else "server_error")
        told = {"code": code, "message": error["message"]}
        self._response = self._response | {"status": "failed", "error": told, "output": self._done}
        return self._event("failed", response=self._response)

    def _event(self, type: str, **fields: Any) -> Json:
        return {"type": f"response.{type}", **fields}

    def _of_item(self, type: str, **fields: Any) -> Json:
        """An event about the item that is being built."""
        assert self._item is not None
        return self._event(type, item_id=self._item["id"], output_index=len(self._done), **fields)

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    @property
    def _calling(self) -> bool:
        return self._item is not None and self._item["type"] in CALLS

    def _emit(self, pieces: Iterable[Piece]) -> Iterator[Json]:
        for kind, text in pieces:
            if kind == "call":
                yield from self._close("completed")
                yield from self._call(text)
                continue
            if kind != "arguments":
                type: Kind = "reasoning" if kind == "reasoning" else "message"
                if self._item is not None and self._item["type"] != type:
                    yield from self._close("completed")
                if self._item is None:
                    yield from self._open(type)
            self._texts.append(text)
            yield from self._delta(text)
        if self._calling:
            self._unsent = []  # of tokens that write calls

    def _delta(self, text: str) -> Iterator[Json]:
        assert self._item is not None
        type = self._item["type"]
        if type in CALLS:
            if text:
                yield self._of_item(f"{CALLS[type][1]}.delta", delta=text)
        elif type == "reasoning":
            yield self._of_item("reasoning_text.delta", content_index=0, delta=text)
            if self._summary:
                yield self._of_item("reasoning_summary_text.delta", summary_index=0, delta=text)
        else:
            entries, self._unsent = self._unsent, []
            self._logprobs += entries
            if text or entries:
                yield self._of_item("output_text.delta", content_index=0, delta=text, logprobs=Array(entries))

    def _add(self, type: Kind, **fields: Any) -> Json:
        """Begin an item."""
        index = f"_{len(self._done)}" if any(item["type"] == type for item in self._done) else ""
        id = str(self._response["id"]).replace("resp", PREFIXES[type], 1) + index
        self._item = {"id": id, "type": type, "status": "in_progress", **fields}
        self._texts, self._logprobs = [], []
        return self._event("output_item.added", output_index=len(self._done), item=self._item)

    def _open(self, type: Kind) -> Iterator[Json]:
        own: Json = {"summary": []} if type == "reasoning" else {"role": "assistant"}
        yield self._add(type, **own, content=[])
        yield self._of_item("content_part.added", content_index=0, part=self._part())
        if type == "reasoning" and self._summary:
            part = {"type": "summary_text", "text": ""}
            yield self._of_item("reasoning_summary_part.added", summary_index=0, part=part)

    def _call(self, name: str) -> Iterator[Json]:
        self._unsent = []
        offer = self._offers[name]
        type: Kind = "custom_tool_call" if offer.custom else "function_call"
        whose = {} if offer.namespace is None else {"namespace": offer.namespace.name}
        yield self._add(type, call_id=call_id(), **whose, name=offer.tool.name, **{CALLS[type][0]: ""})

    def _close(self, status: str) -> Iterator[Json]:
        if self._item is None:
            return
        type, text, final = self._item["type"], self._text, Json()
        if type in CALLS:
            field, kind = CALLS[type]
            final = {field: text}
            name = {"name": self._item["name"]} if type == "function_call" else {}
            yield self._of_item(f"{kind}.done", **name, **final)
        else:
            final = {"content": [self._part()]}
            if type == "reasoning":
                yield self._of_item("reasoning_text.done", content_index=0, text=text)
            else:
                told = Array(self._logprobs)
                yield self._of_item("output_text.done", content_index=0, text=text, logprobs=told)
            yield self._of_item("content_part.done", content_index=0, part=self._part())
        if type == "reasoning" and self._summary:
            part = {"type": "summary_text", "text": text}
            final["summary"] = [part]
            yield self._of_item("reasoning_summary_text.done", summary_index=0, text=text)
            yield self._of_item("reasoning_summary_part.done", summary_index=0, part=part)
        if type == "reasoning" and self._encrypt is not None:
            final["encrypted_content"] = self._encrypt(text)
        item = self._item | {"status": status} | final
        yield self._event("output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._item = None

    def _part(self) -> Json:
        assert self._item is not None
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": Array(self._logprobs)}


async def frames(
    http: web.Request,
    output: Output,
    save: Save | None,
    events: Events,
    usage: Callable[[], Json],
    *,
    failures: bool = False,
) -> AsyncGenerator[Json]:
    """The events of a response. Before its last one, ``save`` keeps it, and also if it fails, if ``failures``."""
    for frame in output.begin():
        yield frame
    last: Event | None = None
    tokens: list[int] = []
    try:
        async for _, news in events:
            last = news
            tokens += news.token_ids
            for frame in output.push(news):
                yield frame
        reason, stop = (None, None) if last is None else (last.finish_reason, last.stop_reason)
        for frame in output.end(reason, usage()):
            if save is not None and "response" in frame:
                await save(frame["response"], tokens, reason, stop)
            yield frame
    except Exception as error:
        frame = output.failed(error_of(http, error))
        if failures and save is not None:
            await save(frame["response"], tokens, "error", None)
        else:
            frame["response"]["store"] = False
        yield frame
        raise
