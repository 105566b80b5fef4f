"""Timelines: a page of what an engine has done, which opens without a server."""

from __future__ import annotations

import base64
import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tests.console.browser import browsing, needs_browser
from tests.console.records import ended, step

from infer.commands.cli import main
from infer_console import timeline
from infer_console.timeline import HEAD, RUNS, Timeline, TimelineSettings, bundle, page

EVIL = "</script><!--<script>window.harm=1</script><img src=x onerror=window.harm=1>\"'&"
RESTS = "document.querySelector('#works').getAttribute('aria-busy') === 'false'"
"""The slider rests, so that the table is that of the chosen step."""


def runs(page: str) -> list[Any]:
    return [json.loads(run) for run in RUNS.findall(page)]


def record(file: Path, steps: int = 3, **settings: Any) -> str:
    recorded = Timeline(file, TimelineSettings(**settings))
    for n in range(steps):
        if n == steps - 1:
            recorded.infer_request_finished(ended(EVIL))
        recorded.infer_step_finished(step(n, EVIL))
    recorded.close()
    return file.read_text()


def test_the_page_has_all_runs_and_what_they_say_ends_no_element(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = record(tmp_path / "page.html", title=EVIL, budget=7)
    page = record(tmp_path / "page.html", title="second")
    first, second = runs(page)
    assert (first["title"], second["title"]) == (EVIL, "second")
    hello, *told = first["records"]
    assert (hello["kind"], hello["budget"], hello["cache"]) == ("hello", 7, 100)
    assert [record["kind"] for record in told] == ["step", "map", "step", "step", "end"]
    assert told[0]["new"] == {"0": EVIL}
    assert page.count("</script") == 3
    assert page.count("<!--") == 1
    assert page.startswith(HEAD)
    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="(.*)"', page)
    (style,), (script,) = (re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("style", "script"))
    hashes = [base64.b64encode(sha256(text.encode()).digest()).decode() for text in (script, style)]
    assert policy.split("; ")[:3] == [
        "default-src 'none'",
        *(f"{what}-src 'sha256-{hash}'" for what, hash in zip(("script", "style"), hashes, strict=True)),
    ]
    assert "unsafe" not in policy
    assert not re.search(r"(?:src|href)=(?!\"data:,\")", RUNS.sub("", page))
    monkeypatch.setattr(timeline, "NBYTES", 2000)
    assert [run["title"] for run in runs(record(tmp_path / "page.html", title="third"))] == ["third"]
    monkeypatch.setattr(timeline, "RECORDS", 2)
    (run,) = runs(record(tmp_path / "page.html", title="fourth"))[-1:]
    assert [(r["kind"], r.get("records")) for r in run["records"]] == [
        ("hello", None),
        ("lost", 3),
        ("step", None),
        ("end", None),
    ]
    assert list(tmp_path.iterdir()) == [tmp_path / "page.html"]


def test_the_script_has_every_module_once_and_what_each_needs() -> None:
    script = bundle("timeline")
    defined = re.findall(r"^modules\.(\w+) = ", script, re.MULTILINE)
    assert sorted(defined) == sorted({*defined})
    assert {"view", "steps", "draw", "trace", "dom", "timeline"} == {*defined}
    assert "fetch(" not in script
    for names, module in re.findall(r"^const \{ (.*) \} = modules\.(\w+);", script, re.MULTILINE):
        (offered,) = re.findall(rf"^modules\.{module} = .*?\nreturn \{{ (.*?) \}};", script, re.MULTILINE | re.DOTALL)
        assert {name.partition(":")[0] for name in names.split(", ")} <= {*offered.split(", ")}
        assert script.index(f"modules.{module} = ") < script.index(f" = modules.{module};")


@pytest.mark.slow
@needs_browser
async def test_the_demos_page_opens_from_the_disk_and_is_scrubbed(tmp_path: Path) -> None:
    file = tmp_path / "demo.html"
    args = ["demo", "--model", "demo", "--prompt-tokens", "200", "--kernels.threads", "1", "--budget", "96"]
    assert main([*args, "--html", str(file)]) == 0
    async with browsing() as tab:
        await tab.resize(1200, 900)
        await tab.open(file.as_uri())
        await tab.until("Number(document.querySelector('#lanes').dataset.drawn) > 0")
        chunked, whole = runs(file.read_text())
        assert await tab.run("[...document.querySelectorAll('#run option')].map((o) => o.textContent)") == [
            chunked["title"],
            whole["title"],
        ]
        slider, at = "document.querySelector('#scrub')", "document.querySelector('#step h2').textContent"
        for n, run in enumerate((chunked, whole)):
            choice = "document.querySelector('#run')"
            await tab.run(f"{choice}.value = {n}; {choice}.dispatchEvent(new Event('change'))")
            steps = [record for record in run["records"] if record["kind"] == "step"]
            state = f"recorded: {run['title']}, {len(steps)} steps"
            await tab.until(f"document.querySelector('#state').textContent === {json.dumps(state)}")
            long = next(s for s in steps if any(work[2] == (200 if n else 64) for work in s["works"]))
            await tab.run(f"{slider}.value = {long['index']}; {slider}.dispatchEvent(new Event('input'))")
            assert await tab.run(at) == f"Step {long['index']}"
            await tab.until(RESTS)
            rows = await tab.run("[...document.querySelectorAll('#step tbody tr')].map((r) => r.textContent)")
            assert any(row.startswith("LONGprefill") for row in rows)
            assert await tab.run("document.querySelector('#state').textContent") == state
            assert re.search(r"after step \d+\)$", await tab.run("document.querySelector('#blocks').textContent"))
        box = "document.querySelector('#lanes').getBoundingClientRect()"
        zoom = "document.querySelector('#zoom').value"
        x, y = await tab.run(f"{box}.left + 2.5 * {zoom}"), await tab.run(f"{box}.top + 10")
        for kind in ("mousePressed", "mouseReleased"):
            await tab.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        assert await tab.run(at) == f"Step {steps[2]['index']}"
        await tab.run("HTMLAnchorElement.prototype.click = function () { window.saved = this.href }")
        await tab.run("document.querySelector('#export').click()")
        assert (await tab.run("saved")).startswith("blob:")
        record(tmp_path / "evil.html", title=EVIL)
        await tab.open((tmp_path / "evil.html").as_uri())
        await tab.until(f"{slider}.max === '2'")
        await tab.run(f"{slider}.value = 1; {slider}.dispatchEvent(new Event('input'))")
        await tab.until(RESTS)
        assert await tab.run("document.querySelector('#step td').textContent") == EVIL
        assert await tab.run("window.harm") is None
        assert tab.complaints == []
        # Whatever a page may have got into it besides: it runs the one script that it knows, and loads nothing.
        text = (tmp_path / "evil.html").read_text()
        more = "<script>window.harm=1</script><img src=https://elsewhere.example/x onerror=window.harm=1></main>"
        (tmp_path / "evil.html").write_text(text.replace("</main>", more))
        await tab.open("about:blank")
        await tab.open((tmp_path / "evil.html").as_uri())
        await tab.until(f"{slider}.max === '2'")
        assert await tab.run("window.harm") is None
        assert len([each for each in tab.complaints if "Content Security Policy" in each]) >= 3


@pytest.mark.slow
def test_the_example_in_the_docs_shows_both_runs(tmp_path: Path) -> None:
    """As `make docs` makes it."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    (command,) = re.findall(r"^\t\$\(BIN\)/infer (demo .*) > /dev/null$", makefile, re.MULTILINE)
    file = tmp_path / "steps.html"
    assert main([*command.replace("docs/demo/steps.html", str(file)).split(), "--kernels.threads", "1"]) == 0
    example = file.read_text()
    assert page(RUNS.findall(example)) == example
    made = runs(example)
    assert [run["title"] for run in made] == ["chunked prefill", "whole prefill"]
    assert [run["records"][0]["budget"] for run in made] == [128, None]
