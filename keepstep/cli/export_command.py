"""`keepstep export CKPT OUT`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from keepstep.errors import EXIT_DONE, EXIT_USAGE


def main(args: argparse.Namespace) -> int:
    """Export and say what was written; without OUT into the run's `export/step_<N>`."""
    checkpoint = Path(args.checkpoint)
    if not checkpoint.exists():
        print(f"keepstep: {checkpoint} does not exist.", file=sys.stderr)
        return EXIT_USAGE
    # Nothing is fetched: an export must hold everything that it needs.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from keepstep.export.hugging_face import export

    real = Path(os.path.realpath(checkpoint))
    target = Path(args.out) if args.out else real.parent.parent / "export" / real.name
    target.parent.mkdir(parents=True, exist_ok=True)
    report = export(real, target, args.dtype)
    if args.json:
        print(json.dumps(report))
    else:
        print(
            f"step {report['step']}: {report['num_tensors']} tensors, "
            f"{report['num_parameters']} parameters in {report['path']}"
        )
    return EXIT_DONE
