"""What a careful forger would do to a checkpoint: other content under a manifest whose digests fit it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.checkpoint import layout
from keepstep.checkpoint.digest import digest_file
from keepstep.checkpoint.manifest import seal


def unsealed(folder: Path) -> dict[str, Any]:
    """The manifest without `self`."""
    value = json.loads((folder / layout.MANIFEST).read_bytes())
    del value["self"]
    return value


def reseal(folder: Path, **changes: Any) -> None:
    """Write the manifest anew with the digests of what lies there now; listed tensors stay as they were."""
    value = unsealed(folder) | changes
    for name, record in value["files"].items():
        if (folder / name).is_file():
            record |= digest_file(folder / name).to_record()
    (folder / layout.MANIFEST).write_bytes(seal(value))


def forge(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    reseal(folder)


def write_archive(path: Path, pickled: bytes, others: Mapping[str, bytes] | None = None, **options: Any) -> None:
    """A zip as torch.save would name its records, with this pickle."""
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, content in (others or {}).items():
            archive.writestr(name, content)
