"""Between an agent and the server: has the model say what each turn needs, and checks what both say."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from aiohttp import web
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tests.agents.test_response_tools import built
from tests.puppet import Puppet, say
from tests.serving import Running

from infer_agents.message_bodies import MessagesRequest
from infer_agents.response_bodies import ResponsesRequest
from infer_server.endpoints.chat_completions import ChatRequest
from infer_server.http.body import Body
from infer_server.http.parsing import parse

T = TypeVar("T")
Json = dict[str, Any]
MESSAGES, RESPONSES, CHATS = "/v1/messages", "/v1/responses", "/v1/chat/completions"
BODIES: Mapping[str, type[Body]] = {MESSAGES: MessagesRequest, RESPONSES: ResponsesRequest, CHATS: ChatRequest}
COUNTS = {MESSAGES: f"{MESSAGES}/count_tokens", RESPONSES: f"{RESPONSES}/input_tokens", CHATS: "/tokenize"}
"""What counts a prompt's tokens, by what answers it."""
ENDS = {MESSAGES: b'"type": "message_stop"', RESPONSES: b'"type": "response.completed"', CHATS: b"data: [DONE]"}
"""What only the last event of a stream has."""
BLOCK = 16
"""The tokens of a block of the cache."""
ENDLESS = "and on " * 20_000
API = Path(__file__).parents[2] / "docs/api.md"


@functools.cache
def inert(path: str) -> frozenset[str]:
    """The last parts of the fields that the HTTP API's page lists as accepted without an effect."""
    heading = {MESSAGES: "Messages", RESPONSES: "Responses"}.get(path)
    if heading is None:
        return frozenset()
    section = API.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (listed,) = [text for text in section.split("\n\n") if re.search(r"accepted and have no effect\b", text)]
    return frozenset(name.rpartition(".")[2] for name in re.findall(r"`([a-z_.]+)`", listed))


def results(body: Json) -> list[tuple[str, str]]:
    """The results of calls that a body has: the id of each, and what it says, in JSON."""
    found = []
    for each in (*body.get("messages", ()), *body.get("input", ())):
        content = each.get("content")
        if each.get("role") == "tool":
            found.append((each["tool_call_id"], content))
        elif each.get("type", "").endswith("_call_output"):
            found.append((each["call_id"], each["output"]))
        elif isinstance(content, list):
            found += [(block["tool_use_id"], block["content"]) for block in content if block["type"] == "tool_result"]
    return [(id, json.dumps(said)) for id, said in found]


def parts(path: str, said: Iterable[Json]) -> list[Any]:
    """What items or messages consist of, without what differs from request to request though they say the same."""
    if path == RESPONSES:
        return list(said)
    found: list[Any] = []
    for message in said:
        content = message.get("content") or ()
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for block in blocks:
            plain = {key: value for key, value in block.items() if key != "cache_control"}
            found.append({"role": message["role"], "id": message.get("tool_call_id"), "block": plain})
        for call in message.get("tool_calls") or ():
            function = call["function"]
            own = {"id": call["id"], "name": function["name"], "arguments": json.loads(function["arguments"])}
            found.append({"role": message["role"], "call": own})
    return found


def within(one: Any, other: Any) -> bool:
    """Whether both are the same but for fields that the other has besides, such as an argument's default."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(key in other and within(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(within, one, other))
    return bool(one == other)


def put_together(path: str, stream: bytes) -> Json:
    """The answer that a client makes of a stream's events, by the libraries of those whose API it is."""
    events = [
        json.loads(data)
        for line in stream.decode().splitlines()
        if (data := line.removeprefix("data: ")).startswith("{")
    ]
    if path == MESSAGES:
        snapshot: Any = None
        buffers: dict[int, bytes] = {}
        for event in events:
            if event["type"] == "ping":  # which says that the prompt still waits
                continue
            snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
        return shown(path, snapshot.model_dump())
    if path == RESPONSES:
        answer: Json = events[-1]["response"]
        assert built(events[:-1]) == answer["output"]
        return answer
    state = ChatCompletionStreamState()
    for event in events:
        state.handle_chunk(ChatCompletionChunk.model_validate(event))
    return shown(path, state.get_final_completion().model_dump())


