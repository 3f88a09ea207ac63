"""What a run shows besides how its attempts ended: one rule per cause, data in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from shlex import quote as shell

from keepstep.doctor.ends import SAME_COMMAND
from keepstep.doctor.evidence import Evidence, Quote, Row
from keepstep.doctor.finding import NOTE, PROBLEM, Finding
from keepstep.waivers import gives_up_exactness

IDENTICAL, EQUAL = "rollout/identical_groups", "critic/rewards/zero_std_groups"
TEMPERATURE = "actor_rollout_ref.rollout.temperature"
MANY, MIN_ROWS = 0.9, 3
"""Share of groups, over so many steps at least, that no chance explains."""
MOST_SKEW_S = 5.0
"""Clocks of one cluster that are further apart than this are wrong."""


def stands_still(evidence: Evidence) -> list[Finding]:
    """The newest attempt is open and nobody works on it."""
    if evidence.newest is None or evidence.claim.kind not in ("dead", "silent", "orphan"):
        return []
    quotes = (evidence.newest.record.quote('"heartbeat":'), evidence.newest.record.quote('"outcome":'))
    last = evidence.newest.events[-1].quote() if evidence.newest.events else None
    return [
        Finding(
            "stands_still",
            PROBLEM,
            f"Nobody works on the run: {_gone(evidence)}, and it left no outcome.",
            tuple(quote for quote in (*quotes, last) if quote),
            SAME_COMMAND,
            frozenset({evidence.newest.number}),
        )
    ]


def identical_responses(evidence: Evidence) -> list[Finding]:
    """From the first step on: sampling is broken. Only later: the policy has become certain, which may be its goal."""
    rows = _last_rows(evidence)
    share = lambda row: row.number(IDENTICAL)  # noqa: E731
    if not _high(rows[-MIN_ROWS:], share):
        return []
    early = _high(rows[:MIN_ROWS], share)
    cause = f"The responses of a group are all the same text in {_percent(rows[-1], IDENTICAL)} of the groups"
    temperature = evidence.newest.settings.get(TEMPERATURE) if evidence.newest else None
    quotes = [rows[-1].quote(IDENTICAL)] + ([temperature.quote] if temperature else [])
    return [
        Finding(
            "identical_responses",
            PROBLEM if early else NOTE,
            f"{cause}, from the first steps on: nothing is compared, so nothing is learnt "
            f"({TEMPERATURE}={temperature.value if temperature else '?'})."
            if early
            else f"{cause}, and were not at first: the policy has collapsed, or has learnt what there is.",
            tuple(quotes),
            "Raise actor_rollout_ref.rollout.temperature (1.0) in a run of its own; with a temperature near 1 look at "
            "the model: does it sample at all?",
        )
    ]


def rewards_equal(evidence: Evidence) -> list[Finding]:
    """All rewards of each group are equal, though the responses are not."""
    rows = _last_rows(evidence)
    if identical_responses(evidence) or not _high(rows[-MIN_ROWS:], _share_equal, least=1.0):
        return []
    always = _high(rows, _share_equal, least=1.0)
    last = rows[-1]
    reward = last.number("critic/rewards/mean")
    key = EQUAL if last.number(EQUAL) is not None else "critic/rewards/max"
    said = f"{reward:g}" if reward is not None else "the same"
    return [
        Finding(
            "rewards_equal",
            PROBLEM if always else NOTE,
            f"All rewards of a group are equal in every step (mean {said}): no advantage, so nothing is learnt."
            if always
            else f"The rewards of each group are all equal now (mean {said}), and were not at first: nothing is left "
            "to learn here, or the policy has collapsed.",
            (last.quote(key), last.quote("critic/rewards/mean")),
            "See what the reward function returns for a right and for a wrong response: custom_reward_function."
            if always
            else "Look at val/reward/mean: if it is good, the run is done; else go back to an earlier checkpoint.",
        )
    ]


def learning_rate_zero(evidence: Evidence) -> list[Finding]:
    rows = [row for row in _last_rows(evidence)[-MIN_ROWS:] if row.number("actor/lr") == 0]
    if len(rows) < MIN_ROWS:
        return []
    return [
        Finding(
            "learning_rate_zero",
            PROBLEM,
            f"The learning rate is 0 since step {rows[0].step} or before: nothing is learnt.",
            (rows[-1].quote("actor/lr"),),
            "See actor_rollout_ref.actor.optim: lr, lr_scheduler_type, min_lr_ratio and the schedule's end, "
            "trainer.total_training_steps.",
        )
    ]


def clock_skew(evidence: Evidence) -> list[Finding]:
    """Times that go backwards from line to line, or lie in the future."""
    quotes: list[Quote] = []
    worst = 0.0
    previous: tuple[datetime, Row] | None = None
    for row in evidence.events:
        if row.time is None:
            continue
        back_s = (previous[0] - row.time).total_seconds() if previous else 0.0
        # Within an attempt the uploader's thread and the loop write beside each other, but with one clock.
        if previous and back_s > MOST_SKEW_S:
            worst = max(worst, back_s)
            quotes = quotes or [previous[1].quote("time"), row.quote("time")]
        previous = (row.time, row)
    heartbeat = evidence.newest.record.value.get("heartbeat") if evidence.newest else None
    ahead_s = heartbeat - evidence.now if isinstance(heartbeat, int | float) else 0.0
    if evidence.newest and ahead_s > MOST_SKEW_S and (found := evidence.newest.record.quote('"heartbeat":')):
        worst, quotes = max(worst, ahead_s), [*quotes, found]
    if not quotes:
        return []
    return [
        Finding(
            "clock_skew",
            NOTE if evidence.finished else PROBLEM,
            f"Clocks disagree by {worst:.0f} s: times go backwards in the run's own order, or lie in the future.",
            tuple(quotes),
            "Synchronise the hosts' clocks (timedatectl, chronyc tracking): the lease of an attempt on another host is "
            "judged by its heartbeat's time.",
        )
    ]


def overtaken(evidence: Evidence) -> list[Finding]:
    """An older attempt that never ended by its own word, and wrote, or lived, after a newer one had begun."""
    found = []
    for older, newer in zip(evidence.attempts, evidence.attempts[1:], strict=False):
        started = next((row for row in newer.events if row.kind == "attempt_started"), None)
        own_host, next_host = (_host(attempt.record.value) for attempt in (older, newer))
        if older.outcome or started is None or own_host == next_host:
            continue
        quotes = (older.record.quote('"outcome":'), older.record.quote('"host":'), started.quote())
        found.append(
            Finding(
                "fenced",
                NOTE,
                f"Attempt {older.number} on {own_host} fell silent and was overtaken by attempt {newer.number} on "
                f"{next_host}: it may write nothing any more.",
                tuple(quote for quote in quotes if quote),
                f"If {own_host} was alive all the time, raise retry.lease_timeout_s; end what it left there.",
                frozenset({older.number}),
            )
        )
    return found


def died_without_a_word(evidence: Evidence) -> list[Finding]:
    """Attempts that were killed as a whole and gone on with."""
    hits = [a for a in evidence.attempts[:-1] if not a.outcome]
    if not hits:
        return []
    numbers = ", ".join(str(hit.number) for hit in hits)
    return [
        Finding(
            "killed",
            NOTE,
            f"Attempt {numbers} was killed before it could say a word; a later one went on.",
            tuple(quote for hit in hits[-2:] if (quote := hit.record.quote('"outcome":'))),
            "Nothing to do.",
            frozenset(hit.number for hit in hits),
        )
    ]


def record_missing(evidence: Evidence) -> list[Finding]:
    """Without its record no start knows the run, whatever else is whole."""
    there = evidence.record.value or any(quote.file == "run.json" for quote in evidence.unreadable)
    if there or (evidence.newest is None and evidence.step == 0):
        return []
    return [
        Finding(
            "record_missing",
            PROBLEM,
            "run.json is gone: no start takes this folder for a run, although it was one.",
            (Quote("run.json", 0, "not there"),),
            "Bring it back (a store, where one is configured, has it). Without it the weights are of use: "
            f"trainer.init_from={shell(str(evidence.root))}/checkpoints/latest in a run of its own.",
        )
    ]


def damaged_checkpoints(evidence: Evidence) -> list[Finding]:
    rejected = evidence.of("checkpoint_rejected")
    # What a retrained step replaced was good.
    names = [name for name in evidence.quarantine if ".replaced." not in name]
    if not rejected and not names:
        return []
    steps = ", ".join(str(step) for step in sorted({row.step for row in rejected if row.step is not None}))
    good = evidence.verified
    aside = tuple(Quote(f"quarantine/{name}", 0, "set aside") for name in names[-3:])
    return [
        Finding(
            "damaged_checkpoint",
            NOTE if evidence.finished or good is not None else PROBLEM,
            f"The checkpoint of step {steps or 'an earlier attempt'} did not verify and was set aside"
            + (f"; step {good} is good." if good is not None else "; no other is known to be good."),
            tuple(row.quote() for row in rejected[-2:]) + aside,
            "Look at the disk (dmesg, smartctl) if nobody changed the files. When you need them no more: "
            f"rm -r {shell(str(evidence.root))}/quarantine",
        )
    ]


def save_skipped(evidence: Evidence) -> list[Finding]:
    """Saves that found no room and were passed over; a run that failed for want of room says so by itself."""
    skipped = evidence.of("checkpoint_skipped")
    if not skipped or (evidence.newest and evidence.newest.failure_class == "no_room"):
        return []
    saved = [row.step for row in evidence.of("checkpoint_saved") if row.step is not None]
    saved_later = max(saved, default=0) > (skipped[-1].step or 0)
    steps = ", ".join(str(row.step) for row in skipped[-5:])
    return [
        Finding(
            "save_skipped",
            NOTE if saved_later else PROBLEM,
            f"There was no room to save step {steps}, and checkpoint.on_no_room=skip went on without"
            + (
                "; later saves found room."
                if saved_later
                else f": a kill now costs all steps since {evidence.verified}."
            ),
            (skipped[-1].quote(),),
            f"Free space: keepstep prune {shell(str(evidence.root))} --dry-run says what would go by the rules.",
        )
    ]


def uploads_behind(evidence: Evidence) -> list[Finding]:
    """Uploads that failed and were not made good; a run that failed for them says so by itself."""
    # What has left the disk, by the rules or since it was damaged, is owed no more.
    owed = set(evidence.steps) - set(evidence.confirmed)
    failed = [row for row in evidence.of("upload_failed") if row.step in owed]
    ended_for_it = evidence.newest is not None and evidence.newest.failure_class in ("storage", "storage_refused")
    if not failed or ended_for_it or evidence.finished:
        return []
    steps = ", ".join(str(step) for step in sorted({row.step for row in failed if row.step is not None}))
    return [
        Finding(
            "uploads_behind",
            PROBLEM,
            f"Step {steps} is not confirmed in the store: uploads fail.",
            (failed[-1].quote(),),
            f"See that the store answers; try one by hand: keepstep upload {shell(str(evidence.root))}",
        )
    ]


def few_rows(evidence: Evidence) -> list[Finding]:
    """A batch that takes rows more than once."""
    batch = evidence.newest.settings.get("data.train_batch_size") if evidence.newest else None
    dataset = evidence.record.value.get("dataset")
    rows = dataset.get("num_rows") if isinstance(dataset, dict) else None
    if batch is None or not batch.value.isdecimal() or type(rows) is not int or rows >= int(batch.value[:9]):
        return []
    quotes = (evidence.record.quote(f'"num_rows": {rows}'), batch.quote)
    return [
        Finding(
            "few_rows",
            PROBLEM,
            f"The data has {rows} rows and a batch takes {batch.value}: every step trains on all of them, and repeats "
            "some.",
            tuple(quote for quote in quotes if quote),
            "Give more data (data.train_files) or a smaller data.train_batch_size, in a run of its own.",
        )
    ]


def waived(evidence: Evidence) -> list[Finding]:
    waivers = evidence.record.value.get("waivers")
    lists = [w.get("fields") for w in waivers if isinstance(w, dict)] if isinstance(waivers, list) else []
    fields = [str(field) for fields in lists if isinstance(fields, list) for field in fields]
    if not fields:
        return []
    lost = " Exact bytes are promised no more." if gives_up_exactness(fields) else ""
    return [
        Finding(
            "waived",
            NOTE,
            f"Accepted knowingly (resume.allow): {', '.join(sorted(set(fields)))}.{lost}",
            tuple(quote for quote in (evidence.record.quote('"waivers":'),) if quote),
            "Nothing to do.",
        )
    ]


def unreadable(evidence: Evidence) -> list[Finding]:
    """Torn last lines are what a kill leaves; a document that is not whole is damage."""
    if not evidence.unreadable:
        return []
    whole = [quote for quote in evidence.unreadable if not quote.line]
    return [
        Finding(
            "unreadable",
            PROBLEM if whole else NOTE,
            f"{len(evidence.unreadable)} lines or files cannot be read"
            + (": something has damaged them." if whole else ": torn by a kill, and skipped by every reader."),
            tuple((whole or list(evidence.unreadable))[:3]),
            "Bring them back from a copy (the store has run.json and config.yaml)." if whole else "Nothing to do.",
        )
    ]


def _gone(evidence: Evidence) -> str:
    return evidence.claim.reason.partition(" has been silent for")[0] + (
        " has been silent for longer than retry.lease_timeout_s" if evidence.claim.kind == "silent" else ""
    )


def _host(record: dict[str, object]) -> str:
    owner = record.get("owner")
    host = owner.get("host") if isinstance(owner, dict) else None
    return host if isinstance(host, str) else "an unknown host"


def _last_rows(evidence: Evidence) -> list[Row]:
    """The last row of every step, ascending; that of step 0 tells of no training."""
    rows = {row.step: row for row in evidence.metrics if row.step}
    return [rows[step] for step in sorted(rows)]


def _share_equal(row: Row) -> float | None:
    """Share of groups without any difference of rewards; of older releases known only when there is none at all."""
    if row.number(EQUAL) is not None:
        return row.number(EQUAL)
    least, most = row.number("critic/rewards/min"), row.number("critic/rewards/max")
    return None if least is None or most is None else float(least == most)


def _high(rows: Sequence[Row], share: Callable[[Row], float | None], least: float = MANY) -> bool:
    shares = [share(row) for row in rows]
    return len(shares) >= MIN_ROWS and all(found is not None and found >= least for found in shares)


def _percent(row: Row, key: str) -> str:
    return f"{100 * (row.number(key) or 0):.0f} %"
