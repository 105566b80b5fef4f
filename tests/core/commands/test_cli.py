"""The command line as a user meets it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from infer.commands import cli
from infer.commands.cli import _parser, main
from infer.errors import InferError
from infer.plugins.commands import LISTED
from infer.plugins.discovery import Plugins
from infer.plugins.inspection import SPECS
from infer.settings import load_settings
from infer_bench.timeline import new_timeline
from infer_server.command import COMMAND as SERVE

ONE_THREAD = {"INFER_KERNELS__THREADS": "1"}


def infer(*args: str, cwd: Path, text: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """The command in this process, which has imported torch already."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        patch.chdir(cwd)
        patch.setattr(sys, "stdin", StringIO(text))
        for name, value in env.items():
            patch.setenv(name, value)
        try:
            code = main([*args])
        except SystemExit as ended:  # what argparse answers itself
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


@pytest.mark.slow
def test_a_process_ends_with_the_commands_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "infer.commands.cli", "generate", "x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("infer: model.path is not set")


def test_generate_prints_text(tmp_path: Path) -> None:
    args = ("generate", "--model.path", "demo", "--max-tokens", "12", "--temperature", "0")
    first = infer(*args, "def ", cwd=tmp_path, **ONE_THREAD)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("def ")
    assert len(first.stdout) > 8
    many = infer(*args, "def ", "import ", cwd=tmp_path, **ONE_THREAD)
    assert first.stdout.strip() in many.stdout, "alone or in company"
    refused = infer("generate", "--model.path", "demo", "--min-tokens", "5000", "def ", cwd=tmp_path, **ONE_THREAD)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "in_tokens = 5000 is above max_tokens = 128" in refused.stderr


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["generate", "x"], "model.path is not set"),
        (["generate", "x", "--model.path", "demo", "--cache.backend", "paged!"], "no such plugin is installed"),
        (["serve", "--model.path", "no/where-to-be-found"], "no/where-to-be-found"),
        (["serve", "--engine.max_batch_size", "x"], "engine.max_batch_size = 'x'"),
        (["generate", "x", "--temperature", "-1", "--model.path", "demo"], "--temperature -1"),
        (["plugins", "--cache.backend", "nope"], "cache.backend is 'nope'"),
        (["bench", "--scale", "0"], "--scale"),
        (["serve", "demo", "--port", "x"], "server.port = 'x'"),
        (["serve", "demo", "--model.path", "other"], "model.path is given twice, as --model.path and"),
        (
            ["serve", "demo", "--max-batch-size", "4"],
            "no argument '--max-batch-size'. Did you mean --engine.max_batch_size?",
        ),
        (["generate", "--max_token", "4"], "no argument '--max_token'. Did you mean --max-tokens?"),
        (["demo", "--model", "demo", "--chunk", "0"], "engine.prefill_chunk_size = 0"),
        (
            ["demo", "--model", "demo", "--prompt-tokens", "5000"],
            "--prompt-tokens is 5000, and with the answer's 8",
        ),
        (["bench", "--model", "demo", "--compare", "engine.foo=3"], "engine.foo (from --engine.foo) is not a setting"),
        (["bench", "--model", "demo", "--compare", "engine.graphs"], "--engine.graphs needs a value"),
        (["plugins", "--model", "demo"], "no argument '--model'. Did you mean --model.path?"),
        (["bench", "--workload", "nope"], "infer bench: argument --workload: invalid choice: 'nope' (choose from"),
        (["generate", "--seed"], "argument --seed: expected one argument. `infer generate --help` shows"),
        (["serv"], "There is no command 'serv'; there are bench, "),
        (["serve", "--engine.batching_mode", "continous", "--model", "demo"], "Did you mean 'continuous'?"),
        (["serve", "demo", "--api_kye=sesame"], "no argument '--api_kye'. Did you mean --api-key?"),
        (["serve", "demo", "--api-key", "x", "--api-key", "sesame"], "server.api_keys is given twice"),
        (["plugins", "all"], "infer plugins has no argument 'all'. `infer plugins --help` lists what it has."),
    ],
)
def test_what_the_user_can_mend_is_one_sentence_and_exit_code_2(args: list[str], sentence: str, tmp_path: Path) -> None:
    done = infer(*args, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("infer: ")]
    assert sentence in line
    assert "usage:" not in done.stderr
    assert "sesame" not in done.stderr, "a key"
    assert "Traceback" not in done.stderr


