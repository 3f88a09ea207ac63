"""The processes of a tensor-parallel engine, of which none outlives another.

vLLM runs one worker process per GPU below the engine's own. A worker that lost its peer waits in a collective which has
no time limit, and vLLM reports the loss as an error of its own after the grace that it gives the others; so a killed
worker takes the engine along, whose death the supervisor sees at once, and a killed engine takes its workers along.

Concurrency: one thread in the engine's process (`WorkerWatch`) and one in each worker (`end_with_engine`). They consume
nothing, look at processes only, and end with theirs.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

POLL_S = 0.5


class WorkerWatch:
    """From its construction on, the death of a child ends this process and its other children.

    Until `up` only that by a signal: a child that cannot start says why, and vLLM hands it on to whoever called.
    """

    def __init__(self) -> None:
        self._up = self._over = False
        threading.Thread(target=self._watch, name="worker-watch", daemon=True).start()

    def up(self) -> None:
        """All workers have started, and none has a reason to end before this process does."""
        self._up = True
        # Not before: what vLLM registered while it started them ends them, and comes after this.
        atexit.register(self._end)

    def _end(self) -> None:
        self._over = True

    def _watch(self) -> None:
        known: dict[int | None, multiprocessing.process.BaseProcess] = {}
        while not self._over:
            known |= {child.pid: child for child in multiprocessing.active_children()}
            ended = {child.name: child.exitcode for child in known.values() if child.exitcode is not None}
            if not self._over and any(self._up or status < 0 for status in ended.values()):
                print(f"workers of the engine ended, with these statuses: {ended}", file=sys.stderr, flush=True)
                for child in known.values():
                    child.kill()
                os._exit(1)
            living = [child.sentinel for child in known.values() if child.exitcode is None]
            multiprocessing.connection.wait(living, timeout=POLL_S)


def forget_names(pids: Iterable[int]) -> None:
    """Take the memory through which these processes speak out of /dev/shm: it vanishes with the last that maps it.

    Python's resource tracker would give it back when they are gone, if Ray did not kill it beside its engine.
    """
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
    for name in {name for text in maps for name in re.findall(r"/dev/shm/(psm_\w+)$", text, re.MULTILINE)}:
        memory = SharedMemory(name)
        memory.close()
        memory.unlink()


def end_with_engine() -> None:
    """From now on the death of the process that started this one ends it."""
    engine = multiprocessing.parent_process()
    if engine is not None:
        threading.Thread(target=_end_with, args=(engine.sentinel,), name="engine-watch", daemon=True).start()


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    # Not `sys.exit`: the main thread may be in a collective that will never end.
    os.kill(os.getpid(), signal.SIGKILL)
