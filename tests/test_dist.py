"""The distributions that `make dist` makes, installed into an empty environment."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import urllib.request
import venv
import zipfile
from importlib.metadata import distributions, version
from pathlib import Path

import pytest
from deploy import dist, requirements
from deploy.dist import NATIVE, PACKAGES, ROOT
from packaging.requirements import Requirement
from tests.docs.pages import PAGES
from tests.docs.running import Shell, environment, follow, hub
from tests.docs.test_run import SHOWN, free_port

import infer_demo
from infer import errors
from infer.checkpoint.hub import BUNDLED
from infer.plugins.discovery import Plugins
from infer.plugins.extension_points import EXTENSION_POINTS
from infer_kernels_cpu import native

pytestmark = pytest.mark.long

MOST_DISTRIBUTIONS, MOST_BYTES = 67, 1_100_000_000
"""What the README's install may bring to an environment: other people's and our distributions, and bytes, most of
them torch's. CUDA would be another 4 GB."""
FAST = {"CXXFLAGS": "-O1"}
"""Compiles the kernels in a third of the time; with -O0 they would ask for a newer glibc."""
FASTEST = {"CXXFLAGS": "-O0"}
"""Compiles them in half of that. They are too slow to be used."""
READY = f"""#!/bin/sh
for to; do :; done
ready="{native.FOLDER}/${{to##*/}}"
case "$to" in */portable.so) c++ "$@" -fsyntax-only || exit;; esac
case "$to" in *.so) [ -e "$ready" ] && exec cp "$ready" "$to";; esac
exec c++ "$@"
"""
"""A compiler that reads all sources once, then takes what the package's hook has compiled of them before."""


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_distribution_can_be_published(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    others = [str(file.relative_to(package)) for file in (package / "src").rglob("*LICENSE*")]
    assert project["license-files"] == ["LICENSE", *others], "what is of others comes with their license"
    assert project["classifiers"]
    for module in (package / "src").glob("*"):
        assert (module / "py.typed").exists()


def test_all_packages_have_one_version_and_ask_for_each_other_at_it() -> None:
    for package in PACKAGES:
        project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
        asked = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
        requirements = [Requirement(line) for lines in asked for line in lines]
        ours = [requirement for requirement in requirements if requirement.name.startswith("infer-")]
        assert ours or package.name == "core"
        assert all(dist.version() in requirement.specifier for requirement in ours)
        assert all(str(requirement.specifier) for requirement in ours)


def test_the_hook_compiles_the_levels_that_the_package_looks_for() -> None:
    assert dist.expected_levels(ROOT / "plugins" / NATIVE, platform.machine()) == set(native.LEVELS)


def wheel(folder: Path, name: str, version: str, needs: list[str], says: str = "") -> Path:
    """A wheel of nothing but a name, a version and what it needs."""
    stem = f"{name.replace('-', '_')}-{version}"
    file = folder / f"{stem}-py3-none-any.whl"
    told = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {need}" for need in needs)]
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", "\n".join(told) + f"\n\n{says}")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return file


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """A folder as `make dist` makes it, of wheels that have only the names, versions and needs of ours."""
    folder = tmp_path / "dist"
    folder.mkdir()
    for package in PACKAGES:
        project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
        ours = [line for line in project["dependencies"] if line.startswith("infer-")]
        wheel(folder, project["name"], project["version"], ours)
    for name, text in requirements.written(folder, PACKAGES, ROOT / "constraints.txt").items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.slow
def test_nobody_elses_package_of_our_name_is_installed(named: Path, tmp_path: Path) -> None:
    """Not one of a higher version from an index, nor one of the same version from anywhere."""
    project = tmp_path / "index" / "infer-core"
    project.mkdir(parents=True)
    theirs = wheel(project, "infer-core", "0.1.999", [])
    (project / "index.html").write_text(f'<a href="{theirs.name}">{theirs.name}</a>')
    plain = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    plain |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": project.parent.as_uri(), "PIP_NO_CACHE_DIR": "1"}

    def taken(*what: str) -> dict[str, str]:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run"]
        command += ["--ignore-installed", "--report", "-", *what]
        done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True)
        if done.returncode:
            return {"failed": done.stderr}
        reported = [each["metadata"] for each in json.loads(done.stdout)["install"]]
        return {each["name"]: each["version"] for each in reported}

    assert taken("--find-links", str(named), "infer-engine")["infer-core"] == "0.1.999", "this index is asked"
    names = {tomllib.loads((package / "pyproject.toml").read_text())["project"]["name"] for package in PACKAGES}
    expected = dict.fromkeys(names - {*errors.INDEXED}, dist.version())
    assert taken("-r", str(named / "infer-engine.txt")) == expected
    (ours,) = named.glob("infer_core-*.whl")
    ours.rename(project / ours.name)
    (project / "index.html").write_text(f'<a href="{ours.name}">{ours.name}</a>')
    said = taken("-r", str(named / "infer-engine.txt"))["failed"]
    assert f"No matching distribution found for infer-core=={dist.version()}" in said, "this index is not asked"
    wheel(named, "infer-core", dist.version(), [], says="by somebody else")
    assert "DO NOT MATCH THE HASHES" in taken("-r", str(named / "infer-engine.txt"))["failed"]


