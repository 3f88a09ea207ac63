"""What of a run the doctor reads, without machine names and paths.

Of the checkpoints only the newest keeps its manifest, of the others the folder alone is left.

Scrubbed: the folder of the lab becomes /runs, the Python and the repository lose their paths, hosts become node-a and
node-b, boot ids become zeros. Nothing else is changed, and no line is added, dropped or moved.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from keepstep.processes import boot_id, hostname
from keepstep.run import RunDir
from tests.integration.driver import REPOSITORY

KEPT = (
    "run.json", "config.yaml", "result.json", "events.jsonl", "metrics.jsonl", "attempts/*.json", "uploads/*.json",
    "logs/attempt_*/train.log", "checkpoints/step_*/manifest.json", "checkpoints/*.txt", "quarantine/*/manifest.json",
)  # fmt: skip
OTHER_HOST = "elsewhere"
"""Host name of an attempt that runs as on another machine."""
HOSTS = {hostname(): "node-a", OTHER_HOST: "node-b"}


def copy_kept(run: Path, target: Path, lab: Path) -> None:
    """Replace `target` by the scrubbed rest of `run`."""
    shutil.rmtree(target, ignore_errors=True)
    words = replacements(lab)
    newest = max(RunDir.at(run).steps(), default=None)
    for path in sorted(path for pattern in KEPT for path in run.glob(pattern)):
        if path.parent.name in ("latest", "best"):
            continue
        copy = target / path.relative_to(run)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.match("checkpoints/step_*/*") and path.parent.name != f"step_{newest}":
            # Version control keeps no empty folder.
            (copy.parent / ".gitkeep").touch()
            continue
        copy.write_text(scrub(path.read_text(errors="replace"), words))


def replacements(lab: Path) -> dict[str, str]:
    """Longer ones first: one may hold another."""
    words = {
        str(lab): "/runs",
        sys.executable: "python",
        sys.prefix: "/venv",
        str(REPOSITORY): "/keepstep",
        boot_id(): "00000000-0000-0000-0000-000000000000",
    }
    return {word: words[word] for word in sorted(words, key=len, reverse=True) if word}


def scrub(text: str, words: Mapping[str, str]) -> str:
    for word, replacement in words.items():
        text = text.replace(word, replacement)
    for host, neutral in HOSTS.items():
        # A host's name may be two letters long.
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", neutral, text)
    return text
