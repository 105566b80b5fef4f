"""The bill of materials (CycloneDX 1.6) of a folder of distributions: what they are, and all that they depend on.

Names, versions and licenses are those of the environment that it is written in, whose versions constraints.txt fixes.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import deque
from datetime import UTC, datetime
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version


def written(folder: Path, epoch: str) -> str:
    """The bill of materials as JSON, dated ``epoch`` (seconds)."""
    files: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix == ".whl":
            files.setdefault(parse_wheel_filename(file.name)[0], []).append(file)
        elif file.name.endswith(".tar.gz"):
            files.setdefault(parse_sdist_filename(file.name)[0], []).append(file)
    found, needs = _closure(list(files))
    components = [_component(name, found[name], files.get(name, [])) for name in sorted(found)]
    top = next(c for c in components if c["name"] == "infer-engine")
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(int(epoch), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {**top, "type": "application"},
        },
        "components": [c for c in components if c is not top],
        "dependencies": [
            {"ref": _ref(found[name]), "dependsOn": sorted(_ref(found[other]) for other in needs[name])}
            for name in sorted(found)
        ],
    }
    bill["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(bill, sort_keys=True)).urn
    return json.dumps(bill, indent=1, sort_keys=True) + "\n"


def _closure(names: list[str]) -> tuple[dict[str, Distribution], dict[str, set[str]]]:
    """Installed distributions by name, those that they need directly or not, and who needs whom on this platform."""
    found: dict[str, Distribution] = {}
    needs: dict[str, set[str]] = {}
    done: set[tuple[str, str]] = set()
    left = deque((name, "") for name in names)
    while left:
        name, extra = left.popleft()
        if (name, extra) in done:
            continue
        done.add((name, extra))
        found[name] = distribution(name)
        wanted = needs.setdefault(name, set())
        for line in found[name].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                other = canonicalize_name(requirement.name)
                wanted.add(other)
                left.extend((other, each) for each in ("", *sorted(requirement.extras)))
    return found, {name: wanted - {name} for name, wanted in needs.items()}


def _version(found: Distribution) -> str:
    return Version(found.version).public  # without the label of a build, such as +cpu


def _ref(found: Distribution) -> str:
    return f"pkg:pypi/{canonicalize_name(found.name)}@{_version(found)}"


def _said(found: Distribution, field: str) -> str:
    values: list[str] = found.metadata.get_all(field) or [""]
    return values[0]


def _component(name: str, found: Distribution, files: list[Path]) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": _ref(found),
        "purl": _ref(found),
        "name": name,
        "version": _version(found),
    }
    if summary := _said(found, "Summary"):
        component["description"] = summary
    if expression := _said(found, "License-Expression"):
        component["licenses"] = [{"expression": expression}]
    elif names := _license_names(found):
        component["licenses"] = [{"license": {"name": each}} for each in names]
    if files:
        component["components"] = [
            {
                "type": "file",
                "bom-ref": file.name,
                "name": file.name,
                "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}],
            }
            for file in files
        ]
    return component


def _license_names(found: Distribution) -> list[str]:
    """What a distribution without an SPDX expression says of its license: its classifiers, or its text's first line."""
    classifiers = found.metadata.get_all("Classifier") or []
    named = [line.split(" :: ")[-1] for line in classifiers if line.startswith("License :: ")]
    text = _said(found, "License").strip()
    return named or ([text.splitlines()[0][:200]] if text else [])
