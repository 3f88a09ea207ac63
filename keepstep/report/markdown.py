"""The state of a run as Markdown, for a page that shows it among other things. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice

from keepstep.checkpoint.plan import ResumePlan
from keepstep.doctor.evidence import Evidence, Row
from keepstep.doctor.finding import PROBLEM
from keepstep.doctor.rules import Report, examine
from keepstep.report import history, series
from keepstep.report.chart import line_chart
from keepstep.report.history import AttemptLife, CheckpointLife
from keepstep.report.image import data_address
from keepstep.report.page import Extras, facts
from keepstep.report.texts import duration_text, showable, time_text

MAX_ROWS, MAX_QUOTES, MAX_QUOTE = 20, 5, 400
IMAGE_BUCKETS = 120
YES, NO = "✓", ""
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!$&])")


def state(evidence: Evidence, extras: Extras, links: Sequence[tuple[str, str]]) -> str:
    """The page of a run: where it stands, its reward, what to do, attempts, checkpoints, where else to look.

    Args:
        links: (what, where); where is shown as code.
    """
    rows = series.last_rows(evidence.metrics)
    attempts = history.attempts(evidence)
    lives = history.checkpoints(evidence, pinned=extras.pinned, latest=extras.latest, best=extras.best)
    report = examine(evidence)
    top = list(facts(evidence, rows, attempts))
    parts = [
        f"**{text(report.state)}**",
        table([["", "now", ""], *([fact.name, f"**{text(fact.value)}**", text(fact.note)] for fact in top)]),
        reward_image(evidence, rows),
        "### What to do",
        bullets(actions(evidence, report)),
        "### Attempts",
        attempt_table(attempts),
        bullets(f"attempt {a.number}: {text(a.message[:MAX_QUOTE])}" for a in reversed(attempts) if a.message),
        "### Checkpoints",
        checkpoint_table(lives),
        bullets(
            f"step {life.step} was rejected: {text(life.rejected.text('reason')[:MAX_QUOTE])}"
            for life in reversed(lives)
            if life.rejected
        ),
        "### Where else to look",
        bullets(f"{text(what)}: `{where}`" for what, where in links),
    ]
    return "\n\n".join(part for part in parts if part)


def reward_image(evidence: Evidence, rows: Sequence[Row]) -> str:
    """The reward by step as an image; nothing before the first step."""
    width = series.width(rows, IMAGE_BUCKETS)
    names = ("critic/rewards/mean", "val/reward/mean")
    found = [one for name in names if (one := series.series(rows, name, width)) is not None]
    if not found:
        return ""
    cuts = [rewind.to for rewind in history.rewinds(evidence.events)]
    return f"![reward by step]({data_address(line_chart('Reward', found, cuts, names[1:]))})"


def actions(evidence: Evidence, report: Report) -> Iterable[str]:
    """What a person should do now."""
    problems = [finding for finding in report.findings if finding.severity == PROBLEM]
    for finding in problems:
        yield f"**{text(finding.cause)}** {text(finding.remedy)}"
    if evidence.finished:
        yield f"It is complete: `keepstep export {evidence.root}/checkpoints/latest`"
    elif evidence.at_work:
        yield "It is at work." + ("" if problems else " Nothing to do.")
    elif not problems:
        verified = evidence.verified
        where = "from the beginning" if verified is None else f"from step {verified} or better"
        yield f"The same command goes on, {where}."


def attempt_table(attempts: Sequence[AttemptLife]) -> str:
    """The newest attempts, newest first."""
    head = ["attempt", "end", "began (UTC)", "lasted", "steps", "lost"]
    rows = [
        [
            str(attempt.number),
            text(f"{attempt.end} {attempt.failure_class if attempt.failure_class != attempt.end else ''}".strip()),
            time_text(attempt.began),
            duration_text(attempt.lasted_s),
            "" if attempt.first_step is None else f"{attempt.first_step} to {attempt.last_step}",
            str(attempt.num_lost),
        ]
        for attempt in reversed(attempts[-MAX_ROWS:])
    ]
    return table([head, *rows]) if rows else "None yet."


def checkpoint_table(lives: Sequence[CheckpointLife]) -> str:
    """The newest checkpoints and those that stand, newest first, with where they are good."""
    standing = [life for life in lives if life.on_disk or life.in_store or life.rejected][-MAX_ROWS:]
    head = ["step", "here", "verified here", "in the store", ""]
    rows = [
        [
            str(life.step),
            YES if life.on_disk else NO,
            YES if life.on_disk and life.is_good else NO,
            YES if life.in_store else NO,
            ", ".join([*life.marks, *(["rejected"] if life.rejected and not life.is_good else [])]),
        ]
        for life in reversed(standing)
    ]
    return table([head, *rows]) if rows else "None yet."


def resume_rows(plan: ResumePlan) -> list[dict[str, str]]:
    """The resume decision as a table: every candidate in the order of preference, and what became of it."""
    rejected = {(rejection.step, rejection.source): rejection.reason for rejection in plan.rejections}
    rows = []
    for candidate in plan.candidates:
        key = (candidate.step, candidate.source)
        verdict, why = "not needed", "a better one was chosen"
        if key in rejected:
            verdict, why = "rejected", rejected.pop(key)
        elif key == (plan.step, plan.source):
            given_up = f"; {plan.steps_given_up} steps given up, newest is {plan.newest}" if plan.steps_given_up else ""
            verdict, why = "chosen", f"{plan.reason}{given_up}"
        rows.append({"step": str(candidate.step), "where": candidate.source, "verdict": verdict, "why": why})
    passed_over = [{"step": str(step), "where": source, "verdict": "rejected", "why": reason}
                   for (step, source), reason in rejected.items()]  # fmt: skip
    beginning = [] if plan.step is not None else [
        {"step": "0", "where": "", "verdict": "chosen", "why": f"begins at step 0: {plan.reason}"}
    ]  # fmt: skip
    return [*passed_over, *rows, *beginning]


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head. Cells are Markdown already."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def bullets(lines: Iterable[str]) -> str:
    """At most `MAX_QUOTES` lines as a list. They are Markdown already."""
    return "\n".join(f"- {line}" for line in islice(lines, MAX_QUOTES))


def text(value: str) -> str:
    """Text of the run as one line of Markdown that means nothing but itself."""
    return _SPECIAL.sub(r"\\\1", " ".join(showable(value).split()))
