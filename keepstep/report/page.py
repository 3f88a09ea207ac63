"""The report of a run: everything that the template shows, as text and charts. Pure but for `render`'s template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from keepstep.doctor.evidence import Evidence, Row
from keepstep.doctor.finding import PROBLEM, Finding
from keepstep.doctor.rules import examine
from keepstep.report import history, series
from keepstep.report.chart import Chart, Trail, line_chart, progress_chart, stacked_chart
from keepstep.report.history import RUNNING, AttemptLife, CheckpointLife
from keepstep.report.samples import StepSamples
from keepstep.report.texts import JOIN, bytes_text, duration_text, showable, time_text, value_text

if TYPE_CHECKING:
    import jinja2

CURVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("critic/rewards/mean", "val/reward/mean")),
    ("KL to the reference", ("actor/kl_loss",)),
    ("Response length", ("response_length/mean", "response_length/max")),
    ("Truncated responses", ("response_length/clip_ratio",)),
    ("Entropy", ("actor/entropy",)),
    ("Policy loss", ("actor/pg_loss",)),
    ("Gradient norm", ("actor/grad_norm",)),
    ("Clipped tokens", ("actor/pg_clipfrac",)),
    ("Groups without signal", ("critic/rewards/zero_std_groups",)),
    ("Engine against trainer, log-probs", ("rollout/logprob_gap_max",)),
    ("Learning rate", ("actor/lr",)),
)
FAMILIES = (("Validation, best of k", "val/pass@"), ("Parts of the reward", "reward/"))
"""Metrics whose names depend on the settings, by their beginning."""
SPARSE = "val/"
"""How the names of metrics begin that few steps have."""
TIMING, WHOLE_STEP = "timing_s/", "timing_s/step"
MAX_ACTS = 7
"""Parts of a step with a colour of their own."""
MAX_OTHER_CHARTS, OTHER_BUCKETS = 48, 80
MAX_ROWS = 200
"""Rows of a table; of attempts and checkpoints there may be thousands."""
MAX_TRAILS, TRAIL_POINTS = 150, 80


@dataclass(frozen=True)
class Fact:
    """One number at the top of the page."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Extras:
    """What is not in the evidence: the pointers and pins of checkpoints, and samples of responses."""

    latest: int | None = None
    best: int | None = None
    pinned: frozenset[int] = frozenset()
    samples: tuple[StepSamples, ...] = ()


@dataclass(frozen=True)
class Page:
    """All of the report."""

    name: str
    root: str
    made: str
    state: str
    status: str
    facts: tuple[Fact, ...]
    problems: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    curves: tuple[Chart, ...]
    timing: Chart | None
    progress: Chart | None
    attempts: tuple[dict[str, str], ...]
    ends: tuple[str, ...]
    """How the attempts ended, each kind once."""
    attempts_left_out: int
    checkpoints: tuple[dict[str, str], ...]
    checkpoints_left_out: int
    samples: tuple[StepSamples, ...]
    other_curves: tuple[Chart, ...]
    environment: tuple[tuple[str, str], ...]
    checked: tuple[tuple[str, str], ...]
    contract: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, str], ...]
    settings_of: str


def build(evidence: Evidence, extras: Extras) -> Page:
    """The page of a run."""
    report = examine(evidence)
    rows = series.last_rows(evidence.metrics)
    cuts = [rewind.to for rewind in history.rewinds(evidence.events)]
    attempts = history.attempts(evidence)
    checkpoints = history.checkpoints(evidence, pinned=extras.pinned, latest=extras.latest, best=extras.best)
    shown_attempts, shown_checkpoints = attempts[-MAX_ROWS:], most_telling(checkpoints)
    newest = evidence.newest
    return Page(
        name=evidence.root.name,
        root=str(evidence.root),
        made=time_text(history.from_epoch(evidence.now)),
        state=report.state,
        status=attempts[-1].end if attempts else "none",
        facts=tuple(facts(evidence, rows, attempts)),
        problems=tuple(finding for finding in report.findings if finding.severity == PROBLEM),
        notes=tuple(finding for finding in report.findings if finding.severity != PROBLEM),
        curves=tuple(curves(rows, cuts)),
        timing=timing_chart(rows, cuts),
        progress=wall_time_chart(evidence, attempts),
        attempts=tuple(attempt_cells(attempt) for attempt in reversed(shown_attempts)),
        ends=tuple(dict.fromkeys(attempt.end for attempt in attempts)),
        attempts_left_out=len(attempts) - len(shown_attempts),
        checkpoints=tuple(checkpoint_cells(life) for life in reversed(shown_checkpoints)),
        checkpoints_left_out=len(checkpoints) - len(shown_checkpoints),
        samples=extras.samples,
        other_curves=tuple(other_curves(rows, cuts)),
        environment=tuple(environment(evidence)),
        checked=_pairs(_newest_of(evidence, "attempt_started").get("checked")),
        contract=_pairs(evidence.record.value.get("contract")),
        settings=tuple(sorted((key, setting.value) for key, setting in newest.settings.items())) if newest else (),
        settings_of=f"attempt {newest.number}" if newest else "",
    )


