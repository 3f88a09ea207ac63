"""Ends what an attempt leaves behind when its process is killed: Ray's agents outlive a killed driver by minutes.

    python -m keepstep.reaper RUN ATTEMPT       standard input: a pipe that the attempt's process holds

Concurrency: one thread. It waits for the end of its standard input, which is when the attempt's process is gone for
whatever reason, ends the attempt's recorded processes, removes its temporary folder, and exits.
"""

from __future__ import annotations

import os
import subprocess
import sys

from keepstep.attempts import Attempt, end_attempt
from keepstep.run import RunDir


def start(attempt: Attempt) -> subprocess.Popen[bytes]:
    """Start the reaper of an attempt; it lives a moment longer than this process."""
    command = [sys.executable, "-m", "keepstep.reaper", str(attempt.run.root), str(attempt.number)]
    # It must not hold the attempt's own output open, at whose end somebody waits.
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)
    attempt.add(process.pid, "reaper")
    return process


def main(run: str, number: str) -> None:
    while os.read(0, 4096):
        pass
    end_attempt(RunDir.at(run), int(number))


if __name__ == "__main__":
    main(*sys.argv[1:])
