"""The Ray Serve application: engines, ingresses, and a directory by which ingresses find engines.

Ray places the processes, watches them, and changes their number. No token passes through it: an ingress speaks HTTP
with the engines, and learns from the directory where they are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from infer_router.process import Process

log = logging.getLogger("ray.serve")

NAMESPACE = "infer"
REPORT_S = 1.0
GONE_S = 10.0
"""After so long without a report, an engine is left out of the directory."""
FILL_S = 3 * REPORT_S
"""A new directory says nothing for so long, until all engines have reported to it."""
WAIT_S = 20.0
IDLE_S = 60.0
"""The directory ends after so long without any report."""
HEALTH_S = 1.0
HEALTH_TIMEOUT_S = 5.0
KILL_S = 5.0
"""How much longer than their requests processes may take to end."""
OPEN = "infer_open_requests"
Table = dict[str, dict[str, Any]]


@ray.remote(num_cpus=0)
class Directory:
    """Which engines there are. Whoever needs it makes it, under the application's name."""

    def __init__(self) -> None:
        self._table: Table = {}
        self._seen: dict[str, float] = {}
        self._version = time.time_ns()
        self._changed = asyncio.Event()
        self._begun = self._last = time.monotonic()
        self._watching: asyncio.Task[None] | None = None

    async def report(self, name: str, url: str, draining: bool) -> None:
        """An engine is there."""
        self._watching = self._watching or asyncio.create_task(self._watch())
        self._last = self._seen[name] = time.monotonic()
        entry = {"url": url, "draining": draining}
        if self._table.get(name) != entry:
            self._table[name] = entry
            self._change()

    async def remove(self, name: str) -> None:
        """An engine has ended."""
        self._seen.pop(name, None)
        if self._table.pop(name, None) is not None:
            self._change()

    async def table(self, since: int) -> tuple[int, Table]:
        """The engines, once that differs from version ``since`` or some time has passed, and the version."""
        await asyncio.sleep(self._begun + FILL_S - time.monotonic() if since else 0)
        if since == self._version:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), WAIT_S)
        return self._version, self._table

    def _change(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _watch(self) -> None:
        while (now := time.monotonic()) < self._last + IDLE_S:
            for name in [name for name, seen in self._seen.items() if seen < now - GONE_S]:
                log.warning("engine %s has not reported for %.0f s; it is left out", name, GONE_S)
                await self.remove(name)
            await asyncio.sleep(1.0)
        ray.actor.exit_actor()


class _Directory:
    """A handle to the directory, which may have to be made anew."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._actor: Any = None

    async def call(self, method: str, *args: Any) -> Any:
        """Raises RayError if it does not answer; the next call makes another."""
        try:
            if self._actor is None:
                self._actor = Directory.options(  # type: ignore[attr-defined]
                    name=self._app, namespace=NAMESPACE, get_if_exists=True, lifetime="detached"
                ).remote()
            return await getattr(self._actor, method).remote(*args)
        except ray.exceptions.RayError:
            self._actor = None
            raise


def _inward() -> None:
    """Have the Serve replica that runs this listen on loopback alone. It has a gRPC server for calls between
    deployments, for whose address Serve has no setting."""
    from ray.serve._private import replica

    add_port = replica.add_port_to_grpc_server
    if getattr(add_port, "inward", False):
        return

    def inward(server: Any, address: str) -> int:
        return int(add_port(server, address.replace("[::]", "127.0.0.1")))

    inward.inward = True  # type: ignore[attr-defined]
    replica.add_port_to_grpc_server = inward


class Pulse:
    """Asks a server now and then whether it is well, and is patient for some seconds if it is not."""

    def __init__(self, url: str, patience_s: float) -> None:
        self._url, self._patience_s = url, patience_s
        self._good = time.monotonic()

    async def lost_s(self) -> float | None:
        """For how many seconds ``/health`` has failed, once they are too many; None before."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(HEALTH_TIMEOUT_S)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with aiohttp.ClientSession() as session, session.get(f"{self._url}/health", timeout=timeout) as found:
                if found.status == 200:
                    self._good = time.monotonic()
        silent = time.monotonic() - self._good
        return silent if silent > self._patience_s else None


async def examine(process: Process, pulse: Pulse) -> None:
    """Raises RuntimeError if an engine's process has ended, or if it does not answer any more, after it was ended: Ray
    then makes another, which needs its memory."""
    if (code := process.code) is not None:
        raise RuntimeError(f"the engine's process ended with code {code}")
    if (silent := await pulse.lost_s()) is not None:
        await asyncio.to_thread(process.end, 0.0)
        raise RuntimeError(f"the engine's /health has failed for {silent:.0f} s (server.router.stuck_timeout_s)")


class Engine:
    """One engine: ``infer serve``, watched."""

    async def __init__(self, plan: Mapping[str, Any]) -> None:  # type: ignore[misc]
        if plan["local"]:
            _inward()
        self._name = secrets.token_hex(6)
        self._drain_s = plan["drain_s"]
        settings = plan["engine"]
        if not plan["local"]:
            settings = settings | {"server": settings["server"] | {"host": ray.util.get_node_ip_address()}}
        self._process = Process("engine", {"settings": settings})
        self._url = await asyncio.to_thread(self._process.ready)
        log.info("engine %s serves on %s by process %d", self._name, self._url, self._process.pid)
        self._headers = {"Authorization": f"Bearer {plan['key']}"}
        self._directory = _Directory(plan["name"])
        self._draining = False
        self._pulse = Pulse(self._url, plan["stuck_s"])
        self._reporting = asyncio.create_task(self._report())

    async def _report(self) -> None:
        while self._process.code is None:
            await self._send_state()
            await asyncio.sleep(REPORT_S)
        await self._send_state()

    async def _send_state(self) -> None:
        try:
            if self._process.code is None:
                await self._directory.call("report", self._name, self._url, self._draining)
            else:
                await self._directory.call("remove", self._name)
        except ray.exceptions.RayError as error:
            log.warning("the directory does not answer: %s", error)

    async def check_health(self) -> None:
        if not self._draining:
            await examine(self._process, self._pulse)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        import aiohttp

        async with (
            aiohttp.ClientSession(headers=self._headers) as session,
            session.get(f"{self._url}/ray/state", timeout=aiohttp.ClientTimeout(5.0)) as response,
        ):
            return {OPEN: float((await response.json())["open"])}

    async def __del__(self) -> None:
        if self._draining:
            return
        self._draining = True
        await self._send_state()  # before the process refuses: so that no request has to be sent twice
        await asyncio.to_thread(self._process.end, self._drain_s + KILL_S)
        self._reporting.cancel()
        await self._send_state()


class Front:
    """One ingress, watched, and told which engines there are."""

    async def __init__(self, plan: Mapping[str, Any], engines: object) -> None:  # type: ignore[misc]
        if plan["local"]:
            _inward()
        self._drain_s = plan["drain_s"]
        self._process = Process("ingress", {"settings": plan["ingress"], "router": plan["router"], "key": plan["key"]})
        self._directory = _Directory(plan["name"])
        self._sending = asyncio.create_task(self._send_replicas())  # before it serves, so that it knows engines by then
        self._url = await asyncio.to_thread(self._process.ready)
        self._ending = False

    async def _send_replicas(self) -> None:
        version = 0
        while self._process.code is None:
            try:
                found, table = await self._directory.call("table", version)
            except ray.exceptions.RayError as error:
                log.warning("the directory does not answer: %s", error)
                await asyncio.sleep(REPORT_S)
                continue
            if found != version:
                version = found
                self._process.send({"replicas": table})

    async def url(self) -> str:
        """Once requests are taken there."""
        import aiohttp

        async with aiohttp.ClientSession() as session:
            while self._process.code is None:
                async with session.get(f"{self._url}/ready") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.1)
        return self._url

    async def check_health(self) -> None:
        if (code := self._process.code) is not None and not self._ending:
            raise RuntimeError(f"the ingress's process ended with code {code}")

    async def __del__(self) -> None:
        if not self._ending:
            self._ending = True
            await asyncio.to_thread(self._process.end, self._drain_s + KILL_S)
            self._sending.cancel()


