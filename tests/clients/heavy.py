"""Evaluation harnesses and load generators, one short run each: `make test-clients`, in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serving import chatty, serving

import infer_demo
from infer_server.testing import Serving

CLIENTS = Path(sys.prefix) / "clients"
CHECKPOINT = str(Path(infer_demo.__file__).parent / "checkpoint")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(model=chatty(tmp_path_factory.mktemp("server")), engine={"max_seq_len": 2048}) as made:
        yield made


def run(client: str, *arguments: str, cwd: Path) -> None:
    environment = os.environ | {"OPENAI_API_KEY": "unused"}
    command = [str(CLIENTS / client.replace("_", "-") / "bin" / client), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]


def test_lm_eval(server: Serving, tmp_path: Path) -> None:
    """A task of multiple choice: the log-probabilities of what is echoed decide."""
    rows = [
        {"question": f"{word} = ", "choices": ["[]", "zebra crossings"], "answer": 0}
        for word in ("x", "items", "result")
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "task.yaml").write_text(
        "task: assignments\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {tmp_path / 'rows.jsonl'}\ntest_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\ntarget_delimiter: ""\n'
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    model = f"model=demo,base_url={server.url}/v1/completions,tokenizer_backend=huggingface,tokenizer={CHECKPOINT}"
    arguments = ["--model", "local-completions", "--model_args", f"{model},num_concurrent=2,max_retries=1"]
    arguments += ["--tasks", "assignments", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    run("lm_eval", *arguments, cwd=tmp_path)
    (result,) = (tmp_path / "out").rglob("results*.json")
    assert json.loads(result.read_text())["results"]["assignments"]["acc,none"] == 1.0


def test_guidellm(server: Serving, tmp_path: Path) -> None:
    arguments = ["run", "--backend", f"kind=openai_http,target={server.url},model=demo"]
    arguments += ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4"]
    arguments += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"]
    arguments += ["--tokenizer", f"kind=huggingface_auto,model={CHECKPOINT}"]
    arguments += ["--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-console-interactive"]
    run("guidellm", *arguments, cwd=tmp_path)
    result = tmp_path / "report.json"
    (benchmark,) = json.loads(result.read_text())["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == 4
    assert not benchmark["requests"]["errored"]


def test_aiperf(server: Serving, tmp_path: Path) -> None:
    arguments = ["profile", "--model", "demo", "--url", server.url, "--endpoint-type", "chat", "--streaming"]
    arguments += ["--request-count", "4", "--concurrency", "2", "--tokenizer", CHECKPOINT, "--ui", "none"]
    arguments += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16", "--artifact-dir", str(tmp_path)]
    run("aiperf", *arguments, cwd=tmp_path)
    (result,) = tmp_path.rglob("profile_export_aiperf.json")
    found = json.loads(result.read_text())
    assert found["request_count"]["avg"] == 4
    assert found["time_to_first_token"]["avg"] > 0
