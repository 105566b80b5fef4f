"""``infer ray run``, ``infer ray deploy`` and ``infer ray delete``."""

from __future__ import annotations

import argparse
import math
import os
import re
import secrets
import signal
import socket
import tempfile
import threading
import time
from typing import Any, cast

from infer.contracts.command import CommandContext
from infer.errors import EngineDeadError, InferError
from infer.settings import MODELS, plugin_settings
from infer_ray.settings import RaySettings
from infer_router.plan import behind, given
from infer_router.process import FAULT
from infer_router.settings import RouterSettings
from infer_server.http.access import announce, loopback
from infer_server.http.keys import INGRESS

WATCH_S = 1.0
CONNECT_S = 5.0
VITAL = ("raylet", "gcs_server")


def _own(context: CommandContext) -> RaySettings:
    return cast(RaySettings, plugin_settings(context.settings, "command", "ray"))


def plan(context: CommandContext, *, local: bool) -> dict[str, Any]:
    """What the application needs, as JSON: the settings of its processes, and how many there are."""
    settings, own = context.settings, _own(context)
    if settings.models:
        raise InferError(
            f"[models.{next(iter(settings.models))}] is for infer serve: infer ray has one model, model.path; use "
            "another settings file."
        )
    common = given(context, "ray", MODELS)
    server = common.pop("server", {})
    key = INGRESS + secrets.token_hex(32)
    engine = behind({**common, "server": server}, settings.server, key)
    if hasattr(settings.server, "console"):
        engine["server"]["console"] = {"enabled": False}
    if own.gpus == 0 and settings.kernels.threads is None:
        engine["kernels"] = {**common.get("kernels", {}), "threads": max(1, int(own.cpus))}
    return {
        "name": own.name,
        "local": local,
        "key": key,
        "drain_s": settings.server.drain_timeout_s,
        "stuck_s": cast(RouterSettings, plugin_settings(settings, "routes", "router")).stuck_timeout_s,
        "ray": own.model_dump(),
        "router": {"balance": own.balance, "slack": own.slack, "most_blocks": own.known_blocks},
        "engine": engine,
        "ingress": {"server": server, **({"log": common["log"]} if "log" in common else {})},
    }


def run(args: argparse.Namespace, context: CommandContext) -> int:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if args.action == "delete":
        return _delete(_own(context))
    if context.settings.model.path is None:
        raise InferError(f"No model is given: infer ray {args.action} MODEL, or model.path.")
    if args.action == "deploy":
        return _deploy(context)
    stop = threading.Event()
    with tempfile.TemporaryDirectory(prefix="infer-", ignore_cleanup_errors=True) as folder:
        url = start(plan(context, local=True), folder)
        import ray

        for number in (signal.SIGINT, signal.SIGTERM):  # now, since Ray has handlers of its own
            signal.signal(number, lambda number, frame: stop.set())
        announce(f"infer: ready on {url}")
        while not stop.wait(WATCH_S):
            if ended := _ended():
                ray.shutdown()
                raise EngineDeadError(f"Ray's {ended} has ended, and all engines with it; start infer ray run again.")
        end()
    return 0


def _ended() -> str | None:
    """A process of this machine's Ray that has ended, though nothing works without it. Ray itself would not say so."""
    from ray._private import worker

    ended = dict(worker._global_node.dead_processes())
    return next((kind for kind in VITAL if kind in ended), None)


def start(plan: dict[str, Any], folder: str) -> str:
    """Start Ray on this machine, for this process alone, and the application. Returns the ingress's URL."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the only way to have Ray listen on 127.0.0.1 alone
    if not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    own = plan["ray"]
    most = own["max_replicas"] or own["replicas"]
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, math.ceil(most * own["cpus"])),
        include_dashboard=False,
        log_to_driver=True,
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
    )
    return serve(plan)


def serve(plan: dict[str, Any]) -> str:
    """Have the cluster that this process is connected to serve the plan. Returns the ingress's URL. Raises InferError,
    and leaves the cluster, if an engine or an ingress cannot serve."""
    import ray
    from ray import serve

    from infer_ray.application import build

    serve.start(proxy_location="Disabled")
    try:
        handle = serve.run(build(plan), name=plan["name"], route_prefix=None)
    except RuntimeError as error:
        parts = serve.status().applications[plan["name"]].deployments.values()
        said = re.findall(f"{FAULT}(.+)", "\n".join(part.message for part in parts))
        ray.shutdown()
        raise InferError(said[-1] if said else str(error)) from None
    return str(handle.url.remote().result())


def end() -> None:
    """Let the engines finish, and end Ray."""
    import ray
    from ray import serve

    serve.shutdown()
    ray.shutdown()


def _join(own: Any) -> None:
    """Connect this process to a cluster that is there. Raises InferError."""
    if own.address and (found := re.fullmatch(r"([^:/]+):(\d+)", own.address)):
        try:  # Ray itself would try for minutes
            socket.create_connection((found[1], int(found[2])), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise InferError(f"ray.address = {own.address!r} cannot be reached: {error}.") from None
    import ray

    try:
        ray.init(address=own.address or "auto", log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = f"ray.address = {own.address!r}" if own.address else "ray.address is not set, and RAY_ADDRESS"
        raise InferError(f"{where} leads to no cluster of Ray: {' '.join(str(error).split())}") from None


def _delete(own: Any) -> int:
    """Let the application finish what it has, and take it off the cluster."""
    _join(own)
    from ray import serve

    if own.name not in (there := serve.status().applications):
        raise InferError(
            f"ray.name = {own.name!r} is no application of this cluster; it has {', '.join(sorted(there)) or 'none'}."
        )
    serve.delete(own.name, _blocking=False)
    while own.name in serve.status().applications:
        time.sleep(WATCH_S)
    announce(f"infer: {own.name} is served no more")
    return 0


def _deploy(context: CommandContext) -> int:
    settings, own = context.settings, _own(context)
    if settings.server.api_keys or loopback(settings.server.host):
        made = plan(context, local=False)
    else:
        raise InferError(
            f"server.host = {settings.server.host!r} lets the network in, and server.api_keys has no keys; set some."
        )
    _join(own)
    announce(f"infer: {own.name} is served on {serve(made)}")
    return 0
