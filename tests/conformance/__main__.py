"""``python -m tests.conformance --vllm CHECKOUT --llama-cpp CHECKOUT``: runs their tests of routes that infer has, too,
against infer, and compares the outcome with ``expected.toml``. Exits with 1 if a test fails that is not listed, or
passes though it is listed."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.conformance.expected import LAST, PEERS, Outcome, Peer, compare, summarize
from tests.serving import retokened

HERE = Path(__file__).parent
TEMPLATE = """\
{#- THINKS -#}
{%- if tools %}<|im_start|>system
These are the tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>{"name": ..., "arguments": ...}</tool_call> to call one.<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def checkpoint(folder: Path) -> None:
    """Make the checkpoint of ``peers/scripted.py``."""
    tokens = retokened(folder, "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for each in tokenizer["added_tokens"]:
        each["special"] |= each["content"].startswith("<|im_")  # else a grammar would take them for text
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    config |= {"eos_token_id": [config["eos_token_id"], tokens["<|im_end|>"]], "max_position_embeddings": 1 << 15}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "template.jinja").write_text(TEMPLATE)
    begin, end = TEMPLATE.replace("{#- THINKS -#}", "<|thinks|>").rsplit("{% endif %}", 1)
    shut = "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    (folder / "thinks.jinja").write_text(f"{begin}{shut}{{% endif %}}{end}")


def begin(peer: Peer, checkout: Path, files: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start pytest with some of the peer's tests. It writes its report to ``folder``."""
    checkpoint(folder)
    environment = os.environ | {
        "PYTHONPATH": f"{HERE / 'peers'}{os.pathsep}{HERE.parents[1] / 'examples/llamacpp/src'}",
        "PYTEST_ADDOPTS": "-p no:langsmith_plugin -p no:schemathesis",
        "INFER_CONFORMANCE_MODEL": str(folder),
        "INFER_CONFORMANCE_REPORT": str(folder / "report.json"),
        "XDG_STATE_HOME": str(folder),
    }
    options = ["asyncio_mode=strict", "asyncio_default_fixture_loop_scope=function", "addopts="]
    command = [sys.executable, "-m", "pytest", "-v", "--no-header", "--tb=line", "-p", peer.plugin]
    command += ["-p", "no:cacheprovider", "--import-mode=prepend", "-c", os.devnull, "--rootdir=."]
    command += [f"--confcutdir={peer.conftests}", *(f"--override-ini={each}" for each in options), *files]
    return subprocess.Popen(command, cwd=checkout / peer.root, env=environment)


def run(peer: Peer, checkout: Path, files: Sequence[str], jobs: int) -> dict[str, Outcome]:
    """Run the peer's tests, in as many processes. Returns what became of each."""
    found: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, str(i)) for i in range(min(jobs, len(files)))]
        running = []
        for i, folder in enumerate(folders):
            folder.mkdir()
            running.append(begin(peer, checkout, files[i :: len(folders)], folder))
        for process in running:
            process.wait()
        for folder in folders:
            if not (folder / "report.json").is_file():
                raise SystemExit(f"pytest did not finish in {checkout / peer.root}")
            report = json.loads((folder / "report.json").read_text())
            found |= {test: Outcome(*outcome) for test, outcome in report.items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    for peer in PEERS.values():
        parser.add_argument(f"--{peer.name}", type=Path, metavar="CHECKOUT")
        parser.add_argument(f"--{peer.name}-commit", metavar="COMMIT", help="where the checkout is none of git's")
    parser.add_argument("--record", action="store_true", help="write the counts to last.json, for docs/conformance.md")
    parser.add_argument("--only", action="append", default=[], metavar="FILE", help="these files or tests only")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes of pytest run side by side")
    args = parser.parse_args()
    bad = False
    last = json.loads(LAST.read_text()) if LAST.is_file() else {}
    for peer in PEERS.values():
        name = peer.name.replace("-", "_")
        checkout = getattr(args, name)
        if checkout is None:
            continue
        commit = getattr(args, f"{name}_commit")
        if commit is None:
            git = ["git", "-C", str(checkout), "rev-parse", "--short=9", "HEAD"]
            commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
        found = run(peer, checkout, args.only or peer.files, args.jobs)
        surprises = compare(peer, found, whole=not args.only)
        print("\n".join(surprises))
        bad |= bool(surprises)
        kinds = Counter(kind for kind, _ in found.values())
        print(f"{peer.title} {commit}: {dict(kinds)}, {len(surprises)} not as listed")
        if not surprises:
            last[peer.name] = summarize(peer, found, commit)._asdict()
    if args.record and not bad and not args.only:
        LAST.write_text(json.dumps(last, indent=2) + "\n")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
