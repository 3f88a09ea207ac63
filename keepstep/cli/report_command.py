"""`keepstep report RUN`: one HTML file about a run, of which nothing else is needed to read it. Light."""

from __future__ import annotations

import argparse
from pathlib import Path

from keepstep.cli.inspect_commands import no_run
from keepstep.doctor.evidence import gather, is_run
from keepstep.errors import EXIT_DONE, ConfigError
from keepstep.report import samples
from keepstep.report.page import Extras, build, render
from keepstep.run import RunDir, write_atomic

NAME = "report.html"


def main(args: argparse.Namespace) -> int:
    """Write the file and print where it is.

    Raises:
        ConfigError: RUN is not the folder of a run, or the file cannot be written.
    """
    run = RunDir.at(args.run)
    if not is_run(run):
        raise no_run(run, "it has no run.json and no attempts")
    target = Path(args.out).absolute() if args.out else run.root / NAME
    text = render(build(gather(run), extras(run)))
    try:
        write_atomic(target, text.encode())
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}.", "Give another one with --out.") from None
    print(target)
    return EXIT_DONE


def extras(run: RunDir) -> Extras:
    """Pointers, pins and samples of a run's folder."""
    latest, best = (run.pointed_at(link) for link in (run.latest_link, run.best_link))
    return Extras(latest, best, run.pinned_steps(), samples.read(run))
