"""What deploy/ has: the image, the services around it and the unit of systemd, tried as far as this machine can."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client import generate_latest
from tests.serving import HANG_S, running

from infer.contracts.sections import ServerSettings
from infer_server.endpoints import metrics

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
DRAIN_S = ServerSettings().drain_timeout_s


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of the Dockerfile's stages, those of the stage that one is from included."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    found: dict[str, list[tuple[str, str]]] = {}
    stage = ""
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, stage = rest.partition(" AS ")
            found[stage] = list(found.get(base, []))
        elif word and stage:
            found[stage].append((word, " ".join(rest.split())))
    return found


def last(stage: str, word: str) -> str:
    return [rest for each, rest in stages()[stage] if each == word][-1]


def compose() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return services


def unit() -> dict[str, str]:
    lines = (DEPLOY / "infer.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and line[0] not in "#[")


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_an_image_installs_what_is_published_and_nobody_is_root_in_it(stage: str) -> None:
    assert f"--uid {last(stage, 'USER')} " in stages()[stage][0][1]
    mount, *installs = last(stage, "RUN").replace("&&", "").split("python -m pip install --no-cache-dir ")
    assert mount.strip() == "--mount=type=bind,source=dist,target=/dist"
    wanted = ["infer-engine", *(["infer-kernels-triton"] if stage == "gpu" else [])]
    given = [re.findall(r"-r /dist/(\S+)", line) for line in installs]
    # Each distribution's needs are there before it is; torch with CUDA comes before the index that has it without.
    assert given == [[f"{name}.needs.txt"] for name in reversed(wanted)] + [[f"{name}.txt" for name in wanted]]
    assert "".join(installs).split() == [word for names in given for name in names for word in ("-r", f"/dist/{name}")]
    carried = [line.lstrip("!") for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()[1:]]
    assert carried == ["dist/*.whl", "dist/*.txt"]
    assert last(stage, "VOLUME") == "/models"
    assert f"HF_HOME={last(stage, 'VOLUME')}" in last(stage, "ENV")


async def test_an_image_is_healthy_while_its_server_answers() -> None:
    check = last("cpu", "HEALTHCHECK")
    assert check == last("gpu", "HEALTHCHECK")
    python, *rest = json.loads(check.split("CMD ", 1)[1])
    assert python == "python"

    async def status(url: str) -> int:
        command = [sys.executable, *(part.replace("http://127.0.0.1:8000", url) for part in rest)]
        asked = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        return await asked.wait()

    async with running() as server:
        assert await status(server.url) == 0
        server.engine_loop.close()
        assert await status(server.url) != 0
        url = server.url
    assert await status(url) != 0


def test_an_image_runs_a_command_that_there_is() -> None:
    entry, arguments = json.loads(last("cpu", "ENTRYPOINT")), json.loads(last("cpu", "CMD"))
    assert arguments == ["serve", "demo"]
    for given in (arguments, ["serve"]):
        command = [str(Path(sys.executable).parent / entry[0]), *entry[1:], *given, "--help"]
        assert "usage: infer serve" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert compose()["infer"]["command"] == ["serve", "${MODEL:-demo}"]
    assert unit()["ExecStart"] == "/opt/infer/bin/infer serve"


def test_nothing_in_the_container_is_written_but_what_a_server_writes() -> None:
    """Its home can be written by any user, and libraries in it be loaded, as Triton's kernels are."""
    service = compose()["infer"]
    assert service["read_only"]
    temporary = dict(mount.partition(":")[::2] for mount in service["tmpfs"])
    assert temporary == {"/tmp": "", last("cpu", "WORKDIR"): "exec,mode=1777"}