def test_every_distribution_says_what_else_it_needs(named: Path) -> None:
    """The needs are the packages' own, in the versions that the tests run with, and torch without CUDA but for GPUs."""
    engine = set((named / "infer-engine.needs.txt").read_text().splitlines()[1:])
    assert {f"torch=={version('torch').split('+')[0]}", f"--extra-index-url {requirements.CPU_INDEX}"} <= engine
    more = set()
    for package in PACKAGES:
        project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
        name = project["name"]
        needs = [line for line in (named / f"{name}.needs.txt").read_text().splitlines() if line[0] != "#"]
        options = [line for line in needs if line.startswith("--")]
        assert bool(options) == (name != "infer-kernels-triton")
        found = {line.name: line for line in map(Requirement, needs[len(options) :])}
        for each in map(Requirement, project["dependencies"]):
            if not each.name.startswith("infer-"):
                assert (found[each.name].extras, found[each.name].marker) == (each.extras, each.marker)
                (pin,) = found[each.name].specifier
                assert (pin.operator, pin.version) == ("==", version(each.name).split("+")[0])
                assert pin.version in each.specifier
        assert "torch" in found
        if not set(needs) <= engine:
            more.add(name)
    assert more == {*errors.INDEXED}


def test_advice_on_what_to_install_names_files_that_are_made(named: Path) -> None:
    packages = {package for slot in EXTENSION_POINTS.values() for package in slot.packages.values()}
    for package in packages | {*BUNDLED.values()}:
        advice = errors.installing(package)
        assert re.sub(r" -r dist/\S+", "", advice) in ("pip install", "pip install && pip install")
        assert all((named.parent / file).exists() for file in re.findall(r"dist/\S+", advice))
    plugins = Plugins.discover()
    for slot, about in EXTENSION_POINTS.items():
        for name, package in about.packages.items():
            offers = [o for o in plugins.offers[slot] if name in (o.name, *about.named(o.registration))]
            assert {offer.distribution for offer in offers} == {package}, f"{slot}: {name}"
    for file in ROOT.rglob("*.py"):
        if "src" in file.parts:
            assert not re.search(r"pip install[^\n]* infer-", file.read_text()), file


