"""What ``infer ray`` hands to its engines and its ingress."""

from __future__ import annotations

import socket

import pytest

from infer.commands.cli import main
from infer.contracts.command import CommandContext
from infer.plugins.discovery import Plugins
from infer.server.http.keys import INGRESS
from infer.settings import load_settings
from infer_ray.command import plan


def test_engines_get_the_settings_as_they_are_and_the_ingress_what_is_for_clients() -> None:
    endpoint = "http://user:secret@collector:4318"
    words = [f"--observers.otel.endpoint={endpoint}", "--model.path=demo", "--server.api_keys=k", "--ray.replicas=3"]
    plugins = Plugins.discover()
    loaded = load_settings(plugins, env={}, argv=words, read_file=False)
    made = plan(CommandContext(loaded.settings, loaded.sources, plugins, tuple(words)), local=True)
    assert made["engine"]["observers"] == {"otel": {"endpoint": endpoint}}
    assert made["engine"]["model"] == {"path": "demo"}
    assert made["engine"]["server"]["api_keys"] == [made["key"]]
    assert made["key"].startswith(INGRESS)
    assert made["ingress"]["server"] == {"api_keys": ["k"]}
    assert made["ray"]["replicas"] == 3


@pytest.mark.parametrize("words", [("deploy", "demo"), ("delete",)])
def test_an_address_without_a_cluster_is_said_at_once(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        assert main(["ray", *words, "--address", address]) == 2
    assert f"ray.address = '{address}' cannot be reached: " in capsys.readouterr().err
