"""What pip is given to install a folder of distributions: two files of requirements for each of them.

``NAME.needs.txt`` has what others publish, from the package index, in the versions of constraints.txt. ``NAME.txt``
has the distribution and those of ours that it needs, by hash, from the folder alone: whoever publishes one of our names
on an index is not asked.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import NormalizedName, canonicalize_name, parse_sdist_filename, parse_wheel_filename

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Has torch without CUDA, which is gigabytes smaller."""
GPU = "triton"
"""Who needs this wants torch with CUDA."""
OURS = """\
# {name} from the wheels in this folder, and from nowhere else. Before: pip install -r {name}.needs.txt
--no-index
--find-links .
--require-hashes
"""
NEEDS = """\
# What {name} needs from the package index. Then: pip install -r {name}.txt
"""


def written(folder: Path, packages: Iterable[Path], constraints: Path) -> dict[str, str]:
    """The files' names and texts. ``packages`` are the sources of all that ``folder`` has."""
    projects = [tomllib.loads((package / "pyproject.toml").read_text())["project"] for package in packages]
    asked = {each["name"]: [Requirement(line) for line in each["dependencies"]] for each in projects}
    pinned = {
        canonicalize_name(requirement.name): requirement.specifier
        for line in constraints.read_text().splitlines()
        if line and not line.startswith("#")
        for requirement in [Requirement(line)]
    }
    hashed = {name: "".join(f" --hash=sha256:{digest}" for digest in _digests(folder, name)) for name in asked}
    versions = {each["name"]: each["version"] for each in projects}
    files = {}
    for name in asked:
        ours = _closure(name, asked)
        lines = [f"{each}=={versions[each]}{hashed[each]}\n" for each in sorted(ours)]
        files[f"{name}.txt"] = OURS.format(name=name) + "".join(lines)
        others = {str(_pinned(each, pinned)) for one in ours for each in asked[one] if each.name not in asked}
        index = [] if any(Requirement(each).name == GPU for each in others) else [f"--extra-index-url {CPU_INDEX}\n"]
        files[f"{name}.needs.txt"] = NEEDS.format(name=name) + "".join([*index, *(f"{o}\n" for o in sorted(others))])
    return files


def _closure(name: str, asked: dict[str, list[Requirement]]) -> set[str]:
    """A distribution and those of ours that it needs, directly or not."""
    found, left = {name}, [name]
    while left:
        new = {each.name for each in asked[left.pop()]} & set(asked) - found
        found |= new
        left += new
    return found


def _pinned(requirement: Requirement, pinned: Mapping[NormalizedName, SpecifierSet]) -> Requirement:
    """With the version of constraints.txt; its extras and its marker stay."""
    exact = Requirement(str(requirement))
    exact.specifier = pinned.get(canonicalize_name(exact.name), exact.specifier)
    return exact


def _digests(folder: Path, name: str) -> list[str]:
    """The SHA-256 of a distribution's files."""
    found = []
    for file in sorted(folder.iterdir()):
        if file.suffix == ".whl":
            owner = parse_wheel_filename(file.name)[0]
        elif file.name.endswith(".tar.gz"):
            owner = parse_sdist_filename(file.name)[0]
        else:
            continue
        if owner == canonicalize_name(name):
            found.append(hashlib.sha256(file.read_bytes()).hexdigest())
    return found
