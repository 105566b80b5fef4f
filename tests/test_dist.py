"""The distributions that `make dist` makes, installed into an empty environment."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = [ROOT / "core", ROOT / "bundle", *sorted((ROOT / "plugins").iterdir())]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_distribution_can_be_published(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert project["license-files"] == ["LICENSE"]
    assert project["classifiers"]
    for module in (package / "src").glob("*"):
        assert (module / "py.typed").exists()


def test_the_bundle_and_the_core_have_one_version() -> None:
    versions = {tomllib.loads((p / "pyproject.toml").read_text())["project"]["version"] for p in PACKAGES}
    assert len(versions) == 1


@pytest.mark.slow
def test_one_install_in_an_empty_environment_leads_to_an_answer(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    for package in PACKAGES:  # copies: a build in place would take the kernels away from tests that run beside this one
        copy = shutil.copytree(package, tmp_path / "source" / package.name, ignore=shutil.ignore_patterns("*.so"))
        subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(dist)], cwd=copy, check=True)
    for wheel in dist.glob("*.whl"):
        names = zipfile.ZipFile(wheel).namelist()
        assert any(name.endswith("licenses/LICENSE") for name in names), wheel.name
        compiled = [name for name in names if name.endswith(".so")]
        assert bool(compiled) == ("-py3-none-any" not in wheel.name), wheel.name
    for sdist in dist.glob("*.tar.gz"):
        with tarfile.open(sdist) as archive:
            assert [m.isfile() for m in archive.getmembers() if m.name.endswith("/LICENSE")] == [True], sdist.name

    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "--find-links", str(dist), "infer-engine"], check=True)
    infer = str(tmp_path / "env" / "bin" / "infer")
    done = subprocess.run(
        [infer, "generate", "--model", "demo", "--max-tokens", "8", "def "],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(done.stdout) > len("def ")
    with subprocess.Popen([infer, "serve", "demo", "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().removeprefix("infer: ready on ").strip()
        ask = urllib.request.Request(f"{url}/v1/completions", headers={"Content-Type": "application/json"})
        ask.data = json.dumps({"prompt": "def ", "max_tokens": 8, "ignore_eos": True}).encode()
        with urllib.request.urlopen(ask, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8
        server.terminate()
        assert server.wait(timeout=60) == 0