def test_the_services_find_each_other_and_nobody_else_finds_them() -> None:
    services = compose()
    for name, service in services.items():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).is_file(), (name, source)
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert "build" in service or re.search(r":v?\d+\.\d+\.\d+$", service["image"])
    assert services["infer"]["build"]["target"] == "${TARGET:-cpu}"
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"infer:{last('cpu', 'EXPOSE')}"]}]
    (source,) = yaml.safe_load((DEPLOY / "grafana/datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    interval = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
    (provider,) = yaml.safe_load((DEPLOY / "grafana/dashboards.yaml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/infer.json" in mounted


def test_a_service_may_finish_its_requests_before_it_is_killed() -> None:
    assert float(compose()["infer"]["stop_grace_period"].removesuffix("s")) > DRAIN_S + 5
    assert float(unit()["TimeoutStopSec"]) > DRAIN_S + 5


def test_systemd_takes_the_unit_and_rates_it_safe(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze (Debian: apt-get install systemd)")
    there = (DEPLOY / "infer.service").read_text().replace("/opt/infer/bin/", f"{Path(sys.executable).parent}/")
    (tmp_path / "infer.service").write_text(there)
    path = str(tmp_path / "infer.service")
    verified = subprocess.run(["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True)
    ours = [line for line in verified.stderr.splitlines() if "infer" in line]
    assert ours == []
    rate = ["systemd-analyze", "security", "--offline=true", "--threshold=20", path]
    rated = subprocess.run(rate, capture_output=True, text=True)
    assert rated.returncode == 0, rated.stdout


@pytest.mark.slow
def test_the_dashboard_has_the_types_of_the_grafana_that_shows_it(tmp_path: Path) -> None:
    """By TypeScript and Grafana's own package of that version: every name and value is one that it knows."""
    modules = Path(sys.prefix) / "node/node_modules"
    schema = modules / "@grafana/schema"
    if shutil.which("node") is None or not schema.exists():
        pytest.skip("there is no package of Grafana's types (make install, with npm)")
    image = compose()["grafana"]["image"]
    assert json.loads((schema / "package.json").read_text())["version"] == image.partition(":")[2]
    text = (ROOT / "docs/grafana.json").read_text()
    (tmp_path / "node_modules").symlink_to(modules)

    def complaints(dashboard: str) -> str:
        types = "@grafana/schema/dist/types/raw/dashboard/x/dashboard_types.gen"
        source = f'import type {{ Dashboard }} from "{types}";\nexport const it: Dashboard = {dashboard};\n'
        (tmp_path / "dashboard.ts").write_text(source)
        compiler = modules / "typescript/bin/tsc"
        options = ["--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "node10", "dashboard.ts"]
        return subprocess.run(["node", compiler, *options], cwd=tmp_path, capture_output=True, text=True).stdout

    assert complaints(text) == ""
    for right, wrong in {
        '"gridPos"': '"gridpos"',
        '"defaults"': '"default"',
        '"type": "query"': '"type": "ask"',
    }.items():
        assert right in text
        assert "error TS" in complaints(text.replace(right, wrong, 1)), wrong


@pytest.mark.slow
async def test_prometheus_reads_all_that_the_dashboard_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a Prometheus of its own: every query of every panel yields numbers."""
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus (Debian: apt-get install prometheus)")
    subprocess.run(["promtool", "check", "config", str(DEPLOY / "prometheus.yml")], check=True)
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    (variable,) = [each for each in dashboard["templating"]["list"] if each["name"] == "model"]
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    scraped = asyncio.Event()

    def generated(*given: Any) -> bytes:
        scraped.set()
        return generate_latest(*given)

    monkeypatch.setattr(metrics, "generate_latest", generated)
    engine = {"max_seq_len": 256, "max_tokens_per_step": 64}
    async with running(cache={"paged": {"num_blocks": 24}}, engine=engine) as server:
        config = (DEPLOY / "prometheus.yml").read_text()
        config = config.replace("infer:8000", server.url.removeprefix("http://")).replace("5s", "1s")
        (tmp_path / "prometheus.yml").write_text(config)
        command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
        command += ["--web.listen-address=127.0.0.1:0"]

        async def ask(query: str) -> list[float]:
            query = query.replace("$model", "demo").replace("$__rate_interval", "20s")
            url = f"http://{address}/api/v1/query?" + urllib.parse.urlencode({"query": query})
            async with server.session.get(url) as response:
                answer = await response.json()
            assert answer["status"] == "success", answer
            return [float(each["value"][1]) for each in answer["data"]["result"]]

        async def another_scrape() -> None:
            scraped.clear()
            await scraped.wait()

        async def traffic() -> None:
            body = {"prompt": "def f(x):\n    return " * 6, "max_tokens": 120, "ignore_eos": True}
            while True:
                await asyncio.gather(*(server.post(body | {"seed": seed}) for seed in range(6)))

        load = asyncio.create_task(traffic())
        prometheus = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        try:
            async with asyncio.timeout(HANG_S):
                assert prometheus.stderr is not None
                log = (await prometheus.stderr.readuntil(b"Server is ready")).decode()
                (address,) = re.findall(r'"Listening on".* address=(\S+)', log)
                left = list(queries)
                while left:
                    await another_scrape()
                    values = [await ask(query) for query in left]
                    left = [q for q, found in zip(left, values, strict=True) if not found or any(x != x for x in found)]
                async with server.session.get(f"http://{address}/api/v1/label/model_name/values") as response:
                    assert (await response.json())["data"] == ["demo"]
                assert variable["query"]["query"].startswith("label_values(infer_num_requests_running, model_name)")
                while not sum(await ask("infer_num_preemptions_total")):
                    await another_scrape()
        finally:
            load.cancel()
            prometheus.terminate()
            await prometheus.wait()
