"""The packages in examples/ are what strangers write: small, by the contract alone, and installed beside core."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.forking import Forks

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))
BASE = (
    "core",
    *(f"plugins/{name}" for name in ("server", "cache_slotted", "cache_paged", "layers", "models", "testing", "demo")),
)
MOST_LINES = 100
PREPARED = {
    "stablelm": "tiny_checkpoint('StableLmForCausalLM', Path('made'), use_qkv_bias=True)",
    "bitsandbytes": """
import json, sys
from safetensors.torch import save_file
sys.path.insert(0, "tests")
from test_bitsandbytes import CONFIG, plain, quantized
config = json.loads((tiny_checkpoint("LlamaForCausalLM", Path("made")) / "config.json").read_text())
save_file(quantized(plain()), "made/model.safetensors")
Path("made/config.json").write_text(json.dumps(config | CONFIG))
tiny_checkpoint("LlamaForCausalLM", Path("plain"))
""",
}
"""Code that makes the checkpoints which the commands read."""
CHECKS = {
    "bitsandbytes": ["check", "weights:bitsandbytes", "--checkpoint", "made", "--against", "plain"],
    "phi_tools": [],
    "weighted": ["check", "scheduler:weighted", "--engine.weighted.weight", "1.5"],
    "llamacpp": [],
    "perfetto": ["generate", "--model", "demo", "--max-tokens", "4", "--observers.perfetto.path", "trace.json", "def "],
    "rolling": ["check", "cache:rolling", "--cache.rolling.block-size", "8"],
    "stablelm": ["check", "model:stablelm", "--checkpoint", "made", "--against", "transformers"],
}
"""A command of `infer` that uses each, as its README shows one."""
SETTINGS = {
    "weighted": '[engine]\nbatching_mode = "weighted"\n',
    "rolling": '[cache]\nbackend = "rolling"\n',
    "perfetto": '[observers.perfetto]\npath = "trace.json"\n',
    "phi_tools": '[model]\ntool_format = "functools"\n',
}
"""What settings.toml says to select each, where something has to be said."""
each = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)


def sources(example: Path) -> list[Path]:
    return sorted(example.glob("src/**/*.py"))


def promised() -> set[str]:
    """The modules that docs/plugins.md promises to plugins."""
    text = (ROOT / "docs/plugins.md").read_text()
    (sentence,) = re.findall(r"`INFER_PLUGIN_API = 2` names the contract:(.*?)\.\s+A\s+plugin", text, re.DOTALL)
    named = set(re.findall(r"`(infer(?:\.\w+)*)`", sentence))
    readers = {f"infer.contracts.{file.stem}" for file in (ROOT / "core/src/infer/contracts").glob("*.py")}
    return named | (readers if "infer.contracts" in named else set())


@each
def test_an_example_is_small_and_has_all_that_a_package_has(example: Path) -> None:
    for file in sources(example):
        assert len(file.read_text().splitlines()) <= MOST_LINES, file
    assert (example / "README.md").exists()
    assert [*example.glob("tests/test_*.py")]
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    (module,) = project["entry-points"]["infer"].values()
    assert (example / "src" / module / "py.typed").exists()
    readme = (example / "README.md").read_text()
    # What is ours is there before pip is asked for it by name, or a public index would answer.
    assert f"[installing](../../docs/install.md)):\n\n```console\n$ pip install ./examples/{example.name}\n" in readme
    assert f"$ pip install -r dist/infer-testing.txt\n$ pip install './examples/{example.name}[test]'\n" in readme
    assert "settings.toml" in readme


@each
def test_an_example_imports_only_what_the_contract_promises(example: Path) -> None:
    for file in sources(example):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "infer":
                assert node.module in promised(), f"{file}: {node.module}"
                assert not [alias.name for alias in node.names if alias.name.startswith("_")]
            elif isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.split(".")[0] == "infer"]


def build(folder: Path, packages: Sequence[Path]) -> Path:
    """Make wheels of packages in a folder, which is returned."""
    for package in packages:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(command, cwd=package, check=True, capture_output=True)
    return folder


def environment(folder: Path, wheels: Path, *names: str) -> Path:
    """A fresh environment with these distributions from their wheels, and with the libraries of this one, but nothing
    of ours that is not from a wheel. Returns its ``bin``."""
    here = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    libraries = folder / "libraries"
    libraries.mkdir(parents=True)
    for entry in here.iterdir():
        if not re.match(r"_*(infer_|__editable__|_editable_impl_infer)|.*\.pth$", entry.name):
            (libraries / entry.name).symlink_to(entry)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{libraries}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "env"), "install", "--quiet", "--no-index"]
    if names:
        subprocess.run([*pip, "--find-links", str(wheels), *names], check=True)
    return folder / "env" / "bin"


@pytest.mark.slow
def test_the_examples_work_as_a_stranger_installs_them(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """From wheels, and side by side: none is in another's way."""
    wheels = build(tmp_path / "wheels", [*(ROOT / name for name in BASE), *EXAMPLES])
    for example in EXAMPLES:
        (wheel,) = wheels.glob(f"infer_{example.name}-*.whl")
        assert f"infer_{example.name}/py.typed" in zipfile.ZipFile(wheel).namelist()
    names = {example: "infer-" + example.name.replace("_", "-") for example in EXAMPLES}
    base = ("infer-cache-slotted", "infer-cache-paged", "infer-models", "infer-testing", "infer-demo")
    bin = environment(tmp_path, wheels, *names.values(), *base)
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("INFER_", "PYTHON"))}

    def run(folder: Path, *words: str) -> str:
        done = forks.run(words, folder, plain)
        assert done.returncode == 0, f"{folder.name}: {words}\n{done.stdout}{done.stderr}"
        return done.stdout

    def script(folder: Path, code: str) -> str:
        file = folder / "script.py"
        file.write_text(code)
        file.chmod(0o755)
        return str(file)

    for example in EXAMPLES:
        shutil.copytree(example / "tests", tmp_path / example.name / "tests")
        (tmp_path / example.name / "settings.toml").write_text(SETTINGS.get(example.name, ""))
    options = ("-p", "no:cacheprovider", "-p", "no:xdist", "-rp", "--import-mode=importlib", "-m", "not slow")
    # torch and transformers are imported once for all commands.
    forks = Forks(bin / "python", plain, "torch", "transformers")
    request.addfinalizer(forks.close)
    tests = script(tmp_path, "import pytest, sys\nsys.exit(pytest.console_main())\n")
    passed = run(tmp_path, tests, *options, *(example.name for example in EXAMPLES))
    listed = run(tmp_path, str(bin / "infer"), "plugins")
    for example in EXAMPLES:
        assert f"PASSED {example.name}/tests/" in passed, example.name
        assert names[example] in listed
        folder, infer = tmp_path / example.name, str(bin / "infer")
        if example.name in SETTINGS:
            generated = run(folder, infer, "generate", "--model", "demo", "--max-tokens", "4", "def ")
            assert len(generated) > len("def ")
        if example.name in PREPARED:
            imports = "from pathlib import Path\nfrom infer_testing import tiny_checkpoint\n"
            run(folder, script(folder, imports + PREPARED[example.name]))
            generated = run(folder, infer, "generate", "--model", "made", "--max-tokens", "4", "--ignore-eos", "def ")
            assert len(generated) > len("def ")
        if CHECKS[example.name]:
            run(folder, infer, *CHECKS[example.name])
