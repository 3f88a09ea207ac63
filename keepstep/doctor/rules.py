"""All rules in order, what they find together, and the one sentence about where the run stands."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.doctor import signs
from keepstep.doctor.ends import ENDS, Rule, fenced, preempted, writer_lost
from keepstep.doctor.evidence import Evidence
from keepstep.doctor.finding import PROBLEM, Finding
from keepstep.doctor.jumps import jump_after_resume

RULES: tuple[Rule, ...] = (
    *(rule for rule in ENDS if rule not in (fenced, preempted, writer_lost)),
    signs.stands_still, jump_after_resume, signs.identical_responses, signs.rewards_equal, signs.learning_rate_zero,
    signs.record_missing, signs.clock_skew, signs.uploads_behind, signs.save_skipped, signs.few_rows,
    signs.damaged_checkpoints,
    signs.overtaken, fenced, signs.unreadable, preempted, signs.died_without_a_word, writer_lost, signs.waived,
)  # fmt: skip
"""The most telling first: what a rule explains, a later one does not explain again."""
ADDS = ("repeated_failure", "budget_gone")
"""Say why nobody tries again, also where the failure itself is explained already."""


@dataclass(frozen=True)
class Report:
    """What the doctor says."""

    state: str
    """Where the run stands, in one sentence."""
    findings: tuple[Finding, ...]
    """Problems first, then notes; within each the most telling first."""

    @property
    def healthy(self) -> bool:
        return not any(finding.severity == PROBLEM for finding in self.findings)


def examine(evidence: Evidence) -> Report:
    """Ask every rule; an attempt whose end is explained is not explained twice."""
    found: list[Finding] = []
    explained: set[int] = set()
    for rule in RULES:
        for finding in rule(evidence):
            known = finding.explains and finding.explains <= explained
            if known and finding.id not in ADDS:
                continue
            found.append(finding)
            explained |= finding.explains
    # A stable sort: the order of the rules holds within each severity.
    found.sort(key=lambda finding: finding.severity != PROBLEM)
    return Report(state(evidence), tuple(found))


def state(evidence: Evidence) -> str:
    """Where the run stands."""
    total = evidence.total_steps
    where = f"at step {evidence.step}" + (f" of {total}" if total is not None else "")
    good = (
        "no verified checkpoint yet"
        if evidence.verified is None
        else f"last verified checkpoint: step {evidence.verified}"
    )
    if evidence.newest is None:
        if evidence.step:
            return f"trained to step {evidence.step}, but attempts/ is gone; {good}"
        return "never started: no attempt is recorded"
    status = evidence.newest.outcome.get("status")
    if evidence.at_work:
        doing = f"running as attempt {evidence.newest.number}"
    elif evidence.claim.kind in ("dead", "silent", "orphan"):
        doing = f"standing still since attempt {evidence.newest.number}"
    else:
        doing = {"finished": "finished", "preempted": "asked to leave, not finished"}.get(
            str(status), "failed, not finished"
        )
    return f"{doing}, {where}; {good}"