def facts(evidence: Evidence, rows: Sequence[Row], attempts: Sequence[AttemptLife]) -> Iterable[Fact]:
    """The numbers at the top."""
    total = evidence.total_steps
    yield Fact("step", f"{evidence.step}", f"of {total}" if total is not None else "")
    rewards = [value for row in rows if (value := series.number(row, "critic/rewards/mean")) is not None]
    if rewards:
        first, last = (sum(part) / len(part) for part in (rewards[:10], rewards[-10:]))
        yield Fact("reward", f"{last:.3f}", f"mean of the last {len(rewards[-10:])} steps; {first:.3f} of the first")
    left_s = time_left_s(evidence)
    if left_s is not None:
        yield Fact("time left", duration_text(left_s), "at the pace of the last 20 steps")
    lost = sum(attempt.num_lost for attempt in attempts)
    done = sum(attempt.num_steps for attempt in attempts)
    replaced = sum(len(attempt.replaced) for attempt in attempts)
    yield Fact("attempts", str(len(attempts)), f"and {replaced} replaced worker(s)" if replaced else "")
    yield Fact("steps lost", f"{lost}", f"of {done} that were finished" if done else "")
    verified = evidence.verified
    yield Fact("newest checkpoint", "none" if verified is None else f"{verified}", "verified, on disk")
    if evidence.confirmed:
        yield Fact("newest in the store", f"{evidence.confirmed[-1]}", "confirmed by it")


def time_left_s(evidence: Evidence) -> float | None:
    """At the pace of the last 20 steps; None for a run that is not at work or has finished no step."""
    paces = [s for row in evidence.of("step")[-20:] if (s := row.number("seconds")) is not None]
    if not evidence.at_work or evidence.total_steps is None or not paces:
        return None
    return sum(paces) / len(paces) * max(0, evidence.total_steps - evidence.step)


def curves(rows: Sequence[Row], cuts: Sequence[int]) -> Iterable[Chart]:
    """The charts that are always looked at, where the run has their metrics."""
    width, there = series.width(rows), series.names(rows)
    families = [(title, [name for name in there if name.startswith(start)]) for title, start in FAMILIES]
    for title, names in (*CURVES, *families):
        found = [one for name in names if (one := series.series(rows, name, width)) is not None]
        if found:
            yield line_chart(title, found, cuts, [name for name in names if name.startswith(SPARSE)])


def other_curves(rows: Sequence[Row], cuts: Sequence[int]) -> Iterable[Chart]:
    """Every metric that has no place of its own."""
    placed = {name for _, names in CURVES for name in names}
    width = series.width(rows, OTHER_BUCKETS)
    starts = (TIMING, *(start for _, start in FAMILIES))
    others = [name for name in series.names(rows) if name not in placed and not name.startswith(starts)]
    for name in others[:MAX_OTHER_CHARTS]:
        found = series.series(rows, name, width)
        if found is not None:
            yield line_chart(name, [found], cuts)


def timing_chart(rows: Sequence[Row], cuts: Sequence[int]) -> Chart | None:
    """Seconds of a step by what it did; the longest acts with a colour of their own, the rest together."""
    acts = [name for name in series.names(rows) if name.startswith(TIMING) and name != WHOLE_STEP]
    seconds = {act: [(row.step or 0, max(0.0, series.number(row, act) or 0.0)) for row in rows] for act in acts}
    acts.sort(key=lambda act: -sum(value for _, value in seconds[act]))
    width = series.width(rows)
    parts = [(act.removeprefix(TIMING), seconds[act]) for act in acts[:MAX_ACTS]]
    if rest := [seconds[act] for act in acts[MAX_ACTS:]]:
        steps = [row.step or 0 for row in rows]
        parts.append(
            ("other", [(s, sum(v for _, v in at)) for s, at in zip(steps, zip(*rest, strict=True), strict=True)])
        )
    found = [one for name, points in parts if (one := series.make(name, points, width)) is not None]
    return stacked_chart("Seconds per step", found, cuts) if found else None


