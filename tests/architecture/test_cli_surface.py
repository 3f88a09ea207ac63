"""The command line that users and scripts rely on. A change here is a change of the product."""

from __future__ import annotations

import argparse

from keepstep.cli.main import build_parser

TRAINING = [
    "--config", "--debug", "--dry-run", "--ignore_mismatched_sizes", "--no-rollout-state-restore",
    "--resume_from_checkpoint", "--s3-bucket", "--s3-prefix", "--s3-upload-interval", "--seed",
]  # fmt: skip

SURFACE = {
    "keepstep": ["--version", "COMMAND"],
    "keepstep completion": ["SHELL"],
    "keepstep convert": ["--json", "--layout", "SOURCE", "TARGET"],
    "keepstep dataset": ["ACTION"],
    "keepstep dataset check": ["--deep", "--expect-rows", "--json", "--log", "--run", "FILES"],
    "keepstep doctor": ["--json", "RUN"],
    "keepstep down": ["DIR"],
    "keepstep download": ["--json", "--step", "RUN"],
    "keepstep export": ["--dtype", "--format", "--json", "CHECKPOINT", "OUT"],
    "keepstep ls": ["--json", "--remote", "RUN"],
    "keepstep pin": ["--remove", "RUN", "STEP"],
    "keepstep plan": ["--json", "--remote", "RUN"],
    "keepstep preflight": sorted({*TRAINING, "--clean", "--json", "--log", "--quick"} - {"--dry-run"}),
    "keepstep prune": ["--dry-run", "--json", "RUN"],
    "keepstep ps": ["--json", "RUN"],
    "keepstep report": ["--out", "RUN"],
    "keepstep run": TRAINING,
    "keepstep serve": ["--gpu-memory-utilization", "--port", "--tensor-parallel-size", "CHECKPOINT|OUT"],
    "keepstep train": TRAINING,
    "keepstep tune": ["--json", "--mtbf-hours", "RUN"],
    "keepstep ui": ["RUN"],
    "keepstep up": ["--database", "DIR"],
    "keepstep upload": ["--json", "--step", "RUN"],
    "keepstep verify": ["--json", "--quick", "PATH"],
}


def surface(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Arguments shown in help, by command."""
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    found = {
        parser.prog: sorted(action.option_strings[0] if action.option_strings else action.metavar for action in shown)
    }
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                found |= surface(child)
    return found


def test_the_surface_is_frozen():
    assert surface(build_parser()) == SURFACE
