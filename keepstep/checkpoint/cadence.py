"""When to save, to validate and to upload. Pure."""

from __future__ import annotations


def due(step: int, every: int) -> bool:
    """Whether something with this frequency falls on `step`; -1 is never."""
    return every > 0 and step % every == 0


def last_due(step: int, every: int) -> int:
    """The last step up to `step` on which something with this frequency fell; 0: none yet."""
    return step // every * every if every > 0 else 0


def upload_due(step: int, *, save_freq: int, upload_interval: int, last_step: int) -> bool:
    """Whether the checkpoint saved at `step` goes to the store: the first save at or after each multiple, and the last.

    It depends on the step alone, so an attempt that knows nothing of the earlier ones decides the same.
    """
    if step == last_step:
        return True
    if save_freq < 1:
        return False
    previous_save = ((step - 1) // save_freq) * save_freq
    return step // upload_interval > previous_save // upload_interval
