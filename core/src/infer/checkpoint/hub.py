"""Checkpoints from the Hugging Face hub, downloaded or found in its cache."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from infer.errors import CheckpointError

BUNDLED = {"demo": "infer-demo"}
"""Bundled checkpoints, and the distributions of ours that contain them."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def download(path: str, bundled: Mapping[str, Path], revision: str | None) -> Path:
    """The folder of the hub id ``path`` in the hub's cache, downloaded if necessary. Raises CheckpointError."""
    names = f" ({', '.join(sorted(bundled))})" if bundled else ""
    tried = f"{path!r} is neither a folder nor a bundled name{names}"
    if package := BUNDLED.get(path):
        raise CheckpointError(
            f"{path!r} is the checkpoint of {package}, which is not installed: pip install {package}."
        )
    if not _HUB_ID.fullmatch(path):
        raise CheckpointError(f"{tried}, and it cannot be a hub id, which reads org/name.")
    import huggingface_hub  # imported late: it takes long, and local folders do not need it
    from huggingface_hub import errors

    where = path if revision is None else f"{path} at revision {revision}"
    try:
        # The weights lie at the top level; subfolders and "consolidated" files hold the same ones in other formats.
        folder = huggingface_hub.snapshot_download(
            path,
            revision=revision,
            allow_patterns=["*.safetensors", "*.json", "*.jinja"],
            ignore_patterns=["*/*", "consolidated*"],
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{path} is gated: accept its terms at https://huggingface.co/{path} and set HF_TOKEN."
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise CheckpointError(f"{tried}, and the hub has no {where} that this HF_TOKEN may read.") from error
    except errors.LocalEntryNotFoundError as error:
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        raise CheckpointError(f"{tried}, and as a hub id it is not wholly in the cache and {why}.") from error
    except Exception as error:  # whatever the network, the disk or a proxy may answer
        raise CheckpointError(f"{where} cannot be downloaded: {' '.join(str(error).split())}") from error
    return Path(folder)
