"""What ``infer ray`` hands to its engines and its ingress."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from infer.commands.cli import main
from infer.contracts.command import CommandContext
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_ray.command import plan
from infer_server.http.keys import INGRESS


def planned(*words: str) -> dict[str, Any]:
    """The plan of a command's options."""
    plugins = Plugins.discover()
    loaded = load_settings(plugins, env={}, argv=words, read_file=False)
    return plan(CommandContext(loaded.settings, loaded.sources, plugins, words), local=True)


def test_engines_get_the_settings_as_they_are_and_the_ingress_what_is_for_clients() -> None:
    endpoint = "http://user:secret@collector:4318"
    words = [f"--observers.otel.endpoint={endpoint}", "--model.path=demo", "--server.api_keys=k", "--ray.replicas=3"]
    made = planned(*words)
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


@pytest.mark.parametrize("action", ["run", "deploy"])
def test_a_command_without_a_model_says_how_to_name_one(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # away from the repository's settings.toml
    assert main(["ray", action]) == 2
    assert f"No model is given: infer ray {action} MODEL, or model.path." in capsys.readouterr().err


def test_a_cluster_is_not_sent_what_lets_a_network_in_without_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ray", "deploy", "demo", "--host", "0.0.0.0"]) == 2
    assert "server.host = '0.0.0.0' lets the network in, and server.api_keys has no keys" in capsys.readouterr().err


@pytest.mark.parametrize(("upscale_delay_s", "seconds"), [(0, 11), (1, 11), (10, 20), (15, 30), (60, 30)])
def test_load_is_averaged_over_less_time_where_engines_are_to_come_soon(upscale_delay_s: float, seconds: float) -> None:
    from ray.serve import Application  # takes a second, which other tests of this file need not wait

    from infer_ray.application import build

    words = [f"--ray.upscale_delay_s={upscale_delay_s}", "--model.path=demo", "--ray.max_replicas=2"]
    made = build(planned(*words))
    (engines,) = (each for each in made._bound_deployment.init_args if isinstance(each, Application))
    limits = engines._bound_deployment._deployment_config.autoscaling_config
    assert (limits.look_back_period_s, limits.upscale_delay_s) == (seconds, upscale_delay_s)