def shown(path: str, answer: Json) -> Json:
    """An answer as the library has it."""
    if path == RESPONSES:
        return answer
    model: Any = Message if path == MESSAGES else ChatCompletion
    made: Json = model.model_validate(answer).model_dump(exclude_none=True)
    for choice in made.get("choices", ()):
        for call in choice["message"].get("tool_calls", ()):  # a stream numbers them, and begins with an empty text
            call.pop("index", None)
            choice["message"].setdefault("content", "")
    return made


def settled(value: Any, key: str = "") -> Any:
    """An answer without what is another one each time: ids, when it was made, and what was in the cache."""
    if isinstance(value, list):
        return [settled(each) for each in value]
    if not isinstance(value, dict):
        return type(value) if key in ("id", "call_id", "created", "created_at") else value
    value = dict(value)
    if "cache_read_input_tokens" in value:
        value["input_tokens"] += value.pop("cache_read_input_tokens")
    value.pop("cached_tokens", None)
    return {name: settled(each, name) for name, each in value.items()}


def came_out(path: str, answer: Json) -> list[Any]:
    """What an answer consists of, as ``parts``."""
    if path == RESPONSES:  # Codex keeps all of an item but the status of reasoning
        dropped = {"reasoning": ["status"]}
        return [
            {key: value for key, value in item.items() if key not in dropped.get(item["type"], ())}
            for item in answer["output"]
        ]
    return parts(path, [answer if path == MESSAGES else answer["choices"][0]["message"]])


