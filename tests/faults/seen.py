"""The doctor's look at a fixture: on the host it was scrubbed to, an hour after the run, or while that was at work."""

from __future__ import annotations

from pathlib import Path

from keepstep.cli.doctor_command import describe
from keepstep.doctor.evidence import Evidence, gather
from keepstep.doctor.rules import examine
from keepstep.run import RunDir

DATA = Path(__file__).parents[1] / "data" / "doctor"
TEXT = "doctor.txt"
HOST, BOOT = "node-a", "00000000-0000-0000-0000-000000000000"
AT_WORK = ("running",)
"""Fixtures whose processes count as alive."""
AFTER_S = 3600.0


def evidence_of(name: str, folder: Path | None = None) -> Evidence:
    """Evidence of a fixture, or of a changed copy of it in `folder`."""
    run = RunDir.at(folder or DATA / name)
    # From the run's own times: those of the files are of whoever checked them out.
    times = [row.time.timestamp() for row in gather(run).events if row.time is not None]
    now = max(times, default=0.0) + (1.0 if name in AT_WORK else AFTER_S)
    return gather(run, now=now, host=HOST, boot=BOOT, alive=lambda _: name in AT_WORK)


def text_of(name: str) -> str:
    """What `keepstep doctor` prints, for a run in /runs."""
    run = RunDir.at(DATA / name)
    lines = describe(examine(evidence_of(name)), run)
    return "\n".join(lines).replace(str(run.root), f"/runs/{name}") + "\n"


def names() -> list[str]:
    return sorted(path.name for path in DATA.iterdir() if path.is_dir())
