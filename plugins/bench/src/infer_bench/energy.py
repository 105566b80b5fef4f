"""What a server takes to answer: joules, where the processors count them, and the CPU time of its processes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

POWERCAP = Path("/sys/class/powercap")
"""Where Linux shows the counters of Intel's and AMD's processors (RAPL). Most systems let only root read them."""
HERE = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::")


class Taken(NamedTuple):
    """Counters at a moment, or what they have grown by. None where they cannot be read."""

    cpu_s: float | None
    """Of the server's processes, those that have ended included."""
    joules: float | None
    """Of all the machine's processors, whoever uses them."""

    def since(self, earlier: Taken) -> Taken:
        return Taken(*(None if b is None or a is None else b - a for a, b in zip(earlier, self, strict=True)))


UNKNOWN = Taken(None, None)


class Meter:
    """Reads the counters for the server at a URL. Its CPU time is known if it runs on this machine, as this user."""

    def __init__(self, url: str, powercap: Path = POWERCAP) -> None:
        self._pids = _listening(url)
        self._packages = _packages(powercap)
        """What each counter showed last."""
        self._joules = 0.0

    def read(self) -> Taken:
        """What has been taken so far. A counter may begin anew within two minutes, so call it twice as often."""
        try:
            for zone, last in self._packages.items():
                now = self._packages[zone] = _joules(zone / "energy_uj")
                self._joules += now - last if now >= last else now - last + _joules(zone / "max_energy_range_uj")
        except (OSError, ValueError):  # a counter has gone
            self._packages = {}
        return Taken(_cpu_seconds(self._pids) if self._pids else None, self._joules if self._packages else None)


def _listening(url: str) -> set[int]:
    """The processes that listen at a URL of this machine, as far as this user may know."""
    host, port = urlsplit(url).hostname, urlsplit(url).port or 80
    if host not in HERE:
        return set()
    with suppress(psutil.AccessDenied):
        return {
            socket.pid
            for socket in psutil.net_connections("tcp")
            if socket.status == psutil.CONN_LISTEN and socket.laddr[1:] == (port,) and socket.pid is not None
        }
    return set()


def _cpu_seconds(pids: set[int]) -> float | None:
    """Of these processes, their descendants, and those of them that have ended; None if the processes have ended."""
    found: dict[int, float] = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    found[process.pid] = times.user + times.system + times.children_user + times.children_system
    return sum(found.values()) if found else None


def _packages(powercap: Path) -> dict[Path, float]:
    """What the counters of whole processors show, if all can be read. Some systems have the same one in two places."""
    zones = sorted(powercap.glob("*"), reverse=True)
    packages = {name: zone for zone in zones if (name := _name(zone)).startswith("package")}
    try:
        for zone in packages.values():
            _joules(zone / "max_energy_range_uj")
        return {zone: _joules(zone / "energy_uj") for zone in packages.values()}
    except (OSError, ValueError):
        return {}


def _name(zone: Path) -> str:
    try:
        return (zone / "name").read_text().strip()
    except OSError:
        return ""


def _joules(file: Path) -> float:
    return int(file.read_text()) / 1e6
