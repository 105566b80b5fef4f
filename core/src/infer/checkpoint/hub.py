"""Checkpoints from the Hugging Face hub, downloaded or found in its cache."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.checkpoint.files import INDEX, SINGLE, names_file, shards
from infer.errors import CheckpointError, installing

if TYPE_CHECKING:
    from huggingface_hub.utils._safetensors import SafetensorsFileMetadata

BUNDLED = {"demo": "infer-demo"}
"""Bundled checkpoints, and the distributions of ours that contain them."""
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+)|/((?:[\w+-][\w.+-]*/)*[\w+-][\w.+-]*))?")
FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a disk that has no room, or of a user who may not take more of it."""


@dataclass(frozen=True)
class HubName:
    """What a name stands for on the hub: a repository, or one file of it."""

    id: str
    file: str | None
    """The file's name within the repository, as ``org/name/FILE`` gives it."""
    tag: str | None
    """The end of the file's name, as ``org/name:TAG`` gives it."""
    wanted: Sequence[str]
    """Patterns of the files that are read."""
    unwanted: Sequence[str]
    """Patterns of those among them that are not."""

    @property
    def one_file(self) -> bool:
        return bool(self.file or self.tag)

    def among(self, names: Iterable[str]) -> list[str]:
        """Those of a repository's files that are meant."""
        return [name for name in names if _matches(name, self.wanted) and not _matches(name, self.unwanted)]


def hub_name(path: str, suffixes: Sequence[str], tokenizers: Sequence[str] = ()) -> HubName | None:
    """What ``path`` stands for: ``org/name``, or one file of it, which ends in one of the ``suffixes``.
    ``org/name/FILE`` gives the file's name, and ``org/name:TAG`` the end of its name, in capital or small letters, as
    in name-Q4_K_M.gguf. ``tokenizers`` are the names of further files that are read of ``org/name``. None if it cannot
    be a hub id."""
    match = _HUB_ID.fullmatch(path)
    if match is None or (match[3] and not match[3].lower().endswith(tuple(suffixes))):
        return None
    id, tag, file = match.groups()
    # The weights lie at the top level; subfolders and "consolidated" files hold the same ones in other formats.
    # 1_Pooling/config.json says what an embedding is made of, and additional_chat_templates has chat templates.
    wanted = ["*.safetensors", "*.json", "*.jinja", *tokenizers]
    unwanted = ["[!1a]*/*", "[1a]*/*.safetensors", "a*/*.json", "consolidated*"]
    if file:
        wanted, unwanted = [file], []
    elif tag:
        tags = dict.fromkeys((tag, tag.upper(), tag.lower()))
        wanted = [f"{start}{tag}{suffix}" for suffix in suffixes for tag in tags for start in ("", "*[-._/]")]
        unwanted = ["*mmproj*"]  # vision towers
    return HubName(id, file, tag, wanted, unwanted)


