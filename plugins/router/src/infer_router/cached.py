"""``infer pull``, ``infer rm`` and ``infer models --cached``: the models in the hub's cache."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.contracts.command import CommandContext
from infer.errors import CheckpointError, InferError, SettingsError, in_short, one_line
from infer_router.command import columns, served
from infer_router.sizes import PROCESS_BYTES, free, told
from infer_server.http.fetching import NoServerError

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, DeleteCacheStrategy, HFCacheInfo

MAIN, CONFIG = "main", "config.json"
FOLDERS = "models--"
"""How the names of models' folders in the cache begin."""
MAX_PROBLEM = 200
"""The most characters of a sentence about a model in a table."""


@dataclass(frozen=True)
class Cached:
    """What can be given as ``--model``, or could if nothing were wrong with it."""

    name: str
    size_bytes: int
    """Of all its files, at all revisions that are there."""
    last_used: float | None
    """When one of its files was last read, as far as the system notes that, in seconds since 1970. Of a repository, its
    weights are left out; of a file that is a model by itself, to list it counts."""
    revision: str | None
    """What ``model.revision`` has to be; None for main."""
    path: str
    problem: str | None
    """Why it cannot be loaded."""


class Cache:
    """The hub's cache, as the hub's library finds it. Raises InferError if it cannot be read."""

    def __init__(self, context: CommandContext) -> None:
        import huggingface_hub  # imported late: it takes long, and other commands do not need it
        from huggingface_hub import constants, errors

        self.context = context
        self.folder = Path(constants.HF_HUB_CACHE)
        offers = context.plugins.offers["container"]
        self.suffixes = [each for offer in offers for each in offer.registration.suffixes if each.startswith(".")]
        """The endings of files that are checkpoints by themselves."""
        self.info: HFCacheInfo | None = None
        """None if nothing has been downloaded yet."""
        self.damaged: dict[str, Path] = {}
        """Repositories of which no revision is whole enough for the library, as after a download that was cut off."""
        try:
            self.info = huggingface_hub.scan_cache_dir(self.folder)
        except errors.CacheNotFound:
            self.repos: dict[str, CachedRepoInfo] = {}
            return
        except (OSError, ValueError) as error:
            raise InferError(
                f"The hub's cache {self.folder} cannot be read ({one_line(error)}); HF_HOME says where it is."
            ) from error
        self.repos = {each.repo_id: each for each in self.info.repos if each.repo_type == "model" and each.revisions}
        read = {repo.repo_path for repo in self.repos.values()}
        for place in sorted(self.folder.glob(f"{FOLDERS}*")):
            if place not in read:
                self.damaged[place.name.removeprefix(FOLDERS).replace("--", "/")] = place

    def models(self) -> list[Cached]:
        """All of them, by name."""
        found = [model for repo in self.repos.values() for model in self._models(repo)]
        for name, place in self.damaged.items():
            size = sum(file.lstat().st_size for file in place.rglob("*") if file.is_file())
            found.append(Cached(name, size, None, None, str(place), "its download was cut off, or it is damaged"))
        return sorted(found, key=lambda each: each.name)

    def _models(self, repo: CachedRepoInfo) -> Iterator[Cached]:
        """The models of a repository: each file that is one by itself, and what the rest makes up."""
        files = by_name(repo)
        single = self.single(files)
        for first, names in single.items():
            yield self._model(repo, first, [each for name in names for each in files[name]])
        rest = files.keys() - {name for names in single.values() for name in names}
        if CONFIG in rest or not single:
            yield self._model(repo, None, [each for name in rest for each in files[name]])

    def _model(self, repo: CachedRepoInfo, file: str | None, files: Collection[CachedFileInfo]) -> Cached:
        """The model that one ``file``, or else the repository, is. Its ``files`` are those of all revisions."""
        holding = [each for each in repo.revisions if (each.snapshot_path / (file or CONFIG)).exists()]
        newest = max(holding or repo.revisions, key=lambda each: (MAIN in each.refs, each.last_modified))
        revision = None if MAIN in newest.refs else min(newest.refs, default=newest.commit_hash)
        name = repo.repo_id if file is None else f"{repo.repo_id}/{file}"
        place = newest.snapshot_path / (file or "")
        # To set a date of weights back is to change another one, by which packed weights tell that they are the same.
        small = [each for each in files if file is None and each.file_path.suffix != ".safetensors"]
        with untouched(small):
            problem = self._problem(place)
        return Cached(
            name,
            sum({each.blob_path: each.size_on_disk for each in files}.values()),
            max((each.blob_last_accessed for each in small or files), default=None),
            revision,
            str(place),
            problem and problem.replace(str(place), name),
        )

    def _problem(self, place: Path) -> str | None:
        """Why a checkpoint cannot be loaded, as far as that shows without its weights' values."""
        from infer.assemble.blueprint import Blueprint

        settings = self.context.settings
        own = {"path": str(place), "revision": None, "family": "auto", "tokenizer": None, "load_format": "auto"}
        model = settings.model.model_copy(update=own)
        try:
            blueprint = Blueprint(settings.model_copy(update={"model": model}), self.context.plugins)
            blueprint.weights.sketch(blueprint.context)
        except InferError as error:
            return str(error)
        return None

    def single(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Those of a repository's files that are checkpoints by themselves, by the first part of each."""
        from infer.checkpoint.locate import PART

        groups = defaultdict[str, list[str]](list)
        for name in sorted(names):
            if name.lower().endswith(tuple(self.suffixes)):
                groups[PART.sub(r"\1\2", name)].append(name)
        return {group[0]: group for group in groups.values()}

    # What is removed

    def meant(self, name: str) -> tuple[str, list[str]]:
        """The repository that a user calls so, and those of its files that are models by themselves and meant; none
        for the whole repository. Raises InferError."""
        from infer.checkpoint.hub import hub_name

        if name in (*self.repos, *self.damaged):  # also without an organization, as other programs download them
            return name, []
        found = hub_name(name, self.suffixes)
        if found is None or found.id not in (*self.repos, *self.damaged):
            raise self._unknown(name)
        if not found.one_file:
            return found.id, []
        if found.id in self.damaged:
            raise InferError(f"{found.id} is damaged; infer rm {found.id} removes the whole of it.")
        groups = self.single(by_name(self.repos[found.id]))
        chosen = [group for group in groups.values() if found.among(group)]
        if not chosen:
            raise self._unknown(name)
        if len(chosen) > 1:
            names = ", ".join(f"{found.id}/{group[0]}" for group in chosen)
            raise InferError(f"{name!r} may be any of {names}; say which.")
        return found.id, chosen[0]

    def _unknown(self, name: str) -> InferError:
        return InferError(
            f"{name!r} is not in the hub's cache {self.folder}.{self.advice(name)} `infer models --cached` lists what "
            "is there."
        )

    def advice(self, name: str) -> str:
        """The name in the cache that a user may have meant, as a sentence after a space; empty if there is none, or if
        the cache has files of that repository."""
        names = {*self.repos, *self.damaged}
        if name.partition(":")[0] in names:
            return ""
        known = {each.lower().rpartition("/")[2]: each for each in sorted(names)}
        known |= {each.lower(): each for each in sorted(names)}
        close = difflib.get_close_matches(name.lower(), known, n=1)
        return f" Did you mean {known[close[0]]!r}?" if close else ""

    def removal(self, id: str, names: Collection[str]) -> DeleteCacheStrategy:
        """What removes these files of a repository at all its revisions, or the whole of it if there are none.
        Raises InferError if anything of that lies outside the cache."""
        from huggingface_hub import DeleteCacheStrategy

        assert self.info is not None
        if id in self.damaged:
            place = self.damaged[id]
            size = sum(file.lstat().st_size for file in place.rglob("*") if file.is_file())
            none = frozenset[Path]()
            plan = DeleteCacheStrategy(size, none, none, frozenset({place}), none, cache_dir=self.info.cache_dir)
        else:
            repo = self.repos[id]
            files = by_name(repo)
            if names and files.keys() > {*names}:
                plan = self.info.delete_files(*(each for name in names for each in files[name]))
            else:
                # A copy of a repository has the same commits, and of two the library takes either.
                alone = replace(self.info, repos=frozenset({repo}))
                plan = alone.delete_revisions(*(each.commit_hash for each in repo.revisions))
        root = self.folder.resolve()
        for path in touched(plan):
            inside = (path.parent.resolve() / path.name).is_relative_to(root)
            if not inside or (path in plan.repos and path.is_symlink()):
                raise InferError(
                    f"{id} leads by a link to {path.resolve()}, outside the hub's cache {self.folder}, where nothing "
                    f"is removed: remove that, and {path} if it is left, by hand."
                )
        return plan


def by_name(repo: CachedRepoInfo) -> dict[str, list[CachedFileInfo]]:
    """The files of all revisions of a repository, by their names within it."""
    found = defaultdict[str, list["CachedFileInfo"]](list)
    for revision in repo.revisions:
        for file in revision.files:
            found[file.file_path.relative_to(revision.snapshot_path).as_posix()].append(file)
    return dict(found)


def touched(plan: DeleteCacheStrategy) -> list[Path]:
    return [*plan.files, *plan.repos, *plan.snapshots, *plan.refs, *plan.blobs]


@contextmanager
def quiet(context: CommandContext) -> Iterator[None]:
    """Until the context ends, the log leaves out why which plugin is chosen, unless ``log.level`` has been set."""
    root = logging.getLogger()
    before = root.level
    if context.sources["log.level"] == "default":
        root.setLevel(max(before, logging.WARNING))
    try:
        yield
    finally:
        root.setLevel(before)


@contextmanager
def untouched(files: Iterable[CachedFileInfo]) -> Iterator[None]:
    """Reading the files is no use of them: when the context ends, the system notes the same of them as before."""
    before = {file.blob_path: file.blob_path.stat() for file in files}
    try:
        yield
    finally:
        for path, was in before.items():
            if path.stat().st_atime_ns != was.st_atime_ns and os.access(path, os.W_OK):
                os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def show(args: argparse.Namespace, context: CommandContext) -> int:
    """Print what is in the hub's cache. Raises InferError if it cannot be read."""
    cache = Cache(context)
    with quiet(context):
        models = cache.models()
    if args.json:
        print(json.dumps([asdict(model) | {"loads": model.problem is None} for model in models], indent=2))
        return 0
    if not models:
        print(f"The hub's cache {cache.folder} has no models.")
        return 0
    rows = [("name", "size", "last used", "loads", "")]
    for each in models:
        used = "" if each.last_used is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(each.last_used))
        more = "" if each.revision is None else f"with --model.revision {each.revision}"
        text = more if each.problem is None else in_short(each.problem, MAX_PROBLEM)
        rows.append((each.name, gib(each.size_bytes), used, "no" if each.problem else "yes", text))
    print(columns(rows))
    return 0


