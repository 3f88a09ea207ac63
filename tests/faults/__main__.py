"""Remake the doctor's fixtures: `python -m tests.faults [NAME …]`. Each fault is really caused; some take root.

What the doctor says of each stands beside it in doctor.txt and is written anew as well (`--texts`: nothing else is):
the difference in version control is to be read.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.faults.causes import FAULTS, Fault
from tests.faults.lab import Lab
from tests.faults.seen import DATA, TEXT, names, text_of
from tests.faults.shrink import copy_kept


def main() -> int:
    by_name = {fault.__name__: fault for fault in FAULTS}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(by_name))
    parser.add_argument("--port", type=int, default=20314, help="first port of the engines")
    parser.add_argument("--texts", action="store_true", help="only what the doctor says of the fixtures that stand")
    args = parser.parse_args()
    if args.texts:
        for name in args.names or names():
            (DATA / name / TEXT).write_text(text_of(name))
        return 0
    return make(args.names or list(by_name), by_name, args.port)


def make(wanted: list[str], by_name: dict[str, Fault], port: int) -> int:
    lab = Lab(Path(tempfile.mkdtemp(prefix="ks-faults-", dir="/tmp")), port)
    failed = []
    try:
        for name in wanted:
            begin = time.monotonic()
            try:
                copy_kept(by_name[name](lab), DATA / name, lab.folder)
                (DATA / name / TEXT).write_text(text_of(name))
            except Exception:
                # The others are worth having all the same.
                traceback.print_exc()
                failed.append(name)
            print(f"{name}: {'FAILED' if name in failed else 'made'} in {time.monotonic() - begin:.0f} s", flush=True)
    finally:
        shutil.rmtree(lab.folder, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