def test_plain_names_are_settings(tmp_path: Path) -> None:
    args = _parser([SERVE], {}).parse_args(
        ["serve", "demo", "--port", "0", "--host", "::1", "--api-key", "a,b", "--max-model-len", "64"]
    )
    loaded = load_settings(Plugins.discover(), argv=args.plain_settings, env={}, read_file=False).settings
    assert (loaded.model.path, loaded.server.port, loaded.server.host) == ("demo", 0, "::1")
    assert [key.get_secret_value() for key in loaded.server.api_keys] == ["a", "b"]
    assert loaded.engine.max_seq_len == 64
    done = infer("generate", "--model", "demo", "--max-model-len", "8", "--max-tokens", "5", "def ", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    twice = infer("serve", "demo", "--model", "demo", cwd=tmp_path)
    assert (twice.returncode, "model.path is given twice" in twice.stderr) == (2, True)


def test_help_lists_the_commands_of_our_packages_that_are_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {package for package, _ in LISTED.values()}
    offers = [each for each in Plugins.discover().offers["command"] if each.distribution in packages]
    assert {each.name: (each.distribution, each.registration.description) for each in offers} == LISTED

    def listed() -> set[str]:
        with pytest.raises(SystemExit, match="0"):
            main(["--help"])
        return {*re.findall(r"^    (\w+) ", capsys.readouterr().out, re.M)}

    assert listed() == {*LISTED}
    found = metadata.distributions
    monkeypatch.setattr(cli, "distributions", lambda name: () if name == "infer-bench" else found(name=name))
    assert {*LISTED} - listed() == {"bench", "demo", "simulate", "tune"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["--log.level", "debug"], "the following arguments are required: COMMAND"),
        (["--foo", "serve"], "unrecognized arguments: --foo"),
        (["--", "serve"], ""),
    ],
)
def test_words_that_begin_with_no_command_are_said(words: list[str], said: str, tmp_path: Path) -> None:
    done = infer(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"infer: {said}")
    assert "`infer --help`" in done.stderr


def test_a_list_of_commands_needs_nothing_of_what_they_do() -> None:
    """Whoever asks for it waits for what is imported: pydantic takes longer than all that is needed."""
    code = "import sys; from infer.commands.cli import main\n"
    code += "try: main(['--help'])\nexcept SystemExit: print({'torch', 'pydantic', 'pluggy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize(("call", "frozen"), [("main()", True), ("main(['plugins'])", False)])
