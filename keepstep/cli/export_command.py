"""`keepstep export CKPT OUT`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from keepstep.errors import EXIT_DONE, ConfigError


def main(args: argparse.Namespace) -> int:
    """Export and say what was written; without OUT into the run's `export/step_<N>`."""
    real = existing(args.checkpoint)
    # Nothing is fetched: an export must hold everything that it needs.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from keepstep.export.hugging_face import export

    target = Path(args.out) if args.out else default_target(real)
    target.parent.mkdir(parents=True, exist_ok=True)
    report = export(real, target, args.dtype, args.format)
    print(json.dumps(report) if args.json else described(report))
    return EXIT_DONE


def existing(checkpoint: str) -> Path:
    """The folder that a path or a link like `checkpoints/latest` means.

    Raises:
        ConfigError: nothing is there.
    """
    if not Path(checkpoint).is_dir():
        raise ConfigError(f"{checkpoint} does not exist.", "Name a checkpoint: RUN/checkpoints/latest.")
    return Path(os.path.realpath(checkpoint))


def default_target(checkpoint: Path) -> Path:
    """`export/<step>` of the run; beside the checkpoint where it lies in no run."""
    parent = checkpoint.parent
    return (parent.parent if parent.name == "checkpoints" else parent) / "export" / checkpoint.name


def described(report: dict[str, Any]) -> str:
    """What a person wants to know of an export."""
    step = "" if report["step"] is None else f"step {report['step']}: "
    lines = [
        f"{step}{report['num_tensors']} tensors, {report['num_parameters']:,} parameters, "
        f"{report['num_bytes']:,} bytes of {report['dtype']} in {report['path']}",
        "read back, and loaded by transformers"
        if report["loaded"]
        else "read back, and not loaded by transformers: there is no memory for it",
    ]
    if base := report["base"]:
        lines.append(
            f"names and shapes are those of the base model ({base['num_tensors']} tensors, {base['num_bytes']:,} bytes "
            f"of {', '.join(base['dtypes'])})"
        )
        if base["unused"]:
            lines.append(f"the base has {len(base['unused'])} tensors that its class does not use: {base['unused'][0]}")
    return "\n".join(lines)