def archived(file: Path) -> list[str]:
    if file.suffix == ".whl":
        return zipfile.ZipFile(file).namelist()
    with tarfile.open(file) as archive:
        return [member.name for member in archive.getmembers() if member.isfile()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make dist` makes; the kernels compiled in less time."""
    folder = tmp_path_factory.mktemp("made") / "dist"
    variables = os.environ | FAST | {"CXX": compiler(folder.parent)}
    subprocess.run([sys.executable, "-m", "deploy.dist", str(folder)], cwd=ROOT, env=variables, check=True)
    return folder


def compiler(folder: Path, unless: str = "") -> str:
    """A compiler of kernels in a folder: one that is ready if its kernels are newer than their sources. It fails where
    its arguments have ``unless``."""
    hook = ROOT / "plugins" / NATIVE / "hatch_build.py"
    changed = max(file.stat().st_mtime for file in (hook, *(native.FOLDER / "native").iterdir()))
    ready = all(file.stat().st_mtime > changed for file in native.FOLDER.glob("*.so"))
    text = READY if ready else '#!/bin/sh\nexec c++ "$@"\n'
    if unless:
        text = text.replace("\n", f'\ncase "$*" in *{unless}*) exit 1;; esac\n', 1)
    file = folder / "c++"
    file.write_text(text)
    file.chmod(0o755)
    return str(file)


@pytest.mark.slow
def test_what_is_published_is_whole(made: Path) -> None:
    wheels, sdists = sorted(made.glob("*.whl")), sorted(made.glob("*.tar.gz"))
    assert len(sdists) == len(PACKAGES)
    for file in [*wheels, *sdists]:
        names = archived(file)
        assert sum(name.endswith("/LICENSE") for name in names) == 1, file.name
        compiled = {Path(name).stem for name in names if name.endswith(".so")}
        machine = re.search(r"-manylinux_2_(\d+)_(\w+)\.whl$", file.name)
        assert bool(machine) == bool(compiled), file.name
        if machine:
            assert int(machine[1]) <= 28
            assert compiled == dist.expected_levels(ROOT / "plugins" / NATIVE, machine[2])
    assert any(wheel.name.endswith(f"_{platform.machine()}.whl") for wheel in wheels)
    for line in (made / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((made / name).read_bytes()).hexdigest() == digest


@pytest.mark.slow
def test_the_bill_of_materials_has_all_that_is_needed(made: Path) -> None:
    (path,) = made.glob("*.cdx.json")
    bill = json.loads(path.read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    components = [bill["metadata"]["component"], *bill["components"]]
    files = {each["name"]: each["hashes"] for component in components for each in component.get("components", [])}
    assert files == {
        file.name: [{"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}]
        for file in made.iterdir()
        if file.name.endswith((".whl", ".tar.gz"))
    }
    named = {component["name"]: component for component in components}
    assert len(named) == len(components)
    for name in ("torch", "aiohttp", "tokenizers", "triton", "transformers", "opentelemetry-sdk"):
        assert named[name]["version"] == version(name).split("+")[0]
        assert named[name]["licenses"]
    assert not {"pytest", "mypy", "ruff", "hatchling", "litellm"} & set(named), "for developers only"
    needs = {each["ref"]: set(each["dependsOn"]) for each in bill["dependencies"]}
    assert set(needs) == {component["bom-ref"] for component in components}
    assert set().union(*needs.values()) <= set(needs)
    assert named["torch"]["bom-ref"] in needs[named["infer-core"]["bom-ref"]]


@pytest.mark.slow
def test_the_same_sources_yield_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another folder, at another time, from files of other dates and rights. One level stands for all kernels."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", dist.epoch())  # a commit meanwhile would change it
    monkeypatch.setattr(dist, "GLIBC", (2, 99))  # that of wheels which are compiled like this is newer
    found = []
    for name in ("one", "another/folder"):
        (tmp_path / name).mkdir(parents=True)
        to = tmp_path / name / "dist"
        to.mkdir()
        for package in PACKAGES:
            if package.name not in ("core", "demo", NATIVE):
                continue
            copy = dist.copied(package, tmp_path / name)
            if name != "one":
                for file in copy.rglob("*"):
                    file.chmod(0o700 if file.is_dir() else 0o600)
                    os.utime(file, (0, time.time() - 1e6))
            if package.name != NATIVE:
                dist.build(copy, to)
                continue
            dist.build(copy, to, "sdist")
            hook = copy / "hatch_build.py"
            hook.write_text(hook.read_text() + "\nLEVELS.clear()\n")
            dist.native_wheel(copy, to, "c++", FASTEST)
        found.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in to.iterdir()})
        assert len(found[-1]) == 6
    assert found[0] == found[1]


class Empty:
    """An environment with nothing but pip, in a folder that has ``dist`` besides."""

    def __init__(self, folder: Path, dist: Path) -> None:
        venv.create(folder / "env", with_pip=True)
        (folder / "dist").symlink_to(dist)
        self.folder, self._bin = folder, folder / "env" / "bin"

    def link(self, *wanted: str) -> None:
        """Puts what pip would install, without its commands, as links to where this environment has the very same
        versions."""
        report = self.folder / "report.json"
        self.pip("--dry-run", "--ignore-installed", "--report", str(report), *wanted)
        (site,) = (self.folder / "env").glob("lib/python*/site-packages")
        for each in json.loads(report.read_text())["install"]:
            name, asked = each["metadata"]["name"], each["metadata"]["version"]
            for found in distributions(name=name):
                tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
                if found.version == asked and not any((site / top).exists() for top in tops):
                    for top in tops:
                        (site / top).symlink_to(str(found.locate_file(top)))

    def pip(self, *arguments: str, **variables: str) -> str:
        """PIP_RETRIES: an index that cannot be reached from here is asked for every package. PIP_NO_COMPILE: most of
        what is installed is never imported."""
        command = [str(self._bin / "python"), "-m", "pip", "install", "--quiet", *arguments]
        return self._run(command, **{"PIP_RETRIES": "1", "PIP_NO_COMPILE": "1", **variables})

    def named(self) -> set[str]:
        """The distributions that are installed."""
        listed = json.loads(self._run([str(self._bin / "python"), "-m", "pip", "list", "--format", "json"]))
        return {each["name"] for each in listed}

    def nbytes(self) -> int:
        """The size of the environment's files, of each one once, and of those that are linked to; without bytecode."""
        walked = os.walk(self.folder / "env", followlinks=True)
        files = {Path(folder, name).resolve() for folder, _, names in walked for name in names}
        return sum(file.stat().st_size for file in files if file.suffix != ".pyc")

    def shell(self, home: Path) -> Shell:
        """One that finds this environment's commands first."""
        variables = environment()
        return Shell(
            self.folder, variables | {"PATH": f"{self._bin}:{variables['PATH']}", "HF_HOME": str(home)}, free_port()
        )

    def infer(self, *arguments: str) -> str:
        return self._run([str(self._bin / "infer"), *arguments])

    def serve(self) -> subprocess.Popen[str]:
        command = [str(self._bin / "infer"), "serve", "demo", "--port", "0"]
        return subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, env=environment(), text=True)

    def _run(self, command: list[str], **variables: str) -> str:
        done = subprocess.run(command, cwd=self.folder, env=environment() | variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def empty(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Empty:
    """With what the README installs, by the README's own lines. Most of what others publish is there before."""
    empty = Empty(tmp_path_factory.mktemp("empty"), made)
    lines = [shlex.split(line, comments=True)[2:] for line in SHOWN["README.md"] if line.startswith("pip install ")]
    assert len(lines) == 2
    empty.link(*lines[0])
    for line in lines:
        empty.pip(*line)
    return empty


@pytest.mark.slow
def test_the_readme_works_with_what_it_installs(empty: Empty, tmp_path: Path) -> None:
    """Every command and piece of code there, and no more is installed than it says."""
    found = empty.named() - {"pip", "setuptools", "wheel"}
    assert {"infer-engine", "infer-console", "infer-cache-slotted"} <= found
    assert len(found) <= MOST_DISTRIBUTIONS, found
    assert empty.nbytes() <= MOST_BYTES
    shell = empty.shell(hub(tmp_path / "home"))
    ran = follow(PAGES["README.md"], shell, lambda each: not each.startswith(("make ", "curl ", "pip ")), python=True)
    assert ran > 8
    shell.run("infer generate --model demo --max-tokens 2 --cache.backend slotted 'def '", [])


@pytest.mark.slow
def test_a_newcomer_gets_a_streamed_answer_and_the_console(empty: Empty) -> None:
    """The commands of docs/install.md, from wheels alone."""

    def asked(url: str, path: str, body: object = None) -> list[str]:
        ask = urllib.request.Request(url + path, headers={"Content-Type": "application/json"})
        ask.data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(ask, timeout=60) as answer:
            return [line.decode().strip() for line in answer if line.strip()]

    with empty.serve() as server:
        assert server.stdout is not None
        url = server.stdout.readline().removeprefix("infer: ready on ").strip()
        body = {"prompt": "def ", "max_tokens": 8, "ignore_eos": True, "stream": True}
        *chunks, done = asked(url, "/v1/completions", body)
        assert done == "data: [DONE]"
        assert len(chunks) >= 8
        assert "<!doctype html>" in asked(url, "/console")[0].lower()
        server.terminate()
        assert server.wait(timeout=60) == 0
    assert len(empty.infer("generate", "--model", "demo", "--max-tokens", "8", "def ")) > len("def ")
    assert infer_demo.__file__ not in empty.infer("plugins")


@pytest.mark.slow
def test_an_sdist_builds_where_a_compiler_is_and_says_what_lacks_where_none_is(empty: Empty, made: Path) -> None:
    advice = "--no-build-isolation --no-cache-dir --no-deps --force-reinstall -r dist/infer-kernels-cpu.txt"
    from_source = [*advice.split(), "--no-binary", "infer-kernels-cpu"]
    empty.pip("hatchling")
    empty.pip(*from_source, CXX="no-such-compiler")
    assert [line for line in empty.infer("plugins").splitlines() if "no C++ compiler" in line]
    refused = subprocess.run(
        [empty.folder / "env/bin/infer", "generate", "--model", "demo", "--kernels.backend", "cpu", "def "],
        cwd=empty.folder,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert refused.returncode != 0
    (said,) = [line for line in refused.stderr.splitlines() if "C++ compiler" in line]
    assert f"pip install hatchling && pip install {advice}" in said
    assert len(empty.infer("generate", "--model", "demo", "--max-tokens", "8", "def ")) > len("def ")
    plain = compiler(empty.folder, unless="-mavx")  # what a compiler fails at is left out
    empty.pip(*from_source, CXX=plain, **FAST)
    assert "level portable" in empty.infer("doctor", "demo", "--kernels.backend", "cpu")
    options = ["--model", "demo", "--max-tokens", "8", "--kernels.backend", "cpu"]
    assert len(empty.infer("generate", *options, "def ")) > len("def ")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> str:
    """tests/kernels_cpu/native.cpp, compiled for this machine."""
    return str(compiled("c++", tmp_path_factory.mktemp("native") / "here"))


def compiled(compiler: str, to: Path) -> Path:
    source = str(Path(__file__).parent / "kernels_cpu" / "native.cpp")
    subprocess.run([compiler, "-std=c++20", "-O1", source, "-o", str(to), "-ldl"], check=True)
    return to


@pytest.mark.slow
def test_the_wheel_for_aarch64_computes_what_the_others_compute(made: Path, here: str, tmp_path: Path) -> None:
    """On an emulated processor without BF16 and on one with it. Products of int8 have the same bits on all machines."""
    for tool, package in (("qemu-aarch64", "qemu-user"), ("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool} (Debian: apt-get install {package})")
    (wheel,) = made.glob("infer_kernels_cpu-*_aarch64.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    there = str(compiled("aarch64-linux-gnu-g++", tmp_path / "there"))
    expected = tried([here], native.FOLDER / "portable.so")
    for processor, level, features in (("cortex-a72", "portable", "0"), ("max", "portable", "1"), ("max", "bf16", "1")):
        emulated = ["qemu-aarch64", "-cpu", processor, "-L", "/usr/aarch64-linux-gnu", there]
        found = tried(emulated, tmp_path / "infer_kernels_cpu" / f"{level}.so")
        assert found == expected | {"features": features}


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks for features of x86-64")
@pytest.mark.parametrize(("processor", "features"), [("Nehalem", "0"), ("Haswell", "1")])
def test_a_processor_is_asked_for_what_it_has(processor: str, features: str, here: str) -> None:
    if shutil.which("qemu-x86_64") is None:
        pytest.skip("there is no qemu-x86_64 (Debian: apt-get install qemu-user)")
    found = tried(["qemu-x86_64", "-cpu", processor, here], native.FOLDER / "portable.so")
    assert found["features"] == features


@pytest.mark.slow
@pytest.mark.parametrize("level", native.levels())
def test_the_levels_of_this_machine_pass_what_the_emulated_ones_pass(level: str, here: str) -> None:
    portable = tried([here], native.FOLDER / "portable.so")
    assert tried([here], native.FOLDER / f"{level}.so") == portable


def tried(program: list[str], library: Path) -> dict[str, str]:
    """What tests/kernels_cpu/native.cpp says of a library."""
    done = subprocess.run([*program, str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())
