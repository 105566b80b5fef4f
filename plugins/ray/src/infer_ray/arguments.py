"""The arguments of ``infer ray``."""

from __future__ import annotations

import argparse

ALIKE = {
    "--model": "model.path",
    "--host": "server.host",
    "--port": "server.port",
    "--api-key": "server.api_keys",
    "--served-model-name": "server.served_model_name",
    "--max-model-len": "engine.max_seq_len",
    "--replicas": "ray.replicas",
    "--address": "ray.address",
}


class _Setting(argparse.Action):
    """An argument that stands for a setting."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        namespace.__dict__.setdefault("plain_settings", []).append(f"--{self.const}={values}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("run", "deploy"),
        help="run: start Ray on this machine, for itself alone, and serve until Ctrl-C; deploy: have a cluster serve",
    )
    parser.add_argument(
        "MODEL", nargs="?", action=_Setting, const="model.path", default=argparse.SUPPRESS, help="model.path"
    )
    for flag, key in ALIKE.items():
        parser.add_argument(flag, action=_Setting, const=key, default=argparse.SUPPRESS, help=key)
