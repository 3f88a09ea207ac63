"""Making what `made:` paths name, in the platform folder, on first use. Light: torch runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from keepstep.errors import ConfigError
from keepstep.run import RunDir

PREFIX = "made:"
MODEL = "char-qwen3"
DATA = "arithmetic"
MAKE_TIMEOUT_S = 600


def made_path(name: str, run: RunDir) -> Path:
    """Where `made:<name>` lies for this run; other names are returned as paths."""
    return run.platform / "made" / name.removeprefix(PREFIX) if name.startswith(PREFIX) else Path(name)


def make_data(run: RunDir) -> None:
    """The arithmetic data set, unless it is there."""
    from keepstep.quickstart import arithmetic

    folder = made_path(PREFIX + DATA, run)
    if not all((folder / name).is_file() for name in ("train.parquet", "val.parquet")):
        arithmetic.write(folder)


def make_model(name: str, run: RunDir) -> Path:
    """The quickstart's model, unless it is there. Takes some ten seconds once."""
    folder = made_path(name, run)
    if name.removeprefix(PREFIX) != MODEL:
        raise ConfigError(f"{name} is not something Keepstep makes.", f"It makes {PREFIX}{MODEL}.")
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "keepstep.quickstart.char_qwen3", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise ConfigError(
                f"Making {name} failed:\n{done.stderr.strip()[-800:]}", "Check the installation: make setup."
            )
    return folder
