"""infer in Python, without a server."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from infer.assemble.assembly import start
from infer.contracts.params import SamplingParams
from infer.contracts.request import Event, FinishReason, Owner, Request, TokenLogprobs
from infer.contracts.sections import Settings
from infer.errors import QueueFullError, RequestError, capital
from infer.plugins.discovery import Plugins
from infer.progress import bar
from infer.settings import load_settings

Prompt = str | Sequence[int]


@dataclass
class Completion:
    """A prompt and its answer."""

    prompt_token_ids: tuple[int, ...]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """One per token, if requested."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """If requested: None for the first prompt token, then one per prompt token."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached: int = 0

    def add(self, event: Event) -> None:
        """Take over what the event says is new."""
        self.text += event.text
        self.token_ids += event.token_ids
        if event.logprobs:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += event.logprobs
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = list(event.prompt_logprobs)
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
        self.error, self.num_cached = event.error, event.num_cached


class Handle:
    """A request that is being answered."""

    def __init__(self, llm: LLM, request: Request) -> None:
        self.request = request
        self._llm = llm
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        llm.loop.submit(request, self._post)

    def _post(self, events: Sequence[Event]) -> None:
        for event in events:
            self._events.put(event)

    def events(self) -> Iterator[Event]:
        """Yield events up to the last one, waiting for each. Raises EngineDeadError if the engine fails meanwhile."""
        while True:
            event = self._llm.checked(self._events.get())
            yield event
            if event.finish_reason is not None:
                return

    def abort(self) -> None:
        self._llm.loop.abort(self.request.id)


class LLM:
    """A model, ready to answer.

    ``path`` is a folder or file, a hub id or a bundled name. Further arguments are settings sections, as in
    settings.toml: ``LLM("demo", cache={"backend": "slotted"}, engine={"prefill_chunk_size": 256})``. No settings file
    and no environment variable is read. ``plugins`` are plugin modules or objects in addition to the installed ones."""

    def __init__(self, path: str, *, plugins: Sequence[object] = (), **sections: Mapping[str, Any]) -> None:
        model = {"path": path, **sections.pop("model", {})}
        discovered = Plugins.discover(plugins)
        loaded = load_settings(discovered, env={}, overrides={"model": model, **sections}, read_file=False)
        self._start(loaded.settings, discovered)

    @classmethod
    def from_settings(cls, settings: Settings, plugins: Plugins) -> Self:
        """As commands get both: ``CommandContext``."""
        llm = cls.__new__(cls)
        llm._start(settings, plugins)
        return llm

    def _start(self, settings: Settings, plugins: Plugins) -> None:
        self.loop, self.served = start(settings, plugins)

    def generate(
        self,
        prompts: Prompt | Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Completion]:
        """Answer all prompts; the answers are in the prompts' order. Without ``params``, the checkpoint's sampling
        parameters apply; with ``adapter``, the model is as the adapter of that name changes it. Raises RequestError,
        before anything is generated, if a prompt cannot be served, and EngineDeadError if the engine fails. An answer
        that fails alone has the ``finish_reason`` "error" and an ``error``."""
        many: Sequence[Any] = [prompts] if _is_one(prompts) else prompts
        each = [params or self.served.defaulted()] * len(many) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(many):
            raise RequestError(f"{len(many)} prompts came with {len(each)} SamplingParams.", param="params")
        waiting = [self.request(prompt, p, adapter=adapter) for prompt, p in zip(many, each, strict=True)]
        answers = {request.id: Completion(request.prompt_token_ids) for request in waiting}
        mailbox: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
        left, running = len(waiting), 0
        with bar("prompts", left) as done:
            while left:
                try:
                    if waiting:
                        accepted = self.loop.submit_all(waiting, mailbox.put)
                        running += accepted
                        del waiting[:accepted]
                except QueueFullError:  # submit the rest when one of ours has ended
                    if not running:
                        raise
                for event in mailbox.get():
                    answers[event.request_id].add(self.checked(event))
                    if event.finish_reason is not None:
                        left, running = left - 1, running - 1
                        done()
        return list(answers.values())

    def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation. Raises RequestError."""
        (answer,) = self.generate(self.encode(self.render(messages)), params)
        return answer

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that the checkpoint's chat template makes. Raises RequestError."""
        if self.served.template is None:
            raise RequestError(
                "This checkpoint has no chat template; give one with model.chat_template, or do without chat.",
                param="messages",
            )
        try:
            return self.served.template.prompt(messages)
        except ValueError as error:
            raise RequestError(f"{capital(str(error))}.", param="messages") from None

    def encode(self, prompt: str) -> list[int]:
        """The token ids of a text that already contains its special tokens, such as a chat template's prompt. Raises
        RequestError."""
        return self.served.encode(prompt, special=False)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        user: str = "",
        adapter: str | None = None,
    ) -> Handle:
        """Submit a request and return at once. May be called from any thread."""
        return Handle(self, self.request(prompt, params, id, cache_salt, priority, user, adapter))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Event]:
        """Yield a request's events as they come. Leaving the loop early aborts the request."""
        handle = self.submit(prompt, params)
        try:
            yield from handle.events()
        finally:
            handle.abort()

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGenerator[Event]:
        """``stream`` for asyncio."""
        running, coming = asyncio.get_running_loop(), asyncio.Queue[Sequence[Event]]()

        def post(events: Sequence[Event]) -> None:
            running.call_soon_threadsafe(coming.put_nowait, events)

        request = self.request(prompt, params)
        self.loop.submit(request, post)
        try:
            while True:
                for event in await coming.get():
                    yield self.checked(event)
                    if event.finish_reason is not None:
                        return
                await asyncio.sleep(0)  # let others run, if passes have piled up
        finally:
            self.loop.abort(request.id)

    def checked(self, event: Event) -> Event:
        """Return the event. Raises EngineDeadError if it reports that the whole engine has failed."""
        if event.finish_reason == "error":
            self.loop.check()
        return event

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        user: str = "",
        adapter: str | None = None,
    ) -> Request:
        """Tokenize and check a request. Raises RequestError."""
        fields: dict[str, Any] = {"id": id, "cache_salt": cache_salt, "priority": priority, "owner": Owner(user=user)}
        if adapter is not None:
            adapters = self.served.adapters
            fields["adapter"] = found = None if adapters is None else adapters.find(adapter)
            if found is None:
                raise RequestError(f"There is no adapter {adapter!r}; load it with adapters.load.", param="adapter")
        return self.served.request(prompt, params or self.served.defaulted(), **fields)

    def close(self, drain_s: float = 0.0) -> None:
        """Let running requests go on for ``drain_s`` seconds, abort the rest, and stop the engine."""
        self.loop.close(drain_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _is_one(prompts: Prompt | Sequence[Any]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