def wall_time_chart(evidence: Evidence, attempts: Sequence[AttemptLife]) -> Chart | None:
    """Step over time, one line per attempt from its start to its end; flat while no step is finished."""
    trails, stands_at = [], 0
    for own, life in zip(evidence.attempts[-MAX_TRAILS:], attempts[-MAX_TRAILS:], strict=True):
        rows = [row for row in own.events if row.kind in ("step", "resumed", "initialised") and row.time is not None]
        if rows:
            stands_at = (rows[0].step or 0) - (rows[0].kind == "step")
        points = [(row.time.timestamp(), row.step or 0) for row in rows if row.time is not None]
        begin = [(life.began.timestamp(), stands_at)] if life.began else []
        stands_at = points[-1][1] if points else stands_at
        end = [(life.ended.timestamp(), stands_at)] if life.ended else []
        if kept := (*begin, *points[:: max(1, len(points) // TRAIL_POINTS)], *points[-1:], *end):
            trails.append(Trail(f"attempt {life.number}, {life.end}", f"is-{life.end}", kept))
    return progress_chart("Steps over time", trails) if trails else None


def attempt_cells(attempt: AttemptLife) -> dict[str, str]:
    """One row of the table of attempts."""
    steps = "none"
    if attempt.first_step is not None and attempt.last_step is not None:
        steps = f"{attempt.first_step}{JOIN}to{JOIN}{attempt.last_step}"
    why = attempt.failure_class if attempt.failure_class != attempt.end else ""
    gap = attempt.until_next_step_s
    return {
        "number": str(attempt.number),
        "end": attempt.end if attempt.end in _ENDS else "other",
        "end_text": attempt.end,
        "why": why,
        "message": attempt.message[:600],
        "host": attempt.host,
        "began": time_text(attempt.began),
        "lasted": duration_text(attempt.lasted_s),
        "steps": steps,
        "lost": str(attempt.num_lost),
        "gap": "" if gap is None else duration_text(gap),
        "replaced": ", ".join(attempt.replaced),
    }


_ENDS = ("finished", "preempted", "failed", "fenced", RUNNING, history.KILLED)


def most_telling(lives: Sequence[CheckpointLife], most: int = MAX_ROWS) -> tuple[CheckpointLife, ...]:
    """At most `most` of them, ascending: rather those that stand, or went wrong, then the newest."""
    ranked = sorted(
        lives, key=lambda life: (bool(life.marks), life.on_disk or bool(life.rejected or life.skipped), life.step)
    )
    return tuple(sorted(ranked[-most:], key=lambda life: life.step))


def checkpoint_cells(life: CheckpointLife) -> dict[str, str]:
    """One row of the table of checkpoints."""
    saved = ""
    if life.saved is not None:
        size, write_s = life.saved.number("num_bytes"), life.saved.number("write_s")
        details = [bytes_text(size) if size else "", f"in {duration_text(write_s)}" if write_s is not None else ""]
        saved = " ".join([time_text(life.saved.time), *filter(None, details)])
    problem = ""
    if life.rejected is not None:
        problem = f"rejected: {life.rejected.text('reason')[:600]}"
    elif life.skipped is not None and (life.saved is None or life.saved.source.number < life.skipped.source.number):
        problem = f"not saved: {life.skipped.text('reason')[:600]}"
    where = [name for name, there in (("here", life.on_disk), ("in the store", life.in_store)) if there]
    return {
        "step": str(life.step),
        "marks": ", ".join(life.marks),
        "where": " and ".join(where) or "gone",
        "good": "here" if life.on_disk and life.is_good else "",
        "saved": saved,
        "verified": _time_of(life.verified),
        "uploaded": _time_of(life.uploaded) or ("confirmed" if life.in_store else ""),
        "pruned": f"{_time_of(life.pruned)} ({life.pruned.text('reason')})" if life.pruned and not life.on_disk else "",
        "problem": problem,
    }


def environment(evidence: Evidence) -> Iterable[tuple[str, str]]:
    """What the run was made with, and where."""
    record = evidence.record.value
    for key, name in (("run_id", "run"), ("created", "first start"), ("keepstep", "keepstep, at the first start")):
        if key in record:
            yield name, value_text(record[key])
    for key, value in _pairs(record.get("contract")):
        if key.startswith("code."):
            yield key.removeprefix("code."), value
    model, dataset = record.get("model"), record.get("dataset")
    if isinstance(model, dict):
        yield "model", value_text(model.get("path"))
    if isinstance(dataset, dict):
        yield "rows of the data set", value_text(dataset.get("num_rows"))
    hosts = dict.fromkeys(host for attempt in evidence.attempts for host in _hosts(attempt.record.value))
    if hosts:
        yield "hosts", ", ".join(hosts)
    if waivers := record.get("waivers"):
        yield "waivers", value_text(waivers)


def render(page: Page) -> str:
    """The page as one HTML document."""
    return _template().render(page=page)


@cache
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("keepstep.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    return environment.get_template("report.html.j2")


def _shown(value: Any) -> Any:
    """What the template prints: markup of its own as it is, text of the run as it may be shown."""
    if type(value) is not str:
        return value
    return showable(value)


def _pairs(value: Any) -> tuple[tuple[str, str], ...]:
    return tuple((str(key), value_text(entry)) for key, entry in value.items()) if isinstance(value, dict) else ()


def _newest_of(evidence: Evidence, kind: str) -> dict[str, Any]:
    rows = evidence.of(kind)
    return rows[-1].value if rows else {}


def _hosts(record: dict[str, Any]) -> Iterable[str]:
    processes = record.get("processes")
    for process in processes if isinstance(processes, list) else []:
        if isinstance(process, dict) and isinstance(process.get("host"), str):
            yield process["host"]


def _time_of(row: Row | None) -> str:
    return time_text(row.time) if row is not None else ""
