"""The process that looks at parquet files for `keepstep.data.count`.

python -m keepstep.data.reader < request.json

Request: {"files", "columns", "deep", "num_threads"}. Answer, one object a line, each flushed at once, so that after the
reader's death the files that were begun and not answered are known:

    {"begin": index}                                   again while a long file is read
    {"end": index, "record": {…}} or {"end": index, "problem": sentence}
    {"rows_sha256": digest}                            last, of a deep read without problems
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from keepstep.data.file_check import FileProblem, OnBatch, inspect
from keepstep.data.row_digest import RowDigest

SIGN_OF_LIFE_S = 5.0


class Answers:
    """Lines to the parent, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def say(self, **answer: Any) -> None:
        with self._lock:
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


def main() -> None:
    request = json.load(sys.stdin)
    files, columns = request["files"], request["columns"]
    answers = Answers()
    digest = RowDigest() if request["deep"] else None

    def look(index: int) -> bool:
        answers.say(begin=index)
        try:
            found = inspect(files[index], columns, _on_batch(digest, index, answers) if digest else None)
        except FileProblem as problem:
            answers.say(end=index, problem=str(problem))
            return False
        answers.say(end=index, record=asdict(found))
        return True

    with ThreadPoolExecutor(request["num_threads"]) as pool:
        good = list(pool.map(look, range(len(files))))
    if digest is not None and all(good):
        answers.say(rows_sha256=digest.hexdigest())


def _on_batch(digest: RowDigest, index: int, answers: Answers) -> OnBatch:
    last = time.monotonic()

    def on_batch(batch: Any) -> None:
        nonlocal last
        digest.update(batch)
        if time.monotonic() - last > SIGN_OF_LIFE_S:
            last = time.monotonic()
            answers.say(begin=index)

    return on_batch


if __name__ == "__main__":
    main()
