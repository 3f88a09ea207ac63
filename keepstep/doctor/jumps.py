"""A resume after which the metrics are not what they were: which part of the state did not come back. Pure.

Two comparisons. Steps that were trained before the kill and again after it must agree (the run promises the same
bytes), so the first of them tells exactly. Without such a step, the steps after the resume are held against median and
median absolute deviation of those before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from keepstep.doctor.evidence import Evidence, Quote, Row
from keepstep.doctor.finding import PROBLEM, Finding
from keepstep.waivers import gives_up_exactness

LR, KL, GRAD_NORM = "actor/lr", "actor/kl_loss", "actor/grad_norm"
REWARD, LENGTH, GAP = "critic/rewards/mean", "response_length/mean", "rollout/logprob_gap_max"
PG_LOSS, PPO_KL = "actor/pg_loss", "actor/ppo_kl"
SPOKEN = {
    LR: "the learning rate",
    KL: "the KL",
    GRAD_NORM: "the gradient norm",
    REWARD: "the reward",
    LENGTH: "the response length",
    GAP: "the log-prob gap",
    PPO_KL: "the policy's move within a step",
}
COMPARED = (LR, REWARD, LENGTH, KL, GRAD_NORM)
SAME = 1e-3
"""Relative difference of a replayed step that rounding on other hardware may make."""
NUM_BEFORE, NUM_AFTER, MIN_BEFORE = 20, 3, 5
GAP_TIMES, LEAST_GAP = 10.0, 1e-4
"""Growth, and size in nats, of the log-prob gap between engine and trainer that rounding does not explain."""
LEAST_NATS = 0.02
"""A divergence that grew by less has not jumped, however still it stood."""
FAR, TIMES = 8.0, 3.0
"""Robust deviations, and factor, beyond which a metric has jumped."""
SCHEDULER = "the learning rate is not the schedule's: the scheduler was not restored"
ENGINE = "engine and trainer drifted apart in their log-probs: the engine samples from stale weights"
WEIGHTS = "the first rollout differs already: weights, rewards or data are not those of before"
OPTIMIZER = "the rollout is the same and the update is not: the optimizer's state was not restored"
UPDATE = "an update moves the policy much further at the same learning rate: the optimizer's state was not restored"
REFERENCE_OR_WEIGHTS = "the KL is higher before updates could have made it so: the reference or the weights are others"
REFERENCE = "rollout and gradient are the same and the KL is not: the reference is another one"


@dataclass(frozen=True)
class Jump:
    """What did not come back, the metric that shows it best, and the rows before and after."""

    which: str
    key: str
    before: Row
    after: Row


def jump_after_resume(evidence: Evidence) -> list[Finding]:
    """One finding per resume that shows; where the run stopped for it, that says it already."""
    stopped = {attempt.number for attempt in evidence.attempts if attempt.failure_class == "exactness"}
    resumes = [row for row in evidence.of("resumed") if row.attempt not in stopped]
    return [_finding(row, jump) for row in resumes if (jump := jump_of(evidence, row)) is not None]


def jump_of(evidence: Evidence, resumed: Row) -> Jump | None:
    """What is not as it was after one resume."""
    if resumed.step is None:
        return None
    after = [row for row in evidence.metrics if row.attempt == resumed.attempt and (row.step or 0) > resumed.step]
    earlier = [row for row in evidence.metrics if row.attempt < resumed.attempt]
    return _replayed(evidence, earlier, after) or _deviating(earlier, after, resumed.step)


def _finding(resumed: Row, jump: Jump) -> Finding:
    key, before, after = jump.key, jump.before, jump.after
    then, now = (f"{row.number(key) or 0.0:.4g} at step {row.step}" for row in (before, after))
    change = f"{SPOKEN[key]} was {then} before, and is {now} after"
    quotes: tuple[Quote, ...] = (resumed.quote(), before.quote(key), after.quote(key))
    return Finding(
        "jump_after_resume",
        PROBLEM,
        f"After the resume at step {resumed.step} (attempt {resumed.attempt}) {jump.which}; {change}.",
        quotes,
        f"Stop the run and resume from a checkpoint before step {resumed.step}: trainer.resume_from_checkpoint=PATH. "
        "If keepstep verify calls this one good, somebody changed it, or it is our bug: report it.",
    )


def _replayed(evidence: Evidence, earlier: Sequence[Row], after: Sequence[Row]) -> Jump | None:
    """The first step that was trained twice and differs; later ones differ in consequence."""
    if _may_differ(evidence):
        return None
    first_time = {row.step: row for row in earlier}
    twice = [(first_time[row.step], row) for row in after if row.step in first_time][:NUM_AFTER]
    for then, again in twice:
        differing = [key for key in COMPARED if _differs(then.number(key), again.number(key))]
        if differing:
            return _part(then, again, differing)
    return None


def _part(then: Row, again: Row, differing: list[str]) -> Jump:
    """Which part of the state makes these metrics differ, in the order in which one explains the other."""
    if LR in differing:
        return Jump(SCHEDULER, LR, then, again)
    gap_then, gap_again = then.number(GAP) or 0.0, again.number(GAP) or 0.0
    if gap_again > max(GAP_TIMES * gap_then, LEAST_GAP):
        return Jump(ENGINE, GAP, then, again)
    if REWARD in differing or LENGTH in differing:
        return Jump(WEIGHTS, REWARD if REWARD in differing else LENGTH, then, again)
    if GRAD_NORM in differing or _differs(then.number(PG_LOSS), again.number(PG_LOSS)):
        return Jump(OPTIMIZER, differing[0], then, again)
    return Jump(REFERENCE, KL, then, again)


def _may_differ(evidence: Evidence) -> bool:
    """Whether the run accepted in writing that replayed steps differ."""
    waivers = evidence.record.value.get("waivers")
    if not isinstance(waivers, list):
        return False
    fields = [w["fields"] for w in waivers if isinstance(w, dict) and isinstance(w.get("fields"), list)]
    return gives_up_exactness(str(name) for names in fields for name in names)


def _differs(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and abs(one - other) > SAME * max(abs(one), abs(other), 1e-9)


def _deviating(earlier: Sequence[Row], after: Sequence[Row], step: int) -> Jump | None:
    """The same by statistics."""
    last = {row.step: row for row in earlier if (row.step or 0) <= step}
    before = [last[number] for number in sorted(n for n in last if n is not None)][-NUM_BEFORE:]
    after = after[:NUM_AFTER]
    if len(before) < MIN_BEFORE or not after:
        return None
    if (moved := _rate_moved(before, after)) is not None:
        return Jump(SCHEDULER, LR, before[-1], moved)
    gap = max(row.number(GAP) or 0.0 for row in after)
    if gap > max(GAP_TIMES * max(row.number(GAP) or 0.0 for row in before), LEAST_GAP):
        return Jump(ENGINE, GAP, before[-1], after[0])
    moved_far = next((row for row in after if _jumped(before, row, PPO_KL)), None)
    if moved_far is not None:
        return Jump(UPDATE, PPO_KL, before[-1], moved_far)
    if _dropped(before, after[0]):
        return Jump(WEIGHTS, REWARD, before[-1], after[0])
    if _jumped(before, after[0], KL):
        return Jump(REFERENCE_OR_WEIGHTS, KL, before[-1], after[0])
    return None


def _rate_moved(before: Sequence[Row], after: Sequence[Row]) -> Row | None:
    """The first step with another learning rate, where it had stood still: no warm-up or decay moves it so in a step.

    The optimizer brings its own rate back, so a wrong schedule shows one step later.
    """
    rates = {row.number(LR) for row in before[-3:]}
    rate = rates.pop()
    if rates or not rate:
        return None
    return next((r for r in after if (now := r.number(LR)) is not None and not 1 / TIMES < now / rate < TIMES), None)


def _jumped(before: Sequence[Row], row: Row, key: str) -> bool:
    """Whether a divergence is above all that it ever was."""
    known, value = [number for r in before if (number := r.number(key)) is not None], row.number(key)
    if value is None or len(known) < MIN_BEFORE:
        return False
    middle = median(known)
    spread = 1.4826 * median(abs(number - middle) for number in known)
    return value - middle > max(FAR * spread, LEAST_NATS) and value > TIMES * middle


def _dropped(before: Sequence[Row], first: Row) -> bool:
    """Whether the reward fell by more than it ever scattered, and by a quarter of its size."""
    known = [number for row in before if (number := row.number(REWARD)) is not None]
    value = first.number(REWARD)
    if value is None or len(known) < MIN_BEFORE:
        return False
    middle = median(known)
    spread = 1.4826 * median(abs(number - middle) for number in known)
    return middle - value > FAR * max(spread, 0.02 * abs(middle)) and middle - value > 0.25 * abs(middle)