def pull(args: argparse.Namespace, context: CommandContext) -> int:
    """Download what ``model.path`` names into the hub's cache, and say whether it would fit. Raises InferError."""
    with quiet(context):
        return _pull(context)


def _pull(context: CommandContext) -> int:
    from huggingface_hub import constants

    from infer.assemble.blueprint import Blueprint

    path, blueprint = context.settings.model.path, Blueprint(context.settings, context.plugins)
    try:
        checkpoint = blueprint.checkpoint
    except CheckpointError as error:
        raise CheckpointError(f"{error}{'' if path is None else Cache(context).advice(path)}") from error
    print(f"{path}: {gib(checkpoint.nbytes)} of weights in {checkpoint.path}")
    if not checkpoint.path.absolute().is_relative_to(Path(constants.HF_HUB_CACHE).resolve()):
        print("It is no model of the hub's cache, so there is nothing to download.")
    elif constants.HF_HUB_OFFLINE:
        print("HF_HUB_OFFLINE is set, so the hub has not been asked for a newer one.")
    memory = free(context.settings)
    try:
        about = told(blueprint, max(0, memory - PROCESS_BYTES))
    except InferError as error:
        print(f"It would not be served: {error}")
        return 0
    takes = f"It takes {gib(about['bytes'])} of memory, of which {gib(memory)} are free"
    if about["bytes"] > memory:
        print(f"{takes}: it does not fit, and `infer doctor {path}` says what would.")
    else:
        print(
            f"{takes}; {gib(about['weights_bytes'])} are weights. A sequence may have {about['max_model_len']} tokens."
        )
    return 0


