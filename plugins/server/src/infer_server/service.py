"""What the endpoints that use the model share: reading bodies, making requests to the engine, answering from events."""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import Future
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar, cast

from aiohttp import web

from infer.assemble.served import Served
from infer.contracts.adapters import Adapter
from infer.contracts.params import SamplingParams
from infer.contracts.request import Event, Owner, Pooling, Request, ThinkingTokens, TokenLogprobs
from infer.contracts.sections import Settings
from infer.engine.loop import EngineLoop
from infer.errors import InferError, RequestError, RequestTimeoutError
from infer.llm import Completion
from infer.plugins.discovery import Plugins
from infer.text.detokenizer import TokenTexts
from infer_server.compiling import Compiler
from infer_server.conversation import Conversation
from infer_server.door import AsyncDoor
from infer_server.events import LONG_CHARS, Events, Frames, Json, RequestFields, TokenCount, raise_if_failed
from infer_server.http.access import CALLER
from infer_server.http.bodies import MAX_BODIES, BodyBudget, Reader, arrived, unpacked
from infer_server.http.body import Body
from infer_server.http.children import give_back
from infer_server.http.errors import BODY, REQUEST_ID, NotFoundError, error_of, id_headers
from infer_server.http.keys import Keys
from infer_server.http.quotas import COUNTED, Quotas
from infer_server.http.streams import PIECE_BYTES, Array, Stream, Writer, write, write_pieces
from infer_server.http.wire import LATEST, wire_format
from infer_server.tokens import Tokens, number

log = logging.getLogger(__name__)

INLINE_CHARS = 4096
"""If a request's prompts are longer than this in all, they are tokenized in a thread, so that other streams can
continue."""
SILENCE_S = 15.0
"""A stream that has sent nothing for so many seconds says that it goes on."""
ADAPTER = web.RequestKey("adapter", Adapter)
"""What a request has chosen, if it is not the base."""
BEGAN = web.RequestKey("began", float)
"""When the first of a request's prompts was about to be tokenized, on ``time.perf_counter``. Its time counts from
then."""
T = TypeVar("T", bound=Body)
R = TypeVar("R")


