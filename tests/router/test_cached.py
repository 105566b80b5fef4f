"""``infer pull``, ``infer rm`` and ``infer models --cached``, with a hub and a cache of their own."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download
from tests.formats.gguf.files import write_gguf
from tests.hub import COMMIT, Hub, serving
from tests.models.checkpoints import write_checkpoint

from infer.assemble import identity
from infer.assemble.blueprint import Blueprint
from infer.commands.cli import main
from infer.errors import InferError
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_router import cached
from infer_server.http.fetching import NoServerError
from infer_testing import tiny_checkpoint

A, B = "a" * 40, "b" * 40
LONG_AGO = 1_000_000_000
PLUGINS = Plugins.discover()
Said = Callable[[], str]


def nothing_is_served(context: object) -> Any:
    raise NoServerError("No server.")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, which is not there yet."""
    for name in ("HF_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "agents"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(cached, "served", nothing_is_served)
    monkeypatch.setattr(Plugins, "discover", lambda: PLUGINS)  # once for all
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a hub has: weights in safetensors, with a pickle beside them, and in GGUF files."""
    folder = tmp_path_factory.mktemp("hub")
    made = tiny_checkpoint("LlamaForCausalLM", folder / "org/plain")
    (made / "pytorch_model.bin").write_bytes(b"a pickle")
    (made / "original").mkdir()
    (made / "original/model.safetensors").write_bytes(b"again")
    source = write_checkpoint(folder.parent / f"{folder.name}-source", "llama", hidden_size=64, intermediate_size=96)
    (folder / "org/single").mkdir()
    for type in ("Q4_0", "Q8_0"):
        write_gguf(source, folder / f"org/single/m-{type}.gguf", type)
    (folder / "org/single/mmproj-Q8_0.gguf").write_bytes(b"eyes")
    return folder


@pytest.fixture(scope="module")
def server(checkpoints: Path) -> Iterator[Hub]:
    with serving(checkpoints) as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    server.sent.clear()
    server.tokens.clear()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    return server


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """What the commands have printed since this was asked last."""

    def read() -> str:
        both = capsys.readouterr()
        return both.out + both.err

    return read


def lay(cache: Path, id: str, revisions: Mapping[str, Mapping[str, bytes]], main: str | None = None) -> Path:
    """Lay a repository into the cache, as the hub's library does. ``main`` is a revision, by default the first."""
    place = cache / f"models--{id.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "blobs").mkdir()
    (place / "refs/main").write_text(main or next(iter(revisions)))
    for revision, files in revisions.items():
        for name, content in files.items():
            blob = place / "blobs" / hashlib.sha1(content).hexdigest()
            blob.write_bytes(content)
            file = place / "snapshots" / revision / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.symlink_to(os.path.relpath(blob, file.parent))
    return place


def files(place: Path) -> set[str]:
    """The names of all that lies in a repository's snapshots, and how many blobs there are."""
    found = {file.relative_to(place / "snapshots").as_posix() for file in (place / "snapshots").rglob("*.*")}
    assert all((place / "snapshots" / name).exists() for name in found), "no link leads nowhere"
    return found


def blobs(place: Path) -> set[bytes]:
    return {file.read_bytes() for file in (place / "blobs").iterdir()}


def read(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file() and file.suffix != ".bin"}


# infer pull


def test_what_would_be_loaded_is_downloaded_once(hub: Hub, cache: Path, said: Said) -> None:
    assert main(["pull", "org/plain"]) == 0
    place = cache / f"models--org--plain/snapshots/{'0' * 40}"
    out = said()
    assert f"org/plain: 0.3 MiB of weights in {place}" in out
    assert "It takes 0.50 GiB of memory, of which" in out
    assert "A sequence may have 512 tokens." in out
    assert {file.name for file in place.rglob("*")} == {"config.json", "model.safetensors", "tokenizer.json"}
    first = dict(hub.sent)
    assert main(["pull", "--model", "org/plain"]) == 0
    assert {name: hub.sent[name] for name in read(place)} == {name: first[name] for name in read(place)}


def test_of_gguf_files_the_one_that_is_named_is_downloaded(hub: Hub, cache: Path, said: Said) -> None:
    for name in ("org/single:q8_0", "org/single/m-Q4_0.gguf"):
        before = {*cache.rglob("*.gguf")}
        assert main(["pull", name]) == 0
        (new,) = {*cache.rglob("*.gguf")} - before
        assert f"{name}: 0.1 MiB of weights in {new}" in said() or "q8" in name
    assert {file.name for file in cache.rglob("*.gguf")} == {"m-Q4_0.gguf", "m-Q8_0.gguf"}
    assert main(["pull", "org/single:Q2_K"]) == 2
    assert "the hub's org/single has no such file; give the name of one, as in org/single/FILE.gguf." in said()
    assert main(["pull", "org/single"]) == 2
    assert "if it holds GGUF files, add the name of one" in said()


def test_after_an_interruption_whole_files_are_not_sent_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    http_get, names = file_download.http_get, read(hub.folder / "org/plain")

    def cut_off(url: str, *given: Any, **options: Any) -> None:
        if url.endswith(".safetensors"):
            raise KeyboardInterrupt
        http_get(url, *given, **options)

    # One after the other, so that the small files are there before.
    one_by_one = functools.partial(huggingface_hub.snapshot_download, max_workers=1)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", one_by_one)
    monkeypatch.setattr(file_download, "http_get", cut_off)
    assert main(["pull", "org/plain"]) == 130
    before = {name: hub.sent[name] for name in names}
    monkeypatch.setattr(file_download, "http_get", http_get)
    assert main(["pull", "org/plain"]) == 0
    assert hub.sent["model.safetensors"] == len(names["model.safetensors"])
    assert {name for name in names if hub.sent[name] == before[name] > 0}, "something had been sent"
    assert {name: hub.sent[name] for name in names} == {name: len(content) for name, content in names.items()}


def test_the_token_is_shown(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert main(["pull", "org/single:q4_0"]) == 0
    assert "Bearer hf_mine" in hub.tokens


def test_unknown_names(hub: Hub, cache: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(cache, "org/plain", {A: {"config.json": b"{}"}})
    assert main(["pull", "org/plian"]) == 2
    assert "and the hub has no org/plian that this HF_TOKEN may read. Did you mean 'org/plain'?" in said()
    assert main(["pull", "plain"]) == 2
    assert "it cannot be a hub id, which reads org/name, org/name:TAG or org/name/FILE. Did you mean" in said()
    assert main(["pull", "org/other"]) == 2
    assert "Did you mean" not in said()
    assert main(["pull"]) == 2
    assert "model.path is not set" in said()


def test_offline_the_cache_has_it_or_not(cache: Path, checkpoints: Path, said: Said, monkeypatch: Any) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    lay(cache, "org/plain", {A: read(checkpoints / "org/plain")})
    assert main(["pull", "org/plain"]) == 0
    assert "HF_HUB_OFFLINE is set, so the hub has not been asked for a newer one." in said()
    assert main(["pull", "org/single:q4_0"]) == 2
    assert "it is not wholly in the cache and HF_HUB_OFFLINE is set: go online" in said()


@pytest.mark.parametrize("lacking", ["config.json", "model.safetensors", "m-00002-of-00002.safetensors"])
def test_what_is_cached_in_part_is_not_cached(
    lacking: str, hub: Hub, cache: Path, checkpoints: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where sizes are looked up before a load nor, offline, where it is loaded."""
    held = read(checkpoints / "org/plain")
    if "-of-" in lacking:
        held["m-00001-of-00002.safetensors"] = held["model.safetensors"]
        parts = {"a": "m-00001-of-00002.safetensors", "b": lacking}
        held["model.safetensors.index.json"] = json.dumps({"weight_map": parts}).encode()
        del held["model.safetensors"]
    lay(cache, "org/plain", {COMMIT: {name: content for name, content in held.items() if name != lacking}})
    settings = load_settings(PLUGINS, env={}, overrides={"model": {"path": "org/plain"}}, read_file=False).settings
    blueprint = Blueprint(settings, PLUGINS, outlines=cache.parent / "outlines")
    assert blueprint.checkpoint.path == cache.parent / "outlines/org/plain"
    blueprint.weights.sketch(blueprint.context)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["pull", "org/plain"]) == 2
    assert f"it is not wholly in the cache, which lacks {lacking}, and HF_HUB_OFFLINE is set: go online" in said()


def test_of_files_that_are_models_others_may_be_cached(
    cache: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    lay(cache, "org/single", {A: {"m-Q8_0.gguf": b"eight"}})
    assert main(["pull", "org/single:q4_0"]) == 2
    assert "it is not wholly in the cache, which lacks q4_0, and HF_HUB_OFFLINE is set: go online" in said()


def test_what_is_no_model_of_the_hub_is_not_downloaded(cache: Path, checkpoints: Path, said: Said) -> None:
    assert main(["pull", str(checkpoints / "org/plain")]) == 0
    assert "It is no model of the hub's cache, so there is nothing to download." in said()
    assert not cache.exists()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "full"), RuntimeError("x: No space left on device")]
)
def test_a_full_disk(error: Exception, hub: Hub, cache: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    def http_get(*given: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(file_download, "http_get", http_get)
    assert main(["pull", "org/plain"]) == 2
    out = said()
    assert f"org/plain cannot be downloaded: {cache} has no room for it." in out
    assert "infer rm removes it), or set HF_HOME to a folder on another disk" in out


def test_it_says_what_would_not_be_served(
    cache: Path, checkpoints: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    lay(cache, "org/odd", {A: read(checkpoints / "org/plain") | {"config.json": b'{"architectures": ["Unheard"]}'}})
    assert main(["pull", "org/odd"]) == 0
    out = said()
    assert "It would not be served: " in out
    assert "Unheard" in out
    lay(cache, "org/plain", {A: read(checkpoints / "org/plain")})
    monkeypatch.setattr(cached, "free", lambda settings: 1 << 28)
    assert main(["pull", "org/plain"]) == 0
    assert "of which 256.0 MiB are free: it does not fit, and `infer doctor org/plain` says what would." in said()


# infer models --cached


def listed(said: Said) -> dict[str, dict[str, Any]]:
    said()
    assert main(["models", "--cached", "--json"]) == 0
    return {each["name"]: each for each in json.loads(said())}


def test_each_model_is_listed_with_its_size_and_whether_it_loads(cache: Path, checkpoints: Path, said: Said) -> None:
    plain, single = read(checkpoints / "org/plain"), read(checkpoints / "org/single")
    del single["mmproj-Q8_0.gguf"]
    lay(cache, "org/plain", {A: plain, B: plain | {"config.json": b"old"}})
    lay(cache, "org/single", {A: single})
    lay(cache, "org/lacks", {A: {name: content for name, content in plain.items() if name != "model.safetensors"}})
    lay(cache, "org/odd", {A: plain | {"config.json": b'{"architectures": ["Unheard"]}'}})
    shutil.rmtree(lay(cache, "org/begun", {A: {"config.json": b"{}"}}) / "snapshots")
    lay(cache, "org/tagged", {A: plain})
    (cache / "models--org--tagged/refs/main").rename(cache / "models--org--tagged/refs/v1")
    (cache / "datasets--org--data/snapshots").mkdir(parents=True)
    found = listed(said)
    assert [*found] == sorted(found)
    assert {name for name, each in found.items() if each["loads"]} == {
        *("org/plain", "org/single/m-Q4_0.gguf", "org/single/m-Q8_0.gguf", "org/tagged")
    }
    assert {*found} - {name for name, each in found.items() if each["loads"]} == {"org/begun", "org/lacks", "org/odd"}
    assert found["org/plain"]["size_bytes"] == sum(map(len, plain.values())) + len(b"old")
    assert found["org/single/m-Q4_0.gguf"]["size_bytes"] == len(single["m-Q4_0.gguf"])
    assert found["org/lacks"]["problem"].startswith("org/lacks has ")
    assert "Unheard" in found["org/odd"]["problem"]
    assert (found["org/plain"]["revision"], found["org/tagged"]["revision"]) == (None, "v1")
    assert main(["models", "--cached"]) == 0
    heading, *rows = said().splitlines()
    assert heading.split() == ["name", "size", "last", "used", "loads"]
    assert [row.split()[0] for row in rows] == [*found]
    assert any(row.endswith("yes    with --model.revision v1") for row in rows)


def test_to_look_is_no_use(cache: Path, checkpoints: Path, said: Said) -> None:
    place = lay(cache, "org/plain", {A: read(checkpoints / "org/plain")})
    for blob in (place / "blobs").iterdir():
        os.utime(blob, (LONG_AGO, LONG_AGO + 1))  # so old that any read would be noted
    for _ in range(2):
        assert listed(said)["org/plain"]["last_used"] == LONG_AGO
    assert {blob.stat().st_mtime for blob in (place / "blobs").iterdir()} == {LONG_AGO + 1}


def test_to_look_leaves_packed_weights_as_good(
    cache: Path, checkpoints: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They know their checkpoint by the dates of its files of weights, too."""
    monkeypatch.setattr(identity, "_samples", lambda path, number: ())  # which would be a read before
    single = {"m-Q4_0.gguf": read(checkpoints / "org/single")["m-Q4_0.gguf"]}
    plain = lay(cache, "org/plain", {A: read(checkpoints / "org/plain")}) / "snapshots" / A
    file = lay(cache, "org/single", {A: single}) / "snapshots" / A / "m-Q4_0.gguf"
    for blob in cache.glob("*/blobs/*"):
        os.utime(blob, (LONG_AGO, LONG_AGO))
    before = identity.stamp(plain), identity.stamp(file)
    assert listed(said).keys() == {"org/plain", "org/single/m-Q4_0.gguf"}
    assert (identity.stamp(plain), identity.stamp(file)) == before


def test_an_empty_cache(cache: Path, said: Said) -> None:
    assert main(["models", "--cached"]) == 0
    assert said() == f"The hub's cache {cache} has no models.\n"
    assert main(["models", "--cached", "--json"]) == 0
    assert said() == "[]\n"
    assert main(["rm", "org/any", "--yes"]) == 2
    assert f"'org/any' is not in the hub's cache {cache}. `infer models --cached` lists" in said()
    cache.write_text("a file")
    assert main(["models", "--cached"]) == 2
    assert "cannot be read" in said()


# infer rm


def test_a_whole_repository_is_removed_and_no_other(cache: Path, said: Said) -> None:
    """Also where another has the same commits, as a copy has."""
    content = {A: {"config.json": b"{}", "model.safetensors": b"1234"}, B: {"config.json": b"[]"}}
    places = {id: lay(cache, id, content) for id in ("org/one", "org/two", "org/three", "gpt")}
    assert main(["rm", "org/two", "--yes"]) == 0
    assert said() == f"org/two: removed, 0.0 MiB of {cache}.\n"
    assert {id for id, place in places.items() if place.exists()} == {"org/one", "org/three", "gpt"}
    assert main(["rm", "org/one", "org/three", "gpt", "--yes"]) == 0
    assert not [*cache.glob("models--*")]


def test_one_file_goes_with_what_no_other_name_links_to(cache: Path) -> None:
    place = lay(
        cache,
        "org/g",
        {
            A: {"m-Q4_0.gguf": b"four", "m-Q8_0.gguf": b"eight", "same-Q6_K.gguf": b"six", "README.md": b"text"},
            B: {"m-Q4_0.gguf": b"old four", "again-Q6_K.gguf": b"six", "m-Q8_0.gguf": b"eight"},
        },
    )
    assert main(["rm", "org/g:q4_0", "--yes"]) == 0
    assert files(place) == {
        *(f"{A}/m-Q8_0.gguf", f"{A}/same-Q6_K.gguf", f"{A}/README.md"),
        *(f"{B}/again-Q6_K.gguf", f"{B}/m-Q8_0.gguf"),
    }
    assert blobs(place) == {b"eight", b"six", b"text"}
    assert main(["rm", "org/g/same-Q6_K.gguf", "--yes"]) == 0
    assert blobs(place) == {b"eight", b"six", b"text"}, "another name links to it"
    assert main(["rm", "org/g/again-Q6_K.gguf", "org/g:Q8_0", "--yes"]) == 0
    assert files(place) == {f"{A}/README.md"}
    assert blobs(place) == {b"text"}


def test_the_last_file_takes_the_repository_with_it(cache: Path) -> None:
    place = lay(cache, "org/g", {A: {"m-Q4_0.gguf": b"four", "m-Q8_0.gguf": b"eight"}})
    assert main(["rm", "org/g:q4_0", "org/g:q8_0", "--yes"]) == 0
    assert not place.exists()


def test_the_parts_of_a_file_go_together(cache: Path, said: Said) -> None:
    names = [f"m-Q8_0-0000{part}-of-00002.gguf" for part in (1, 2)]
    place = lay(cache, "org/g", {A: {name: name.encode() for name in names} | {"m-Q4_0.gguf": b"four"}})
    assert [*listed(said)] == ["org/g/m-Q4_0.gguf", f"org/g/{names[0]}"]
    assert main(["rm", f"org/g/{names[0]}", "--yes"]) == 0
    assert files(place) == {f"{A}/m-Q4_0.gguf"}


def test_what_was_begun_or_is_damaged_is_removed(cache: Path, said: Said) -> None:
    place = lay(cache, "org/begun", {A: {"config.json": b"{}"}})
    shutil.rmtree(place / "snapshots")
    assert main(["rm", "org/begun:q4_0", "--yes"]) == 2
    assert "infer rm org/begun removes the whole of it" in said()
    assert main(["rm", "org/begun", "--yes"]) == 0
    assert not place.exists()


def test_it_asks_before(cache: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    place = lay(cache, "org/g", {A: {"m-Q4_0.gguf": b"4" * 2**20, "m-Q8_0.gguf": b"eight"}})
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    assert main(["rm", "org/g:q4_0"]) == 2
    assert "There is no terminal to ask whether org/g/m-Q4_0.gguf may be removed; add --yes." in said()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    asked: list[str] = []
    answers = iter(("", "no", None, "Y"))

    def answer(text: str) -> str:
        asked.append(text)
        if (said := next(answers)) is None:
            raise EOFError  # Ctrl-D
        return said

    monkeypatch.setattr("builtins.input", answer)
    for code in (1, 1, 1, 0):
        assert len(blobs(place)) == 2
        assert main(["rm", "org/g:q4_0"]) == code
    assert asked == [f"Remove org/g/m-Q4_0.gguf (1.0 MiB) from {cache}? [y/N] "] * 4
    assert len(blobs(place)) == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/smal", "'org/smal' is not in the hub's cache {cache}. Did you mean 'org/small'?"),
        ("SMALL", "Did you mean 'org/small'?"),
        ("../models--org--small", "is not in the hub's cache"),
        ("org/g:Q2_K", "'org/g:Q2_K' is not in the hub's cache {cache}. `infer models --cached` lists"),
        ("org/g:Q4_0", "'org/g:Q4_0' may be any of org/g/a-Q4_0.gguf, org/g/b-Q4_0.gguf; say which."),
        ("org/g/config.json", "is not in the hub's cache"),
    ],
)
def test_names_that_mean_nothing_remove_nothing(name: str, says: str, cache: Path, said: Said) -> None:
    lay(cache, "org/small", {A: {"config.json": b"{}"}})
    lay(cache, "org/g", {A: {"a-Q4_0.gguf": b"a", "b-Q4_0.gguf": b"b"}})
    assert main(["rm", "org/small", name, "--yes"]) == 2
    assert says.format(cache=cache) in said()
    assert len([*cache.rglob("*.*")]) == 3


def test_nothing_outside_the_cache_is_removed(cache: Path, tmp_path: Path, said: Said) -> None:
    """Though links in it lead there."""
    outside = tmp_path / "outside.gguf"
    outside.write_bytes(b"mine")
    place = lay(cache, "org/g", {A: {"m-Q4_0.gguf": b"four"}})
    (place / f"snapshots/{A}/m-Q8_0.gguf").symlink_to(outside)
    assert main(["rm", "org/g:q8_0", "--yes"]) == 2
    assert f"org/g leads by a link to {outside}, outside the hub's cache {cache}, where nothing is removed" in said()
    moved = place.rename(tmp_path / "moved")
    place.symlink_to(moved)
    assert main(["rm", "org/g", "--yes"]) == 2
    assert f"org/g leads by a link to {moved}, outside" in said()
    assert blobs(moved) == {b"four"}
    place.unlink()
    moved.rename(place)
    assert main(["rm", "org/g", "--yes"]) == 0
    assert not place.exists()
    assert outside.read_bytes() == b"mine"


def test_a_cache_behind_a_link_is_the_cache(cache: Path, tmp_path: Path) -> None:
    lay(tmp_path / "disk", "org/small", {A: {"config.json": b"{}"}})
    cache.symlink_to(tmp_path / "disk")
    assert main(["rm", "org/small", "--yes"]) == 0
    assert not [*cache.glob("models--*")]


def test_what_cannot_be_removed_is_said(cache: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library only logs it."""
    place = lay(cache, "org/small", {A: {"config.json": b"{}"}})
    monkeypatch.setattr(huggingface_hub.DeleteCacheStrategy, "execute", lambda self: None)
    assert main(["rm", "org/small", "--yes"]) == 2
    assert f"{place} cannot be removed" in said()


@pytest.mark.parametrize(
    ("entry", "name", "refused"),
    [
        ({"id": "org/g:q4_0"}, "org/g", True),
        ({"id": "org/g:q4_0"}, "org/g:q4_0", True),
        ({"id": "org/g/m-Q4_0.gguf", "state": "loaded"}, "org/g:q4_0", True),
        ({"id": "org/g:q4_0", "state": "loaded"}, "org/g:q8_0", False),
        ({"id": "org/g:q4_0", "state": "unloaded"}, "org/g:q4_0", False),
        ({"id": "short", "state": "loading"}, "org/g:q4_0", True),
        ({"id": "other", "state": "loaded"}, "org/g:q4_0", False),
    ],
)
def test_what_is_being_served_stays(
    entry: dict[str, Any], name: str, refused: bool, cache: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = lay(cache, "org/g", {A: {"m-Q4_0.gguf": b"four", "m-Q8_0.gguf": b"eight"}})
    Path("settings.toml").write_text('[models.short.model]\npath = "org/g/m-Q4_0.gguf"\n')
    monkeypatch.setattr(cached, "served", lambda context: ("http://here/v1/models", [entry]))
    assert main(["rm", name, "--yes"]) == 2 * refused
    assert (f"{entry['id']!r} is being served by http://here" in said()) == refused
    assert (len(blobs(place)) == 2) == refused


def test_a_server_that_does_not_say_is_mentioned(cache: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(cache, "org/small", {A: {"config.json": b"{}"}})

    def served(context: object) -> Any:
        raise InferError("The server answers 401.")

    monkeypatch.setattr(cached, "served", served)
    assert main(["rm", "org/small", "--yes"]) == 0
    assert "It is not known whether a server has loaded one of them. The server answers 401." in said()