def download(
    path: str,
    bundled: Mapping[str, Path],
    suffixes: Sequence[str],
    tokenizers: Sequence[str],
    revision: str | None,
    outlines: Path | None = None,
) -> Path:
    """What the hub id ``path`` leads to in the hub's cache, downloaded if necessary: the folder of ``org/name``, or one
    file of it (``hub_name``). With ``outlines``, a folder, the cache stays as it is: what it lacks is laid in that
    folder with weights that are all zero, of which no value is downloaded. Raises CheckpointError."""
    names = f" ({', '.join(sorted(bundled))})" if bundled else ""
    tried = f"{path!r} is neither a folder or file nor a bundled name{names}"
    if package := BUNDLED.get(path):
        raise CheckpointError(
            f"{path!r} is the checkpoint of {package}, which is not installed: {installing(package)}."
        )
    name = hub_name(path, suffixes, tokenizers)
    if name is None:
        raise CheckpointError(
            f"{tried}, and it cannot be a hub id, which reads org/name, org/name:TAG or org/name/FILE."
        )
    id = name.id
    if name.tag and not suffixes:
        raise CheckpointError(
            f"{path!r} is a file of {id}, which no installed plugin reads: {installing('infer-formats')}."
        )
    import huggingface_hub  # imported late: it takes long, and local folders do not need it
    from huggingface_hub import constants, errors

    where = id if revision is None else f"{id} at revision {revision}"

    def fetched(**options: Any) -> Path:
        patterns = {"allow_patterns": name.wanted, "ignore_patterns": name.unwanted}
        return Path(huggingface_hub.snapshot_download(id, revision=revision, **patterns | options))

    lacking: str | None = None
    offline = constants.HF_HUB_OFFLINE
    try:
        try:
            folder = fetched(local_files_only=outlines is not None)
            if offline or outlines is not None:  # otherwise, what is not there is not on the hub either
                lacking = _lacking(folder, name, suffixes)
            if lacking:
                raise errors.LocalEntryNotFoundError(lacking)
        except errors.LocalEntryNotFoundError:
            if outlines is None:
                raise
            if name.one_file:
                raise CheckpointError(
                    f"{path!r} is not in the hub's cache, and only safetensors are looked into before they are "
                    f"downloaded: run infer pull {path} first."
                ) from None
            folder = fetched(local_dir=outlines / id, allow_patterns=name.wanted[1:])
            if (folder / "config.json").exists():
                for file, metadata in (
                    huggingface_hub.HfApi().get_safetensors_metadata(id, revision=revision).files_metadata.items()
                ):
                    _outline(folder, file, metadata)
    except CheckpointError:
        raise
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{id} is gated: accept its terms at https://huggingface.co/{id} and set HF_TOKEN."
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise CheckpointError(f"{tried}, and the hub has no {where} that this HF_TOKEN may read.") from error
    except errors.LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        but = f", which lacks {lacking}," if lacking else ""
        raise CheckpointError(
            f"{tried}, and as a hub id it is not wholly in the cache{but} and {why}: go online, or run hf download "
            f"{id} where that can be done and give the folder of what it downloads."
        ) from error
    except errors.NotASafetensorsRepoError as error:
        raise CheckpointError(
            f"The hub's {where} has no model.safetensors and no model.safetensors.index.json, and infer reads "
            "safetensors only."
        ) from error
    except Exception as error:  # whatever the network, the disk or a proxy may answer
        # Where the library is not Python, an error is its text alone.
        if outlines is None and (getattr(error, "errno", None) in FULL or os.strerror(errno.ENOSPC) in str(error)):
            raise CheckpointError(
                f"{where} cannot be downloaded: {constants.HF_HUB_CACHE} has no room for it. Make "
                "room (infer models --cached lists what is there, infer rm removes it), or set HF_HOME to a folder on "
                "another disk, and try again: files that are whole already are kept."
            ) from error
        raise CheckpointError(f"{where} cannot be downloaded: {' '.join(str(error).split())}") from error
    if not name.one_file:
        if folder.is_dir() and not (folder / "config.json").exists():
            raise CheckpointError(
                f"The hub's {where} has no config.json, so it is not a checkpoint; if it holds GGUF files, add the "
                f"name of one to model.path, as in {id}:Q4_K_M or {id}/FILE.gguf."
            )
        return folder
    found = name.among(_files(folder))
    if len(found) != 1:
        what = f"has several files of that kind ({', '.join(found)})" if found else "has no such file"
        raise CheckpointError(
            f"{path!r}: the hub's {where} {what}; give the name of one, as in {id}/FILE{suffixes[0]}."
        )
    return folder / found[0]


def _files(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def _lacking(folder: Path, name: HubName, suffixes: Sequence[str]) -> str | None:
    """A file that a folder of the hub's cache lacks of what is meant, as after a download that was cut off; None if it
    has all, as far as its own files tell. Raises CheckpointError."""
    if name.one_file:
        return None if name.among(_files(folder)) else name.file or name.tag
    needed = ["config.json"]
    if not any(file.name.lower().endswith(tuple(suffixes)) for file in folder.iterdir()):  # which would be the weights
        needed += shards(folder) if (folder / INDEX).exists() else [SINGLE]
    return next((each for each in needed if not (folder / each).exists()), None)


def _outline(folder: Path, name: str, metadata: SafetensorsFileMetadata) -> None:
    """Lay a file of tensors of zeros in a folder; it takes no room on the disk. Raises CheckpointError and OSError."""
    if not names_file(name):
        raise CheckpointError(f"The hub's index of tensors has {name!r}, which is not a file's name.")
    tensors: dict[str, Any] = {
        each: {"dtype": about.dtype, "shape": about.shape, "data_offsets": about.data_offsets}
        for each, about in metadata.tensors.items()
    }
    header = json.dumps(tensors).encode()
    with (folder / name).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + max((about.data_offsets[1] for about in metadata.tensors.values()), default=0))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
