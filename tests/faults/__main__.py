"""Remake the doctor's fixtures: `python -m tests.faults [NAME …]`. Each fault is really caused; takes root for some."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.faults.causes import FAULTS
from tests.faults.lab import Lab
from tests.faults.shrink import copy_kept

DATA = Path(__file__).parents[1] / "data" / "doctor"


def main() -> int:
    by_name = {fault.__name__: fault for fault in FAULTS}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(by_name))
    parser.add_argument("--port", type=int, default=20314, help="first port of the engines")
    args = parser.parse_args()
    lab = Lab(Path(tempfile.mkdtemp(prefix="ks-faults-", dir="/tmp")), args.port)
    failed = []
    try:
        for name in args.names or by_name:
            begin = time.monotonic()
            try:
                copy_kept(by_name[name](lab), DATA / name, lab.folder)
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
