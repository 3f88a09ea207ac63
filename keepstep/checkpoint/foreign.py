"""A checkpoint without our manifest: what can be said of it without digests.

Known are our five files as another tool may have left them, and verl's two layouts (`verl_layout`). Archives are read
by their directory, their opcodes and their own CRC-32; nothing is loaded.
"""

from __future__ import annotations

import os
from pathlib import Path

from keepstep.checkpoint import layout, strict_json, verl_layout
from keepstep.checkpoint.files import list_files
from keepstep.checkpoint.findings import Findings
from keepstep.checkpoint.foreign_file import check_file
from keepstep.run import parse_step


def check(folder: Path, expected_step: int | None, quick: bool, found: Findings) -> int | None:
    """Look at the folder's structure; the step that it says it is of.

    What a resume needs and an export does not goes to `found.missing`, everything else that is wrong to its reasons.
    """
    if os.path.isfile(folder.parent.parent / "run.json"):
        found.reject(layout.MANIFEST, "missing, the checkpoint was never finished")
        return parse_step(folder.name)
    present, problems = list_files(folder)
    found.reject("", *problems)
    if present & set(layout.required_files()):
        return _check_five_files(folder, present, expected_step, quick, found)
    if verl_layout.is_fsdp(present):
        return verl_layout.check_fsdp(folder, present, quick, found)
    if verl_layout.is_guide(present):
        return verl_layout.check_guide(folder, present, quick, found)
    found.reject("", f"not a checkpoint: none of {', '.join(layout.required_files())}, and not verl's layout")
    return None


def _check_five_files(
    folder: Path, present: set[str], expected_step: int | None, quick: bool, found: Findings
) -> int | None:
    missing = [name for name in layout.required_files() if name not in present]
    if layout.ACTOR in missing:
        found.reject("", *(f"{name}: missing" for name in missing))
    else:
        found.missing = [f"{name}: missing" for name in missing]
    for name in sorted(present):
        check_file(folder, name, present, quick, found)
    step = parse_step(folder.name) if expected_step is None else expected_step
    if layout.TRAINER_STATE in missing or layout.TRAINER_STATE in found.named:
        return step
    state = strict_json.load(folder / layout.TRAINER_STATE)
    named = state.get("global_step") if isinstance(state, dict) else None
    if type(named) is not int or (step is not None and named != step):
        found.reject(
            layout.TRAINER_STATE, f"global_step {str(named)[:40]}, expected {'a step' if step is None else step}"
        )
        return step
    if not isinstance(state.get("dataloader_state"), dict):
        found.reject(layout.TRAINER_STATE, "dataloader_state is missing: nothing says which row comes next")
    found.state = {"epoch": state.get("epoch") if type(state.get("epoch")) is int else None}
    found.notes.append("no manifest: nothing vouches for the content")
    return named