def call_ids(path: str, answer: Json) -> list[str]:
    """The ids of an answer's calls, as results refer to them."""
    if path == MESSAGES:
        return [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    if path == RESPONSES:
        return [item["call_id"] for item in answer["output"] if "call_id" in item]
    return [call["id"] for call in answer["choices"][0]["message"].get("tool_calls", ())]


def cached(path: str, answer: Json) -> int:
    """How many of a prompt's tokens were in the cache."""
    usage = answer["usage"]
    if path == MESSAGES:
        return int(usage["cache_read_input_tokens"])
    details = usage["input_tokens_details" if path == RESPONSES else "prompt_tokens_details"]
    return int(details["cached_tokens"])


def thinks(body: Json) -> bool:
    """Whether the template opens the model's reasoning."""
    effort = (body.get("reasoning") or {}).get("effort", "none")
    kind = (body.get("thinking") or {}).get("type", "disabled")
    return (kind, effort) != ("disabled", "none")


class Turn(NamedTuple):
    """A request of the agent's with tools, and what came back."""

    number: int
    """From 0: the results of tools in it."""
    path: str
    query: str
    body: Json
    said: str
    """What the model wrote."""
    tokens: int
    """Of its prompt."""
    answer: Json
    """As a client puts it together."""

    @property
    def cached(self) -> int:
        return cached(self.path, self.answer)

    @property
    def conversation(self) -> list[Any]:
        return parts(self.path, self.body["input" if self.path == RESPONSES else "messages"])

    def follows(self, before: Turn) -> None:
        """Check that this one begins with what was asked and answered before, and differs in nothing else."""
        told, asked, answered = self.conversation, before.conversation, came_out(before.path, before.answer)
        assert told[: len(asked)] == asked
        back = told[len(asked) :][: len(answered)]
        assert back == answered if self.path == RESPONSES else within(answered, back), (back, answered)
        differing = {key for key in self.body.keys() | before.body.keys() if self.body.get(key) != before.body.get(key)}
        assert differing <= {"messages", "input", "client_metadata"}
        shared = before.tokens - 1  # the last one may be another, of what follows, too
        assert self.cached >= shared // BLOCK * BLOCK


class Recorder:
    """A request or an answer that is not as it should be ends the test that waits by ``meanwhile``."""

    def __init__(self, server: Running, script: Sequence[str], endless: int | None = None) -> None:
        self.server, self._script, self._endless = server, script, endless
        self.turns: list[Turn] = []
        self.began = asyncio.Event()
        """Set when the first part of the answer that does not end, to the turn ``endless``, is here."""
        self._called: set[str] = set()
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def meanwhile(self, what: Awaitable[T]) -> T:
        """Wait for it. Raises what went wrong before."""
        task = asyncio.ensure_future(what)
        either: set[asyncio.Future[Any]] = {task, self._fault}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._fault.done():
            task.cancel()
            self._fault.result()
        return await task

    def end(self) -> None:
        """The answer that does not end was interrupted: from here on there is none."""
        Puppet.said.zero_()
        self._endless = None

    async def working(self) -> bool:
        """Whether the server computes requests, or has some waiting."""
        return await self._metric(r"infer_num_requests_(?:running|waiting)\S*") > 0

    async def num_aborted(self) -> int:
        """How many requests the server has given up."""
        return await self._metric(r'infer_request_success_total\S*finished_reason="abort"\S*')

    async def _metric(self, pattern: str) -> int:
        async with self.server.session.get(self.server.url + "/metrics") as response:
            found = re.findall(f"^{pattern} (\\S+)$", await response.text(), re.M)
        return int(sum(map(float, found)))

    async def handle(self, http: web.Request) -> web.StreamResponse:
        try:
            return await self._pass_on(http)
        except Exception as error:
            if not self._fault.done():
                self._fault.set_exception(error)
            raise

    async def _pass_on(self, http: web.Request) -> web.StreamResponse:
        data = await http.read()
        note: Callable[[bytes], None] | None = None
        endless = False
        if http.method == "POST":
            body = json.loads(data)
            number = self._checked(http.path, data, body)
            text = "A title" if number is None else self._script[number]
            if endless := number is not None and number == self._endless:
                text = ENDLESS
            text = "Hm.</think>" * thinks(body) + text
            count = await self._counted(http.path, body)
            await say(self.server, count, text)
            if number is not None:
                note = functools.partial(self._note, number, http.path, f"?{http.query_string}", body, text, count)
        headers = {
            name: value for name, value in http.headers.items() if name.lower() not in ("host", "accept-encoding")
        }
        async with self.server.session.request(
            http.method, self.server.url + str(http.rel_url), data=data, headers=headers
        ) as answer:
            assert answer.status == 200 or http.method == "HEAD", (answer.status, await answer.text())
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(http)
            read = b""
            with suppress(ConnectionResetError):  # Codex leaves as soon as it has read what it needs
                async for part in answer.content.iter_any():
                    read += part
                    if endless:
                        self.began.set()
                    elif note is not None and ENDS[http.path] in read and read.endswith(b"\n\n"):
                        note(read)  # before the agent has it: its next request may come at once
                        note = None
                    await response.write(part)
                await response.write_eof()
        assert note is None or endless, read
        return response

    def _checked(self, path: str, data: bytes, body: Json) -> int | None:
        """The number of the turn that asks for this; None if it is none of the conversation. What it holds has an
        effect, or is documented to have none."""
        ignored = parse(data, BODIES[path]).ignored
        assert {name.rpartition(".")[2] for name in ignored} <= inert(path), ignored
        assert body["stream"] is True
        if not body.get("tools"):
            return None
        ids = [id for id, _ in results(body)]
        assert len({*ids}) == len(ids)
        assert self._called.issuperset(ids), "a result is of no call that was made"
        return len(ids)

    def _note(self, number: int, path: str, query: str, body: Json, text: str, count: int, stream: bytes) -> None:
        turn = Turn(number, path, query, body, text, count, put_together(path, stream))
        if self.turns:
            turn.follows(self.turns[-1])
        self._called.update(call_ids(path, turn.answer))
        self.turns.append(turn)

    async def plainly(self, turn: Turn) -> None:
        """Ask for the turn's answer once more, in one piece: it is the streamed one."""
        await say(self.server, turn.tokens, turn.said)
        plain = {key: value for key, value in turn.body.items() if key != "stream_options"} | {"stream": False}
        status, answer, _ = await self.server.post(plain, turn.path + turn.query)
        assert status == 200, answer
        assert settled(shown(turn.path, answer)) == settled(turn.answer)

    async def _counted(self, path: str, body: Json) -> int:
        keys = ("messages", "tools", "chat_template_kwargs") if path == CHATS else tuple(body)
        asked = {key: body[key] for key in keys if key in body and key not in ("max_tokens", "stream", "metadata")}
        status, answer, _ = await self.server.post(asked, COUNTS[path])
        assert status == 200, answer
        return int(answer.get("input_tokens", answer.get("count")))
