"""Retention in the store, after an upload: the rules of the disk, applied to what the store holds of this run.

Only with `s3.keep_remote=retention`: nobody expects a trainer to delete from a bucket unasked. A step goes when no rule
keeps it, its manifest says that this run wrote it, and it is on the local disk no more. Its manifest is deleted first,
so that a reader finds it whole or not at all. Objects of steps that lost their manifest in an earlier, interrupted
deletion follow; a shared file goes when no manifest under the prefix names it any longer.

Unfinished multipart uploads are swept in any case: they are invisible, cost money, and nobody goes on with them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from keepstep.checkpoint import layout
from keepstep.checkpoint.inventory import metric_of, rules_of
from keepstep.checkpoint.manifest import Manifest
from keepstep.checkpoint.publish import Fence
from keepstep.checkpoint.retention import Entry, decide
from keepstep.config.schema import CheckpointConfig
from keepstep.errors import CheckpointError
from keepstep.run import RunDir
from keepstep.storage.remote import SHARED, RemoteRun, object_key, step_key

Tell = Callable[[int, str], None]

_STEP_KEY = re.compile(r"checkpoints/step_(0|[1-9][0-9]*)/(.+)")
_PIN_KEY = re.compile(r"pins/(0|[1-9][0-9]*)")


def sweep_uploads(remote: RemoteRun, run: RunDir, check_fence: Fence) -> int:
    """Abort unfinished uploads under the prefix, except those of steps that wait for their upload; returns how many."""
    waiting = {step for step in run.steps() if not run.upload(step).exists()}

    def is_awaited(key: str) -> bool:
        match = _STEP_KEY.fullmatch(key)
        return match is not None and int(match.group(1)) in waiting

    check_fence()
    return sum(remote.store.abort_unfinished(prefix, keep=is_awaited) for prefix in ("checkpoints/step_", SHARED))


def retire(
    remote: RemoteRun, run: RunDir, run_id: str, checkpoint: CheckpointConfig, check_fence: Fence, tell: Tell
) -> None:
    """Delete from the store what no rule keeps; `tell(step, reason)` after each.

    Raises:
        FencedError: a newer attempt owns the run.
        StorageError: the store; what was deleted until then is gone, the rest follows at the next time.
    """
    keys = _keys_by_step(remote)
    on_disk = set(run.steps())
    stored = {step for step, names in keys.items() if layout.MANIFEST in names}
    manifests = {step: _manifest(remote, step) for step in stored}
    ours = {step: found for step, found in manifests.items() if found is not None and found.run_id == run_id}
    entries = [Entry(step, metric_of(found.metrics, checkpoint.best_metric)) for step, found in ours.items()]
    # The limit of the local disk is none of the store's.
    rules = dataclasses.replace(rules_of(checkpoint), max_disk_bytes=None)
    decision = decide(entries, rules, in_use=frozenset(on_disk), pinned=_pinned(remote, run, check_fence))
    for step, reason in decision.deleted.items():
        check_fence()
        run.upload(step).unlink(missing_ok=True)
        remote.store.delete(step_key(step, layout.MANIFEST))
        _delete(remote, [step_key(step, name) for name in keys[step] if name != layout.MANIFEST], check_fence)
        tell(step, reason)
    for step in sorted(set(keys) - stored - on_disk):
        _delete(remote, [step_key(step, name) for name in keys[step]], check_fence)
    _drop_shared(
        remote, {step: found for step, found in manifests.items() if step not in decision.deleted}, check_fence
    )


def _pinned(remote: RemoteRun, run: RunDir, check_fence: Fence) -> frozenset[int]:
    """Pinned steps, here or in the store, which is told of those here: a folder may be lost, and its pins with it."""
    found = (_PIN_KEY.fullmatch(key) for key, _ in remote.store.list_objects("pins/"))
    stored = {int(match.group(1)) for match in found if match}
    here, unpinned = run.pinned_steps(), run.unpinned_steps()
    for step in sorted(here - stored):
        check_fence()
        remote.store.put_bytes(f"pins/{step}", b"", if_absent=True)
    for step in sorted(unpinned):
        if step in stored:
            check_fence()
            remote.store.delete(f"pins/{step}")
        # Kept, it would take away a pin that another machine sets later.
        run.unpin(step).unlink(missing_ok=True)
    return frozenset(here | (stored - unpinned))


def _keys_by_step(remote: RemoteRun) -> dict[int, list[str]]:
    """Names under every step folder of the store; one listing."""
    found: dict[int, list[str]] = {}
    for key, _ in remote.store.list_objects("checkpoints/"):
        match = _STEP_KEY.fullmatch(key)
        if match:
            found.setdefault(int(match.group(1)), []).append(match.group(2))
    return found


def _manifest(remote: RemoteRun, step: int) -> Manifest | None:
    try:
        return remote.manifest(step)
    except CheckpointError:
        return None


def _drop_shared(remote: RemoteRun, staying: dict[int, Manifest | None], check_fence: Fence) -> None:
    if None in staying.values():
        # What an unreadable manifest names is not known.
        return
    named = {
        object_key(step, name, digest)
        for step, found in staying.items()
        if found
        for name, digest in found.files.items()
    }
    _delete(remote, [key for key, _ in remote.store.list_objects(SHARED) if key not in named], check_fence)


def _delete(remote: RemoteRun, keys: list[str], check_fence: Fence) -> None:
    for key in keys:
        check_fence()
        remote.store.delete(key)