def remove(args: argparse.Namespace, context: CommandContext) -> int:
    """Remove models from the hub's cache, after a question unless ``args.yes``. Returns 1 if the answer is no. Raises
    InferError."""
    cache = Cache(context)
    chosen: dict[str, set[str]] = {}
    whole = set[str]()
    for name in args.names:
        id, names = cache.meant(name)
        chosen.setdefault(id, set()).update(names)
        if not names:
            whole.add(id)
    chosen |= {id: set() for id in whole}
    _check_served(cache, chosen)
    plans = [cache.removal(id, names) for id, names in chosen.items()]
    size = gib(sum(plan.expected_freed_size for plan in plans))
    what = ", ".join(each for id, names in chosen.items() for each in sorted(f"{id}/{name}" for name in names) or [id])
    if not args.yes:
        if not sys.stdin.isatty():
            raise SettingsError(f"There is no terminal to ask whether {what} may be removed; add --yes.")
        try:
            answer = input(f"Remove {what} ({size}) from {cache.folder}? [y/N] ")
        except EOFError:
            answer = ""
            print()
        if answer.strip().lower() not in ("y", "yes"):
            print("Nothing is removed.")
            return 1
    for plan in plans:
        try:
            plan.execute()
        except OSError as error:
            raise InferError(f"{error.filename or cache.folder} cannot be removed: {error.strerror}.") from error
        if left := [path for path in touched(plan) if os.path.lexists(path)]:  # the library logs why, and goes on
            raise InferError(f"{left[0]} cannot be removed; whose it is, and the log, may say why.")
    print(f"{what}: removed, {size} of {cache.folder}.")
    return 0


def _check_served(cache: Cache, chosen: Mapping[str, Collection[str]]) -> None:
    """Raise InferError if a server has loaded one of these. The one at ``server.host`` and ``server.port`` is asked;
    the names of its models are those of tables ``[models.NAME]``, or else what they were loaded by."""
    from infer.checkpoint.hub import hub_name

    try:
        url, models = served(cache.context)
    except NoServerError:
        return
    except InferError as error:
        print(f"infer: It is not known whether a server has loaded one of them. {error}", file=sys.stderr)
        return
    tables: Mapping[str, Any] = cache.context.settings.models
    for model in models:
        table = tables.get(model["id"], {}).get("model", {})
        used = hub_name(str(table.get("path", model["id"])), cache.suffixes)
        if used is None or used.id not in chosen or model.get("state") in ("unloaded", "failed"):
            continue
        names = chosen[used.id]
        if not names or (used.one_file and used.among(names)):
            raise InferError(
                f"{model['id']!r} is being served by {url}: end that server, or let the model go (keep_alive = 0), and "
                "then remove it."
            )


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**29 else f"{nbytes / 2**20:.1f} MiB"
