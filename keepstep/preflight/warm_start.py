"""`trainer.init_from`: the checkpoint whose weights a new run begins with."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from keepstep.checkpoint import layout
from keepstep.checkpoint.manifest import parse
from keepstep.checkpoint.verify import verify
from keepstep.config.schema import RunConfig
from keepstep.errors import CheckpointError

Record = dict[str, Any]


def find_init_from(config: RunConfig, existing: Record | None) -> Path | None:
    """The checkpoint of a warm start: what is given, else what the run recorded; it is looked at only where it counts.

    Raises:
        CheckpointError: a new run is to begin with it, and its weights are not whole.
    """
    recorded = existing["contract"].get("trainer.init_from") if existing else None
    given = config.trainer.init_from or recorded
    if given is None:
        return None
    folder = Path(os.path.realpath(Path(given).expanduser()))
    if existing is None:
        check_init_from(folder)
    return folder


def check_init_from(folder: Path) -> None:
    """The weights of a warm start are whole: looked at whenever the run is about to begin with them.

    Raises:
        CheckpointError: what is wrong with them.
    """
    found = verify(folder)
    # Whatever else is lost, weights alone are asked for.
    reasons = [reason for reason in found.reasons if layout.is_policy(reason.partition(": ")[0])]
    if found.manifest is None or reasons:
        reason = next(iter(reasons or found.reasons), f"{found.state}, and without a manifest")
        raise CheckpointError(
            f"trainer.init_from: {folder} has no weights to begin with: {reason}.",
            f"See what is wrong: keepstep verify {folder}. It must be a checkpoint of Keepstep.",
        )


def weights_fingerprint(config: RunConfig, source: Path | None, existing: Record | None) -> str:
    """What identifies the weights of a warm start; the recorded value where the checkpoint is gone by now."""
    recorded = existing["contract"].get("init_from.fingerprint", "") if existing else ""
    if source is None or (existing is not None and not config.trainer.init_from):
        return recorded
    if not (source / layout.MANIFEST).is_file():
        # Gone by now, or never one: what it was is known as long as nothing else is named.
        same = existing and existing["contract"].get("trainer.init_from") == config.trainer.init_from
        return recorded if same else f"(no manifest in {source})"
    files = parse((source / layout.MANIFEST).read_bytes()).files
    weights = [f"{name} {files[name].tree}" for name in sorted(files) if layout.is_policy(name)]
    return hashlib.sha256("\n".join(weights).encode()).hexdigest()
