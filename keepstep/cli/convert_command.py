"""`keepstep convert`: a checkpoint in the other layout."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from keepstep.errors import EXIT_DONE, ConfigError


def main(args: argparse.Namespace) -> int:
    """Write the checkpoint SOURCE as the new folder TARGET.

    Raises:
        ConfigError: SOURCE is not there, or TARGET is.
        CheckpointError: SOURCE does not verify.
    """
    source = Path(args.source)
    if not source.is_dir():
        raise ConfigError(f"{source} is not a folder.", "Name a checkpoint: RUN/checkpoints/step_N.")
    from keepstep.checkpoint.convert import convert

    target = convert(source, Path(args.target), args.layout)
    record = {"source": str(source), "target": str(target), "layout": args.layout}
    print(json.dumps(record) if args.json else f"{source} stands as {target} in layout {args.layout}, verified")
    return EXIT_DONE