def test_no_collection_looks_through_what_a_command_imports(call: str, frozen: bool, tmp_path: Path) -> None:
    """What somebody else's process has is not frozen."""
    report = "print(gc.isenabled(), gc.get_freeze_count() > 100_000)"
    program = f"import gc; from infer.commands.cli import main; {call}; {report}"
    words = [sys.executable, "-c", program, "plugins"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.endswith(f"True {frozen}\n")


def test_plugins_and_settings_as_json(tmp_path: Path) -> None:
    found = json.loads(infer("plugins", "--json", "--model.path", "none", cwd=tmp_path).stdout)
    (slotted,) = [row for row in found["parts"] if row["name"] == "slotted"]
    assert (slotted["distribution"], slotted["slot"]) == ("infer-cache-slotted", "cache")
    assert not any(row["slot"] == "checkpoint" for row in found["parts"]), "none is given"
    assert {row["chosen"] for row in found["parts"] if row["slot"] == "model"} == {"when met"}
    values = json.loads(infer("settings", "--json", "--server.port", "9", cwd=tmp_path).stdout)
    assert values["server.port"] == {"value": 9, "source": "--server.port"}
    schema = json.loads(infer("settings", "--json-schema", cwd=tmp_path).stdout)
    assert "prefill_chunk_size" in json.dumps(schema)


def test_what_plugins_lists(capsys: pytest.CaptureFixture[str]) -> None:
    """The choice for the configured checkpoint, who implements which hook, and what settings decide."""
    assert main(["plugins", "--json", "--model.path", "demo", "--kernels.backend", "reference"]) == 0
    found = json.loads(capsys.readouterr().out)
    (demo,) = [row for row in found["parts"] if row["slot"] == "checkpoint"]
    assert demo["quantization"]["method"] is None
    assert demo["quantization"]["forms"] == ["plain weights"]
    assert demo["quantization"]["nbytes"] > 2e6
    chosen = {(row["slot"], row["name"]): row["why"] for row in found["parts"] if row["chosen"] == "yes"}
    assert (
        chosen["model", "llama"] == "by the checkpoint's architecture: LlamaForCausalLM; over transformers (priority 0)"
    )
    assert chosen["cache", "paged"] == "cache.backend = auto (from default); over slotted (priority 10)"
    assert chosen["kernels", "reference"] == "kernels.backend = reference (from --kernels.backend)"
    assert ("weights", "safetensors") in chosen
    assert ("kernels", "cpu") not in chosen
    hooks = {row["hook"]: row["plugins"] for row in found["hooks"]}
    assert hooks.keys() == SPECS.keys()
    assert [name.split()[0] for name in hooks["infer_models"]] == ["infer-models-transformers", "infer-models"]
    settings = {row["key"]: row for row in found["settings"]}
    assert settings["kernels.backend"]["source"] == "--kernels.backend"
    assert settings["kernels.backend"]["selects"]["parts"] == ["reference"]
    assert settings["engine.speculation"]["selects"]["parts"] == []
    assert settings["model.tool_format"]["selects"]["chosen"] == "when met"
    assert "page" in settings["cache.paged.block_size"]["decides"]
    assert settings["cache.paged.block_size"]["selects"] is None
    assert found["checkpoints"].keys() == {"demo"}
    assert main(["plugins", "--model.path", "demo"]) == 0
    said = capsys.readouterr().out
    assert "not quantized: plain weights, " in said
    assert re.search(r"^infer_models +infer-models-transformers ", said, re.M)
    assert re.search(r'^cache.backend +"auto" +default +cache: paged$', said, re.M)


@contextmanager
def serve(tmp_path: Path, *python: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`infer serve` in a process of its own, and its address."""
    python = python or ("-m", "infer.commands.cli")
    command = [sys.executable, *python, "serve", "--model.path", "demo", "--server.port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=os.environ | ONE_THREAD
    ) as server:
        try:
            assert server.stdout is not None
            ready = server.stdout.readline()
            assert ready.startswith("infer: ready on http://127.0.0.1:")
            yield server, ready.removeprefix("infer: ready on ").strip()
        finally:
            server.kill()


def complete(url: str, **body: object) -> Any:
    """The response to a request for so many tokens, unread."""
    data = json.dumps({"prompt": "def ", "ignore_eos": True} | body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


@pytest.mark.slow
def test_serve_finishes_what_it_has_begun_on_sigterm(tmp_path: Path) -> None:
    with serve(tmp_path) as (server, url):
        with complete(url, max_tokens=1500, stream=True) as response:
            lines = [response.readline()]
            server.send_signal(signal.SIGTERM)
            lines += response.readlines()
        *chunks, done = [line.removeprefix(b"data: ") for line in lines if line.strip()]
        assert done == b"[DONE]\n"
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
        assert choices[-1]["finish_reason"] == "length"
        assert len(choices) > 1000
        assert server.wait(timeout=60) == 0


FAILS_WITH_TWO = """
import sys, threading
from infer.commands.cli import main
from infer.engine.schedulers import ContinuousScheduler

schedule = ContinuousScheduler.schedule

def fails_with_two(self):
    if sum(sequence.decoding for sequence in self.seats.running) == 2:
        threading.Thread(target=threading.Event().wait, daemon=False).start()  # the interpreter waits for it
        raise RuntimeError("lost count")
    return schedule(self)

ContinuousScheduler.schedule = fails_with_two
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_serve_ends_with_its_engine_once_everyone_is_told(tmp_path: Path) -> None:
    with serve(tmp_path, "-c", FAILS_WITH_TWO) as (server, url):
        with complete(url, max_tokens=1500, stream=True) as response:
            response.readline()
            with pytest.raises(urllib.error.HTTPError) as raised:
                complete(url, max_tokens=1500)
            *_, error, done = [line for line in response.readlines() if line.strip()]
        assert raised.value.code == 500
        assert "lost count" in json.loads(raised.value.read())["error"]["message"]
        assert b"lost count" in error
        assert done == b"data: [DONE]\n"
        _, log = server.communicate(timeout=60)
        assert server.returncode == 1
        assert re.search("infer: The engine has stopped: .*RuntimeError: lost count", log)


@pytest.mark.slow
def test_demo_shows_both_timelines(tmp_path: Path) -> None:
    args = ("demo", "--model.path", "demo", "--prompt-tokens", "150", "--chunk", "32", "--budget", "64")
    done = infer(*args, "--engine.max_batch_size", "8", cwd=tmp_path, **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert "chunked prefill" in done.stdout
    assert "0:32" in done.stdout
    assert "0:150" in done.stdout
    assert "jitter" in done.stdout


def test_a_timeline_needs_the_plugin_that_writes_it_and_a_place(tmp_path: Path) -> None:
    with pytest.raises(InferError) as raised:
        new_timeline("--html", str(tmp_path / "x.html"), Plugins.discover(installed=()))
    assert str(raised.value) == "--html needs the plugin that writes the page: pip install -r dist/infer-console.txt."
    assert main(["demo", "--model", "demo", "--html", str(tmp_path / "none" / "x.html")]) == 2
    assert main(["bench", "--url", "http://x", "--timeline", str(tmp_path / "x.html")]) == 2
    assert [*tmp_path.iterdir()] == []


def test_what_is_shown_of_an_address_is_not_who_logs_in_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    address = "https://me:s3cr3t@spans.example:4318/v1?mail=a@b.example"
    assert main(["settings", "--observers.otel.endpoint", address]) == 0
    out = capsys.readouterr().out
    assert "s3cr3t" not in out
    assert '"https://**********@spans.example:4318/v1?mail=a@b.example"' in out


def test_what_has_no_value_is_shown_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "--kernels.threads", "none"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("kernels.threads")]
    assert row.split()[1:3] == ["none", "--kernels.threads"]


@pytest.mark.slow
def test_chat_answers_line_by_line(tmp_path: Path) -> None:
    args = ("chat", "--model.path", "demo", "--max-tokens", "12", "--seed", "3")
    one = infer(*args, cwd=tmp_path, text="a loop\n", **ONE_THREAD)
    assert one.returncode == 0, one.stderr
    assert one.stdout.strip()
    again = infer(*args, cwd=tmp_path, text="a loop\n\n/reset\na loop\n/exit\nnever read\n", **ONE_THREAD)
    assert again.stdout == one.stdout * 2, "a reset forgets, and so the same comes again"
    with_system = infer(*args, "--system", "class A:", cwd=tmp_path, text="a loop\n", **ONE_THREAD)
    assert with_system.stdout != one.stdout


def test_chat_needs_a_template(tmp_path: Path) -> None:
    (tmp_path / "empty.jinja").write_text("{{ raise_exception('no thanks') }}")
    (tmp_path / "broken.jinja").write_text("{% if %}")
    args = ("chat", "--model.path", "demo")
    done = infer(*args, "--model.chat_template", "empty.jinja", cwd=tmp_path, text="x\n", **ONE_THREAD)
    assert (done.returncode, "no thanks" in done.stderr) == (2, True), done.stderr
    done = infer(*args, "--model.chat_template", "broken.jinja", cwd=tmp_path, text="x\n", **ONE_THREAD)
    assert (done.returncode, "not valid" in done.stderr) == (2, True), done.stderr
