"""The commands of infer's packages, for who knows of them without loading any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Listed(NamedTuple):
    package: str
    """The distribution that brings it."""
    description: str
    """As its registration says."""


LISTED: Mapping[str, Listed] = {
    "generate": Listed("infer-core", "answer prompts on the terminal"),
    "chat": Listed("infer-core", "talk with the model on the terminal"),
    "doctor": Listed("infer-core", "say what would serve a checkpoint, and whether it fits, without loading it"),
    "plugins": Listed("infer-core", "list what is installed, what is chosen, and why"),
    "settings": Listed("infer-core", "show each setting's value and source"),
    "serve": Listed("infer-server", "serve the model over HTTP"),
    "launch": Listed("infer-agents", "start a coding agent that uses a server of infer"),
    "models": Listed("infer-router", "show the models of a running server, and their states"),
    "pull": Listed("infer-router", "download a model from the hub, and say whether it fits"),
    "rm": Listed("infer-router", "remove models from the hub's cache"),
    "ray": Listed("infer-ray", "serve by many engines at once, on this machine or a Ray cluster"),
    "cache": Listed("infer-cache-paged", "list or remove what cache.paged.disk keeps"),
    "bench": Listed("infer-bench", "measure the workloads over HTTP"),
    "demo": Listed("infer-bench", "print a timeline of steps, chunked prefill on and off side by side"),
    "simulate": Listed("infer-bench", "play workloads without a model, on a clock of its own"),
    "tune": Listed("infer-bench", "find batch, chunk and budget for latency goals, by simulation"),
    "check": Listed("infer-testing", "try what a plugin's contract promises on an installed part"),
    "new": Listed("infer-testing", "write a plugin's package, with a test"),
}