def wanted(context: Any) -> tuple[int, dict[str, Any]]:
    """Serve's question how many engines there should be: as many as share the requests that they say they have."""
    reported = context.aggregated_metrics.get(OPEN, {})
    target = context.config.policy.policy_kwargs["target_requests"] if context.config else 16.0
    number = -(-sum(reported.values()) // target)
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return int(min(max(number, least), most)), context.policy_state


def look_back_s(upscale_delay_s: float) -> float:
    """How many seconds the load is averaged over: Serve's own 30, but fewer where engines are to come sooner than that.
    Engines report every 10 s, and Serve asks for more than one report."""
    return min(max(2 * upscale_delay_s, 11.0), 30.0)


def build(plan: Mapping[str, Any]) -> serve.Application:
    """The application of a ``plan`` (``infer_ray.command.plan``)."""
    own = plan["ray"]
    drain: dict[str, Any] = {
        "graceful_shutdown_timeout_s": plan["drain_s"] + 2 * KILL_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": HEALTH_S,
    }
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": own["cpus"], "num_gpus": own["gpus"]}}
    if own["max_per_node"] is not None:
        options["max_replicas_per_node"] = own["max_per_node"]
    if own["max_replicas"] is None:
        options["num_replicas"] = own["replicas"]
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=own["replicas"],
            max_replicas=own["max_replicas"],
            upscale_delay_s=own["upscale_delay_s"],
            downscale_delay_s=own["downscale_delay_s"],
            look_back_period_s=look_back_s(own["upscale_delay_s"]),
            policy=AutoscalingPolicy(
                policy_function="infer_ray.application:wanted",
                policy_kwargs={"target_requests": own["target_requests"]},
            ),
        )
    engines = serve.deployment(Engine, name="engine").options(**options, **drain).bind(plan)
    fronts: dict[str, Any] = {"num_replicas": own["ingresses"], "ray_actor_options": {"num_cpus": 0}}
    if own["ingresses"] > 1:
        fronts["max_replicas_per_node"] = 1
    return serve.deployment(Front, name="ingress").options(**fronts, **drain).bind(plan, engines)
