"""`keepstep up` and `keepstep down`: the local platform of a folder of runs."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from keepstep.errors import EXIT_DONE, ConfigError
from keepstep.platform import local
from keepstep.platform.servers import DATABASE_VARIABLE
from keepstep.run import PLATFORM_DIR, RunDir


def up(args: argparse.Namespace) -> int:
    """Bring the platform up and say what is needed next."""
    folder = _folder(args.dir)
    print("starting Prefect server, worker and deployments", file=sys.stderr, flush=True)
    state = local.up(folder / PLATFORM_DIR, args.database or os.environ.get(DATABASE_VARIABLE))
    print(described(state, folder))
    return EXIT_DONE


def down(args: argparse.Namespace) -> int:
    """Take the platform down and say what becomes of its flow runs."""
    folder = _folder(args.dir)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder.", "Give the one that `keepstep up` was given.")
    if not (folder / PLATFORM_DIR).is_dir():
        print(f"{folder}: nothing was started here.")
        return EXIT_DONE
    state = local.down(folder / PLATFORM_DIR)
    for name in state.interrupted:
        print(f"flow run {name} goes on after: keepstep up {shlex.quote(str(args.dir))}")
    for holder in state.held_by:
        print(f"the servers stay for {holder.role} {holder.pid}, which was started by itself")
    if not state.held_by:
        print("down")
    return EXIT_DONE


def described(state: local.Up, folder: Path) -> str:
    names = ", ".join(dict.fromkeys(change.name for change in state.automations))
    return "\n".join(
        (
            f"Prefect page  {state.page}",
            f"worker        process {state.worker.pid}, pool {local.LOCAL_POOL}, log {state.worker_log}",
            f"automations   {names}; silence counts as death after {state.silence_s:g} s",
            "",
            f"export PREFECT_API_URL={state.api}",
            "prefect deployment run grpo-train/quickstart",
            f"keepstep down {shlex.quote(str(folder))}",
        )
    )


def _folder(given: str) -> Path:
    """The folder that holds runs. Raises `ConfigError` for a run's own folder, whose platform is beside it."""
    run = RunDir.at(given)
    if run.has_record():
        raise ConfigError(f"{run.root} is a run.", f"Give the folder that holds it: {run.root.parent}")
    return run.root
