"""Checkpoints from the Hugging Face hub, downloaded or found in its cache."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.checkpoint.files import names_file
from infer.errors import CheckpointError, installing

if TYPE_CHECKING:
    from huggingface_hub.utils._safetensors import SafetensorsFileMetadata

BUNDLED = {"demo": "infer-demo"}
"""Bundled checkpoints, and the distributions of ours that contain them."""
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+)|/((?:[\w+-][\w.+-]*/)*[\w+-][\w.+-]*))?")


def download(
    path: str,
    bundled: Mapping[str, Path],
    suffixes: Sequence[str],
    revision: str | None,
    outlines: Path | None = None,
) -> Path:
    """What the hub id ``path`` leads to in the hub's cache, downloaded if necessary: the folder of ``org/name``, or one
    file of it, which ends in one of the ``suffixes``. ``org/name/FILE`` gives the file's name, and ``org/name:TAG`` the
    end of its name, in capital or small letters, as in name-Q4_K_M.gguf. With ``outlines``, a folder, the cache stays
    as it is: what it lacks is laid in that folder with weights that are all zero, of which no value is downloaded.
    Raises CheckpointError."""
    names = f" ({', '.join(sorted(bundled))})" if bundled else ""
    tried = f"{path!r} is neither a folder or file nor a bundled name{names}"
    if package := BUNDLED.get(path):
        raise CheckpointError(
            f"{path!r} is the checkpoint of {package}, which is not installed: {installing(package)}."
        )
    match = _HUB_ID.fullmatch(path)
    if match is None or (match[3] and not match[3].lower().endswith(tuple(suffixes))):
        raise CheckpointError(
            f"{tried}, and it cannot be a hub id, which reads org/name, org/name:TAG or org/name/FILE."
        )
    id, tag, file = match.groups()
    if tag and not suffixes:
        raise CheckpointError(
            f"{path!r} is a file of {id}, which no installed plugin reads: {installing('infer-formats')}."
        )
    # The weights lie at the top level; subfolders and "consolidated" files hold the same ones in other formats.
    # 1_Pooling/config.json says what an embedding is made of, and additional_chat_templates has chat templates.
    wanted = ["*.safetensors", "*.json", "*.jinja"]
    unwanted = ["[!1a]*/*", "[1a]*/*.safetensors", "a*/*.json", "consolidated*"]
    if file:
        wanted, unwanted = [file], []
    elif tag:
        tags = dict.fromkeys((tag, tag.upper(), tag.lower()))
        wanted = [f"{start}{tag}{suffix}" for suffix in suffixes for tag in tags for start in ("", "*[-._/]")]
        unwanted = ["*mmproj*"]  # vision towers
    import huggingface_hub  # imported late: it takes long, and local folders do not need it
    from huggingface_hub import errors

    where = id if revision is None else f"{id} at revision {revision}"

    def fetched(**options: Any) -> Path:
        patterns = {"allow_patterns": wanted, "ignore_patterns": unwanted}
        return Path(huggingface_hub.snapshot_download(id, revision=revision, **patterns | options))

    try:
        try:
            folder = fetched(local_files_only=outlines is not None)
        except errors.LocalEntryNotFoundError:
            if outlines is None:
                raise
            if file or tag:
                raise CheckpointError(
                    f"{path!r} is not in the hub's cache, and only safetensors are looked into before they are "
                    f"downloaded: run hf download {id} {file or f'--include *{tag}*'} first."
                ) from None
            folder = fetched(local_dir=outlines / id, allow_patterns=wanted[1:])
            if (folder / "config.json").exists():
                for name, metadata in (
                    huggingface_hub.HfApi().get_safetensors_metadata(id, revision=revision).files_metadata.items()
                ):
                    _outline(folder, name, metadata)
    except CheckpointError:
        raise
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{id} is gated: accept its terms at https://huggingface.co/{id} and set HF_TOKEN."
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise CheckpointError(f"{tried}, and the hub has no {where} that this HF_TOKEN may read.") from error
    except errors.LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if huggingface_hub.constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise CheckpointError(
            f"{tried}, and as a hub id it is not wholly in the cache and {why}: go online, or run hf download {id} "
            "where that can be done and give the folder of what it downloads."
        ) from error
    except errors.NotASafetensorsRepoError as error:
        raise CheckpointError(
            f"The hub's {where} has no model.safetensors and no model.safetensors.index.json, and infer reads "
            "safetensors only."
        ) from error
    except Exception as error:  # whatever the network, the disk or a proxy may answer
        raise CheckpointError(f"{where} cannot be downloaded: {' '.join(str(error).split())}") from error
    if not (file or tag):
        if folder.is_dir() and not (folder / "config.json").exists():
            raise CheckpointError(
                f"The hub's {where} has no config.json, so it is not a checkpoint; if it holds GGUF files, add the "
                f"name of one to model.path, as in {id}:Q4_K_M or {id}/FILE.gguf."
            )
        return folder
    held = sorted(f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file())
    found = [name for name in held if _matches(name, wanted) and not _matches(name, unwanted)]
    if len(found) != 1:
        what = f"has several files of that kind ({', '.join(found)})" if found else "has no such file"
        raise CheckpointError(
            f"{path!r}: the hub's {where} {what}; give the name of one, as in {id}/FILE{suffixes[0]}."
        )
    return folder / found[0]


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
