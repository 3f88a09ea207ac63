"""In which order candidates are tried. Pure."""

from __future__ import annotations

from dataclasses import dataclass

LATEST = "latest"


@dataclass(frozen=True, order=True)
class Candidate:
    """A published step somewhere."""

    step: int
    source: str
    """`local` or `s3`."""


def order(
    candidates: list[Candidate],
    *,
    policy: str,
    prefer_multiple: int,
    max_rewind_steps: int | None,
    stuck_at: int | None = None,
    final_step: int | None = None,
) -> list[tuple[Candidate, str]]:
    """Candidates in order of preference, each with the reason for its place.

    Multiples of `prefer_multiple` come first, the newest of them before the others; then the newest of the rest. A
    multiple that gives up more than `max_rewind_steps` against the newest candidate loses its precedence. So does one
    that is not above `stuck_at`, the multiple that the last attempt began at or already passed over for this reason:
    going back there again and again would be a loop. The run's last step comes before everything: nothing is left to
    train. The local copy of a step comes before the store's.
    """
    newest_first = sorted(candidates, key=lambda candidate: (-candidate.step, candidate.source != "local"))
    if policy == LATEST or not newest_first:
        return [(candidate, "newest first (resume.policy=latest)") for candidate in newest_first]
    newest = newest_first[0].step
    final: list[tuple[Candidate, str]] = []
    preferred: list[tuple[Candidate, str]] = []
    others: list[tuple[Candidate, str]] = []
    for candidate in newest_first:
        step, given_up = candidate.step, newest - candidate.step
        if final_step is not None and step == final_step:
            final.append((candidate, "the last step"))
        elif step == 0 or step % prefer_multiple:
            others.append((candidate, "newest"))
        elif max_rewind_steps is not None and given_up > max_rewind_steps:
            others.append((candidate, f"newest (a multiple of {prefer_multiple} that gives up {given_up} steps)"))
        elif stuck_at is not None and step <= stuck_at:
            others.append((candidate, f"newest (no multiple of {prefer_multiple} reached since step {stuck_at})"))
        else:
            preferred.append((candidate, f"multiple of {prefer_multiple}"))
    return final + preferred + others