class Service:
    """The model as endpoints see it: what is ``served``, the ``engine_loop`` that runs it and the ``door`` to it, the
    ``settings`` and ``plugins``, the ``keys`` that requests have to show, and the helpers that endpoints share. Use it
    in one event loop."""

    def __init__(self, engine_loop: EngineLoop, served: Served, plugins: Plugins, settings: Settings) -> None:
        self.engine_loop = engine_loop
        self.served = served
        self.settings = settings
        self.plugins = plugins
        self.keys = Keys(settings.server.api_keys)
        self.conversation = Conversation(served, settings.model)
        self.tokens = Tokens(served.tokenizer)
        self.texts = TokenTexts(served.tokenizer)
        self.writer = Writer()
        server = settings.server
        self.quotas = Quotas(server.requests_per_minute, server.tokens_per_minute)
        self.door = AsyncDoor(engine_loop, lambda key, tokens: self.quotas.charge(key, tokens))
        self._long = ThreadPoolExecutor(1, "infer-long-texts")
        self._unsubscribe: set[Callable[[], None]] = set()
        self._at_end: list[Callable[[], Awaitable[None]]] = []
        self._reader = Reader(settings.server.unknown_fields)
        self._settings = settings.server
        self._budget = BodyBudget(MAX_BODIES * self._settings.max_body_bytes)
        self._compile = Compiler(served.grammars)
        self._told: set[tuple[type[Body], str]] = set()
        """Which fields of which bodies the log has said have no effect."""

    async def begin(self) -> None:
        """Start what the first requests would otherwise wait for. Call it when all kinds of bodies are announced."""
        await self._reader.begin()

    async def close(self) -> None:
        """End the child processes, unregister the observers, and close what endpoints have."""
        while self._at_end:
            await self._at_end.pop()()
        self._long.shutdown(wait=False, cancel_futures=True)
        while self._unsubscribe:
            self._unsubscribe.pop()()
        await self._reader.close()
        await self._compile.close()
        await self.conversation.close()

    def at_end(self, close: Callable[[], Awaitable[None]]) -> None:
        """Call an endpoint's function when the server has ended."""
        self._at_end.append(close)

    def observe(self, observer: object) -> Callable[[], None]:
        """Register an endpoint's object as an observer: it has ``infer_step_finished(record)``,
        ``infer_request_finished(record)`` or both. It is called until the server ends, or the returned function is
        called."""
        unsubscribe = self.plugins.subscribe(f"The observer {type(observer).__name__}", observer)
        self._unsubscribe.add(unsubscribe)

        def stop() -> None:
            if unsubscribe in self._unsubscribe:
                self._unsubscribe.remove(unsubscribe)
                unsubscribe()

        return stop

    def expect(self, model: type[Body]) -> None:
        """Announce that bodies of this kind will be read. Call it before any body is read. Raises ValueError."""
        self._reader.expect(model)

    async def read(self, http: web.Request, model: type[T], most: int | None = None, *, place: bool = False) -> T:
        """Read and check the body, of at most ``most`` bytes if that is less than ``server.max_body_bytes``. With
        ``place``, what it asks needs a place in the engine, and counts for the quotas: while there is none, or a quota
        is used up, the body is not read. Raises RequestError, QueueFullError, RateLimitError or an aiohttp HTTP
        error."""
        if place:
            self.engine_loop.check_place()
            owner = self.keys.owner(http)
            self.quotas.admit(owner)
            http[COUNTED] = owner
        limit = self._settings.max_body_bytes
        most = limit if most is None else min(most, limit)
        with self._budget.body() as grow:
            body = await arrived(http, most, grow, self._settings.body_timeout_s)
            body = await unpacked(http, body, most, grow)
            parsed = await self._reader(body, model)
        http[BODY] = cast(Body, parsed)
        for field, why in parsed.ignored.items():
            self.tell_ignored(http, field, why)
        name: str | None = getattr(parsed, "model", None)
        if name is not None and not self.choose(http, name):
            raise self.unknown(name)
        http[CALLER].user = getattr(parsed, "safety_identifier", None) or getattr(parsed, "user", None)
        return parsed

    def tell_ignored(self, http: web.Request, what: str, why: str) -> None:
        """Say in the log, once for each kind of body, that a field of it has no effect. ``why`` is a description that
        begins with ``IGNORED``, and ``what`` is never a text of the client's."""
        if (key := (type(http[BODY]), what)) not in self._told:
            self._told.add(key)
            where = getattr(http.match_info.route.resource, "canonical", "")
            log.info("%s: %s is %s", where, what, why[:1].lower() + why[1:].removesuffix("."))

    async def parse(self, data: bytes, model: type[T]) -> T:
        """Parse and check JSON within the limits of bodies, as ``read`` does. Raises RequestError."""
        return await self._reader(data, model)

    def is_model(self, name: str) -> bool:
        """Whether clients may ask for the model, or for an adapter of it, by this name. Clients of Ollama append
        ``:latest``, on its own routes and on OpenAI's."""
        called = {name, name.removesuffix(LATEST)}
        aliases = self._settings.aliases
        known = "*" in aliases or not called.isdisjoint((self.served.name, *aliases))
        return known or self.adapter(name) is not None

    def unknown(self, name: str) -> NotFoundError:
        """The refusal of a request for a model of this name."""
        return NotFoundError(
            f"The model {name!r} is not served here; this server has {self.served.name!r}.",
            param="model",
            code="model_not_found",
        )

    def choose(self, http: web.Request, name: str) -> bool:
        """Have a request answered by the model, or by its adapter, of this name. Returns whether there is one. What
        has been chosen stays, even if another adapter of that name is loaded before all of the request is answered."""
        if (adapter := self.adapter(name)) is None:
            return self.is_model(name)
        http[ADAPTER] = adapter
        return True

    def names(self) -> list[str]:
        """What clients may ask for by name: the model, its aliases and its adapters."""
        adapters = self.served.adapters
        own = [self.served.name, *(name for name in self._settings.aliases if name != "*")]
        return [*own, *(adapter.name for adapter in (adapters.loaded() if adapters is not None else ()))]

    def adapter(self, name: str) -> Adapter | None:
        """The adapter that clients may ask for by this name."""
        adapters = self.served.adapters
        return None if adapters is None else adapters.find(name) or adapters.find(name.removesuffix(LATEST))

    def model_name(self, http: web.Request) -> str:
        """The name of what answers a request: of the adapter that it asks for, or of the model."""
        return http[ADAPTER].name if ADAPTER in http else self.served.name

    def check_choices(self, count: int, param: str) -> None:
        """Raise RequestError if one body asks for more answers than may be."""
        if count > self._settings.max_choices:
            raise RequestError(
                f"This asks for {count} answers at once; server.max_choices allows {self._settings.max_choices}.",
                param=param,
            )

    async def requests(
        self,
        http: web.Request,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams,
        fields: RequestFields,
        *,
        n: int = 1,
        prefix: str = "cmpl",
        special: bool = True,
        grammar_after: tuple[int, ...] = (),
        thinking: ThinkingTokens | None = None,
        forks: Callable[[Sequence[int]], tuple[int, ...]] | tuple[int, ...] = (),
        pooling: Pooling | None = None,
    ) -> list[Request]:
        """Make ``n`` requests for each prompt, in order. Raises RequestError, or RequestTimeoutError if the time of
        ``http`` is up, which all its prompts have together."""
        self.check_choices(len(prompts) * n, "n" if n > 1 else "prompt")
        owner = Owner(self.keys.owner(http), http[CALLER].user or "")
        trace = {name: http.headers[name] for name in ("traceparent", "tracestate", "baggage") if name in http.headers}
        timeout_s = self._time_left(http)
        grammar, adapter = await self._compile(params.structured_outputs), http.get(ADAPTER)

        def make() -> list[Request]:
            made: list[Request] = []
            for p, prompt in enumerate(prompts):
                for i in range(n):
                    request = self.served.request(
                        made[-1].prompt_token_ids if i else prompt,
                        _seeded(params, i),
                        special=special,
                        id=f"{prefix}-{http[REQUEST_ID]}" + (f"-{len(made)}" if len(prompts) * n > 1 else ""),
                        cache_salt=fields.cache_salt,
                        priority=fields.priority,
                        owner=owner,
                        group=f"{http[REQUEST_ID]}-{p}" if n > 1 else "",
                        grammar=grammar,
                        grammar_after=grammar_after,
                        thinking=thinking,
                        forks=made[-1].forks if i else forks,
                        pooling=pooling,
                        trace=trace,
                        adapter=adapter,
                        timeout_s=timeout_s,
                    )
                    made.append(request)
            return made

        return await self.tokenize(prompts, make, n)

    def _time_left(self, http: web.Request) -> float | None:
        """How many seconds are left of a request's time, which begins with its first prompt (``BEGAN``); None if there
        is no limit. Raises RequestTimeoutError if none are."""
        limits = self._settings.request_timeout_s, getattr(http.get(BODY), "timeout", None)
        timeout_s = min((limit for limit in limits if limit is not None), default=None)
        if timeout_s is None:
            return None
        now = time.perf_counter()
        left: float = timeout_s - (now - http.setdefault(BEGAN, now))
        if left <= 0:
            raise RequestTimeoutError(f"The request has not ended within its {timeout_s:g} seconds (timeout).")
        return left

    async def tokenize(self, prompts: Sequence[str | Sequence[int]], make: Callable[[], R], n: int = 1) -> R:
        """The result of ``make``, which tokenizes the prompts and copies each of them ``n`` times, without holding up
        others."""
        if sum(map(len, prompts)) * n <= INLINE_CHARS:
            return make()
        if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) <= LONG_CHARS:
            return await asyncio.to_thread(make)

        def long() -> R:
            try:
                return make()
            finally:
                give_back()  # of a text of megabytes, hundreds of megabytes

        return await asyncio.get_running_loop().run_in_executor(self._long, long)

    async def whole(
        self, http: web.Request, requests: Sequence[Request], *, patient: bool = False
    ) -> tuple[list[Completion], Json]:
        """Run requests, and wait for places if ``patient``. Returns all answers, in the order of the requests, and the
        usage. If one fails, the others are aborted and its error is raised."""
        count = TokenCount(requests)
        answers = [Completion(request.prompt_token_ids) for request in requests]
        async with aclosing(self.door.stream(*requests, patient=patient)) as events:
            async for event in events:
                answers[count.add(event)].add(event)
        http[CALLER].usage = count.usage()
        return answers, count.usage()

    async def last(self, http: web.Request, requests: Sequence[Request], frames: Frames) -> Json:
        """Run requests and return the last frame that ``frames`` makes of their events. The first failure is raised."""
        count = TokenCount(requests)
        async with (
            aclosing(self.door.stream(*requests)) as events,
            aclosing(frames(_counted(events, count), count.usage)) as made,
        ):
            async for frame in made:
                last = frame
        http[CALLER].usage = count.usage()
        return last

    async def answer(self, http: web.Request, value: Json) -> web.StreamResponse:
        """Answer with a value as JSON."""
        pieces = self.writer.pieces(value)
        length = sum(map(len, pieces))
        if length <= PIECE_BYTES:
            return web.Response(body=b"".join(pieces), content_type="application/json", charset="utf-8")
        response = web.StreamResponse(headers=id_headers(http))
        response.content_type, response.charset = "application/json", "utf-8"
        response.content_length = length
        await response.prepare(http)
        await write_pieces(http, response, pieces, self._settings.stall_timeout_s)
        await response.write_eof()
        return response

    async def stream(
        self, http: web.Request, requests: Sequence[Request], frames: Frames, idle: Json | None = None
    ) -> web.StreamResponse:
        """Run requests and answer with a stream in the route's wire format: the frames that ``frames`` makes
        of the requests' events. What keeps requests from being taken is answered with an error status, a later failure
        with an error in the stream. The headers are sent as soon as the requests are taken, and so are frames that need
        no event. Whenever nothing was sent for ``SILENCE_S``, the frame ``idle`` is, or the format's ``IDLE``, so that
        no proxy and no client takes a stream that computes for a dead connection."""
        count, written = TokenCount(requests), wire_format(http)
        async with aclosing(self.door.stream(*requests)) as events, _taken(events) as first:
            response = web.StreamResponse(headers={"Cache-Control": "no-cache"} | id_headers(http))
            response.content_type = written.CONTENT_TYPE
            await response.prepare(http)
            stream = Stream(http, response, written, self.writer, self._settings.stall_timeout_s)
            async with (
                aclosing(frames(_counted(events, count, first), count.usage)) as made,
                stream.kept_alive(SILENCE_S, idle),
            ):
                try:
                    async for frame in made:
                        await stream.send(frame)
                except (ConnectionError, TimeoutError):
                    raise  # the client has left
                except Exception as error:
                    if not isinstance(error, InferError):
                        log.error("request %s failed", http[REQUEST_ID], exc_info=error)
                    await stream.send(written.failure(error_of(http, error)))
        http[CALLER].usage = count.usage()
        if written.DONE:
            await write(http, response, written.DONE, self._settings.stall_timeout_s)
        await response.write_eof()
        return response

    def frame(self, http: web.Request, id: str, kind: str) -> Json:
        """The fields that every answer begins with."""
        return {"id": id, "object": kind, "created": int(time.time()), "model": self.model_name(http)}

    async def prompt_logprobs(self, answer: Completion | Event) -> Array | None:
        """The prompt's logprobs, keyed by token id as in vLLM."""
        entries = answer.prompt_logprobs
        return None if entries is None else Array(await self.writer.each(self._ranked, entries, len(entries)))

    def _ranked(self, entry: TokenLogprobs | None) -> bytes:
        if entry is None:
            return b"null"
        ranked = {t: (p, rank) for rank, (t, p) in enumerate(entry.top, 1)}
        ranked.setdefault(entry.token_id, (entry.logprob, entry.rank))
        members = [
            f'"{t}": {{"logprob": {number(p)}, "rank": {rank}, "decoded_token": {self.tokens.quoted(t)}}}'
            for t, (p, rank) in ranked.items()
        ]
        return f"{{{', '.join(members)}}}".encode()


def _seeded(params: SamplingParams, i: int) -> SamplingParams:
    """The parameters of the ``i``-th answer to one prompt: each has a seed of its own."""
    if not i or params.seed is None:
        return params
    seed = params.seed + i
    return params.model_copy(update={"seed": seed if seed < 2**63 else seed - 2**64})


@asynccontextmanager
async def _taken(events: AsyncGenerator[Event]) -> AsyncGenerator[Future[Event]]:
    """The first event of requests that the engine has taken. Raises what keeps them from being taken."""
    first = asyncio.ensure_future(anext(events))
    try:
        await asyncio.sleep(0)  # the engine takes the requests, or refuses them
        if first.done():
            raise_if_failed(first.result())
        yield first
    finally:
        if not first.done():
            first.cancel()
            await asyncio.wait((first,))


async def _counted(events: AsyncGenerator[Event], count: TokenCount, first: Future[Event] | None = None) -> Events:
    """``first`` and the further events, each counted and with the index of its request. Raises the first failure."""
    if first is not None:
        event = await first
        yield count.add(event), event
    async for event in events:
        yield count.add(event), event
