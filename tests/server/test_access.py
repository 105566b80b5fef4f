"""Web pages in a browser that can reach the server: which may send requests, and which may read the answers."""

from __future__ import annotations

from typing import Any

import pytest
from tests.serving import Body, Running, running

from infer.errors import SettingsError
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_server.http.access import guard

ENGINE = {"max_batch_size": 2, "max_seq_len": 128}
BODY: Body = {"prompt": "a", "max_tokens": 1}
PAGE = "https://page.example"
TYPE = ("Content-Type",)


async def ask(server: Running, method: str = "POST", **headers: str) -> tuple[int, Any, Any]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    data = b'{"prompt": "a", "max_tokens": 1}' if method == "POST" else None
    skip = () if "Content-Type" in given else TYPE
    url = server.url + "/v1/completions"
    async with server.session.request(method, url, data=data, headers=given, skip_auto_headers=skip) as response:
        return response.status, await response.json() if response.content_length else None, response.headers


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0", "::", "10.0.0.1"])
def test_a_server_without_keys_warns_of_the_network(host: str, caplog: pytest.LogCaptureFixture) -> None:
    guard(host)
    warned = [message for message in caplog.messages if "server.api_keys has no keys" in message]
    assert [host in message for message in warned] == [True] * (host in ("0.0.0.0", "::", "10.0.0.1"))


async def test_without_keys_only_this_machine_is_answered_and_only_json_is_read() -> None:
    json = "application/json"
    async with running(engine=ENGINE) as server:
        port = server.url.rpartition(":")[2]
        for host in (
            "127.0.0.1",
            "127.9.9.9",
            f"localhost:{port}",
            "LOCALHOST",
            "a.localhost",
            "[::1]:80",
            "localhost.",
        ):
            assert (await ask(server, Host=host, Content_Type=json))[0] == 200, host
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "[::2]",
            "[",
            "@localhost.x",
        ):
            status, answer, _ = await ask(server, Host=host, Content_Type=json)
            assert (status, answer["error"]["type"]) == (403, "permission_error"), host
            assert "server.api_keys" in answer["error"]["message"]
            assert (await ask(server, "GET", Host=host))[0] == 403
        for kind in ("application/json; charset=utf-8", "application/vnd.api+json", "APPLICATION/JSON"):
            assert (await ask(server, Content_Type=kind))[0] == 200, kind
        kinds: list[dict[str, str]] = [{}, *({"Content_Type": kind} for kind in FOREIGN)]
        for given in kinds:
            status, answer, _ = await ask(server, **given)
            assert status == 415, given
            assert "send Content-Type: application/json" in answer["error"]["message"]


FOREIGN = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonp", "text/json")
"""What a page may send without being allowed, and what looks like JSON."""


async def test_what_has_no_body_need_not_say_of_what_type_it_is() -> None:
    """OpenAI's client for JavaScript cancels a response so. A page has to all the same."""
    async with running(engine=ENGINE) as server:
        for path, status in (("/v1/responses/resp_x/cancel", 404), ("/v1/completions", 400)):
            for origin, expected in ((None, status), (PAGE, 415), ("null", 415)):
                headers = {"Origin": origin} if origin else {}
                async with server.session.post(server.url + path, headers=headers, skip_auto_headers=TYPE) as response:
                    assert response.status == expected, (path, origin)


async def test_with_keys_or_for_others_every_name_is_answered() -> None:
    shown = {"Authorization": "Bearer k", "Host": "api.example", "Content_Type": "text/plain"}
    async with running(engine=ENGINE, server={"api_keys": "k", "access_log": False}) as server:
        assert (await ask(server, **shown))[0] == 200
    async with running(engine=ENGINE, server={"host": "0.0.0.0", "access_log": False}) as server:
        assert (await ask(server, Host="box.lan", Content_Type="application/json"))[0] == 200
        assert (await ask(server, Host="box.lan", Content_Type="text/plain"))[0] == 415


async def test_a_key_may_come_in_either_header() -> None:
    """Anthropic's clients show it in X-Api-Key. A wrong key in one header does not spoil a right one in the other."""
    async with running(engine=ENGINE, server={"api_keys": "k", "access_log": False}) as server:
        for shown, status in (
            ({"X_Api_Key": "k"}, 200),
            ({"X_Api_Key": " k "}, 200),
            ({"X_Api_Key": "l"}, 401),
            ({"X_Api_Key": ""}, 401),
            ({"X_Api_Key": "l", "Authorization": "Bearer k"}, 200),
            ({"X_Api_Key": "k", "Authorization": "Bearer l"}, 200),
            ({"X_Api_Key": "k", "Authorization": "Basic l"}, 200),
            ({"Authorization": "Basic k"}, 401),
        ):
            assert (await ask(server, **shown))[0] == status, shown


async def test_pages_of_the_origins_that_are_set_may_read() -> None:
    wanted = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization,content-type"}
    keyed = {"api_keys": "k", "access_log": False}
    async with running(engine=ENGINE, server=keyed | {"cors_origins": f"http://a.example,{PAGE}"}) as server:
        status, _, headers = await ask(server, "OPTIONS", Origin=PAGE, **wanted)
        assert (status, headers["Access-Control-Allow-Origin"]) == (204, PAGE)
        assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert "POST" in headers["Access-Control-Allow-Methods"]
        status, _, headers = await ask(server, Origin=PAGE, Authorization="Bearer k", Content_Type="application/json")
        assert (status, headers["Access-Control-Allow-Origin"], headers["Vary"]) == (200, PAGE, "Origin")
        status, _, headers = await ask(server, Origin=PAGE)
        assert (status, headers["Access-Control-Allow-Origin"]) == (401, PAGE), "errors can be read as well"
        stream = server.session.post(
            server.url + "/v1/completions",
            json=BODY | {"stream": True},
            headers={"Origin": PAGE, "Authorization": "Bearer k"},
        )
        async with stream as response:
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
        for origin in ("https://other.example", f"{PAGE}.evil.example", "null"):
            status, _, headers = await ask(server, "OPTIONS", Origin=origin, **wanted)
            assert status != 204
            assert "Access-Control-Allow-Origin" not in headers
    async with running(engine=ENGINE) as server:
        status, _, headers = await ask(server, "OPTIONS", Origin=PAGE, **wanted)
        assert (status, "Access-Control-Allow-Origin" in headers) == (405, False), "none is the default"


def test_an_origin_is_no_address_of_a_page() -> None:
    for bad in ("example.org", "https://example.org/", "https://a b", ""):
        with pytest.raises(SettingsError, match="no origin"):
            load_settings(Plugins.discover(), env={}, overrides={"server": {"cors_origins": [bad]}}, read_file=False)
