"""`keepstep report`: what it counts, what it draws, and that nothing in a run can break or escape it."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from keepstep.cli.main import main
from keepstep.doctor.evidence import Line, Row, gather
from keepstep.doctor.rules import examine
from keepstep.events.log import read_jsonl
from keepstep.report import history, samples, series
from keepstep.report.chart import HEIGHT, WIDTH, line_chart, nice_ticks, stacked_chart
from keepstep.report.page import curves, most_telling, other_curves, wall_time_chart
from keepstep.report.samples import spread
from keepstep.report.texts import bytes_text, duration_text, number_text
from keepstep.run import RunDir, write_json
from tests.faults.seen import DATA, names
from tests.unit import report_runs

VOID = {"meta", "link", "br", "img", "hr", "input"}
LIMIT_BYTES = 2_000_000


class Document(HTMLParser):
    """Tags, attributes and text of a page; fails where a tag is closed that is not open."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(key, value or "") for key, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(key, value or "") for key, value in attrs]

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data


def report(run: RunDir, tmp_path: Path) -> tuple[Document, str]:
    out = tmp_path / "out.html"
    assert main(["report", str(run.root), "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    return Document(text), text


def row(**value: object) -> Row:
    text = json.dumps(value)
    return Row(Line("metrics.jsonl", 1, text), json.loads(text))


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = report_runs.preempted_often(tmp_path_factory.mktemp("eventful") / "run")
    report_runs.rollouts(run, [1, 100, 200])
    return run


def test_lost_steps_are_those_trained_more_than_once(eventful: RunDir):
    """Counted as result.json does: events of steps less different steps."""
    evidence = gather(eventful)
    steps = [event.step for event in evidence.events if event.kind == "step"]
    assert sum(attempt.num_lost for attempt in history.attempts(evidence)) == len(steps) - len(set(steps)) == 20


def test_lost_steps_of_a_random_history_agree():
    draw = random.Random(7)
    for _ in range(50):
        events, step, trained = [], 0, []
        for attempt in range(1, draw.randint(2, 6)):
            for _ in range(draw.randint(0, 30)):
                step += 1
                trained.append(step)
                events.append(row(event="step", step=step, attempt=attempt))
            step = draw.randint(0, step)
        for again in range(step + 1, max(trained, default=0) + 2):
            trained.append(again)
            events.append(row(event="step", step=again, attempt=9))
        found = history.rewinds(events)
        assert sum(rewind.num_steps for rewind in found) == len(trained) - len(set(trained))


def test_attempts_say_what_ended_them(eventful: RunDir):
    found = history.attempts(gather(eventful))
    assert [(a.end, a.first_step, a.last_step, a.num_lost) for a in found] == [
        ("killed", 1, 57, 17),
        ("failed", 41, 103, 3),
        ("preempted", 101, 150, 0),
        ("finished", 151, 200, 0),
    ]
    assert found[1].replaced == ("engine",)
    (replaced,) = [one for one in examine(gather(eventful)).findings if one.id == "worker_replaced"]
    assert replaced.cause.startswith("The engine died once and was started again")
    # Asked to leave, an hour of nothing, and half a minute of start; then the first step.
    assert found[2].until_next_step_s == pytest.approx(3630 + report_runs.metrics_of(151, 200)["timing_s/step"])


def test_a_run_at_work_has_an_attempt_that_runs():
    run = RunDir.at(DATA / "running")
    found = gather(run, now=2e9, host="node-a", boot="00000000-0000-0000-0000-000000000000", alive=lambda _: True)
    assert history.attempts(found)[-1].end == history.RUNNING
    gone = gather(run, now=2e9, host="node-a", boot="00000000-0000-0000-0000-000000000000", alive=lambda _: False)
    assert history.attempts(gone)[-1].end == history.KILLED


def test_life_of_checkpoints(eventful: RunDir):
    lives = {life.step: life for life in history.checkpoints(gather(eventful), pinned=frozenset({180}), latest=200)}
    assert sorted(lives) == list(range(20, 201, 20))
    assert (lives[200].on_disk, lives[200].in_store, lives[200].marks) == (True, True, ["latest"])
    assert (lives[180].on_disk, lives[180].in_store, lives[180].marks) == (True, False, ["pinned"])
    assert lives[80].pruned is not None and not lives[80].on_disk
    assert not lives[20].is_good and lives[40].is_good


def test_what_the_store_let_go_was_not_deleted_here(tmp_path: Path):
    story = report_runs.Story(40)
    story.start()
    story.steps(1, 40)
    story.say("checkpoint_pruned", step=20, source="s3", reason="no rule keeps it")
    story.say("checkpoint_pruned", step=40, reason="no rule keeps it")
    lives = {life.step: life for life in history.checkpoints(gather(story.write(tmp_path / "run")))}
    assert lives[20].pruned is None and lives[40].pruned is not None


def test_what_stands_or_went_wrong_is_not_left_out():
    lives = [history.CheckpointLife(step, on_disk=step in (3, 5)) for step in range(1, 11)]
    lives[0].rejected = row(event="checkpoint_rejected", step=1)
    assert [life.step for life in most_telling(lives, 5)] == [1, 3, 5, 9, 10]


def test_thinning_keeps_extremes_means_and_every_step():
    draw = random.Random(3)
    points = [(step, draw.gauss(0, 1)) for step in range(1, 10_001)]
    rows = tuple(row(step=step, value=value) for step, value in points)
    found = series.series(rows, "value", series.width(rows, 100))
    assert found is not None and len(found.buckets) <= 101
    assert (found.buckets[0].first, found.buckets[-1].last) == (1, 10_000)
    assert all(one.last + 1 == other.first for one, other in zip(found.buckets, found.buckets[1:], strict=False))
    values = [value for _, value in points]
    assert min(b.low for b in found.buckets) == min(values) and max(b.high for b in found.buckets) == max(values)
    sizes = [bucket.last - bucket.first + 1 for bucket in found.buckets]
    weighted = sum(b.mean * size for b, size in zip(found.buckets, sizes, strict=True)) / sum(sizes)
    assert weighted == pytest.approx(sum(values) / len(values))


def test_a_step_trained_again_counts_as_it_was_trained_last():
    found = series.last_rows([row(step=2, value=1), row(step=1, value=5), row(step=2, value=3), row(value=9)])
    assert [(one.step, one.number("value")) for one in found] == [(1, 5), (2, 3)]


@pytest.mark.parametrize(
    "low, high", [(0, 1), (-3.2, 7.9), (1e-9, 3e-9), (5, 5), (0, 0), (-1e200, 1e200), (99.9, 100.1)]
)
def test_ticks_enclose_what_is_drawn(low: float, high: float):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 7
    assert ticks == sorted(set(ticks))


def coordinates(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path)]


def test_a_line_goes_through_its_values():
    """Steps 1 to 3 with 0, 10, 5 on an axis from 0 to 10."""
    found = series.make("reward", [(1, 0.0), (2, 10.0), (3, 5.0)], 1)
    chart = line_chart("Reward", [found] if found else [])
    assert coordinates(chart.marks[0].line) == [(0, HEIGHT), (WIDTH / 2, 0), (WIDTH, HEIGHT / 2)]
    assert chart.marks[0].area == "" and [hint.text for hint in chart.hints][1] == "step 2\nreward 10"


def test_a_stack_adds_up():
    """Its upper edge is the sum, at every step; a part that a step lacks adds nothing."""
    parts = [series.make("a", [(1, 2.0), (2, 4.0)], 1), series.make("b", [(1, 3.0), (2, 6.0)], 1),
             series.make("c", [(2, 0.0)], 1)]  # fmt: skip
    chart = stacked_chart("Seconds", [part for part in parts if part])
    top = float(chart.y_ticks[-1].label)
    upper = coordinates(chart.marks[1].area)[:2]
    assert [y for _, y in upper] == pytest.approx([HEIGHT * (1 - 5 / top), HEIGHT * (1 - 10 / top)], abs=0.05)


def test_whatever_is_drawn_stays_in_its_plane(eventful: RunDir, tmp_path: Path):
    document, _ = report(eventful, tmp_path)
    paths = [value for key, value in document.attributes if key == "d"]
    assert len(paths) > 30
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for path in paths for x, y in coordinates(path))


def test_hostile_text_stays_text(eventful: RunDir, tmp_path: Path):
    """A response, a message, a setting with markup, control characters and lone surrogates."""
    document, text = report(eventful, tmp_path)
    assert "script" not in document.tags and "onerror" not in dict(document.attributes)
    assert document.text.count("<script>alert('x')</script>") >= 12
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", text)


def test_no_credentials_and_no_network(eventful: RunDir, tmp_path: Path):
    document, text = report(eventful, tmp_path)
    assert "store.example" in text and "secret" not in text
    linked = [value for key, value in document.attributes if key in ("src", "href", "action", "srcset")]
    assert all(value.startswith("#") for value in linked) and "@import" not in text and "url(" not in text


def test_every_chart_and_table_says_what_it_is(eventful: RunDir, tmp_path: Path):
    document, text = report(eventful, tmp_path)
    assert text.count("<svg") == text.count('role="img" aria-label="') > 12
    assert document.tags.count("table") == document.tags.count("caption")
    assert '<html lang="en">' in text and "<title>run" in text


def test_samples_are_the_best_and_the_worst(eventful: RunDir):
    """Of 14 responses in training and 2 in validation; rewards are (5 n mod 16) / 16, so each stands once."""
    found = next(step for step in samples.read(eventful) if step.step == 100)
    train = [sample.reward for sample in found.samples if sample.split == "train"]
    assert (train[0], train[-1], len(train)) == (15 / 16, 0.0, 4) and train == sorted(train, reverse=True)
    val = [(sample.reward, sample.advantage) for sample in found.samples if sample.split == "val"]
    assert val == [(11 / 16, None), (6 / 16, None)] and found.num_responses == 16


def test_samples_are_shown(eventful: RunDir, tmp_path: Path):
    document, _ = report(eventful, tmp_path)
    assert "Step 100, 6 of 16 responses" in document.text
    assert "reward 0.938, advantage 1.000" in document.text and "validation, reward 0.688" in document.text


def test_torn_rollouts_are_named_and_the_rest_is_shown(eventful: RunDir, tmp_path: Path):
    """C20: a file that ends in the middle."""
    run = RunDir.at(shutil.copytree(eventful.root, tmp_path / "run"))
    torn = run.rollouts / "step_100.parquet"
    torn.write_bytes(torn.read_bytes()[:-100])
    document, _ = report(run, tmp_path)
    assert "rollouts of step 100: cannot be read" in document.text and "Step 200, 6 of 16" in document.text


def test_ten_thousand_steps_make_a_light_file(tmp_path: Path):
    run = report_runs.preempted_often(tmp_path / "run", 10_000)
    document, text = report(run, tmp_path)
    assert len(text.encode()) < LIMIT_BYTES
    assert "of 10000" in document.text


def test_hundreds_of_attempts_and_checkpoints_make_a_light_file(tmp_path: Path):
    story = report_runs.Story(1250)
    for number in range(250):
        story.start(number * 5 or None)
        story.steps(number * 5 + 1, number * 5 + 5, save_freq=5)
    _, text = report(story.write(tmp_path / "run"), tmp_path)
    assert len(text.encode()) < LIMIT_BYTES
    assert "50 older ones are left out" in text


def test_an_empty_run(tmp_path: Path):
    run = RunDir.at(tmp_path / "run")
    write_json(run.record, {})
    document, _ = report(run, tmp_path)
    for sentence in ("No step has been finished yet.", "No attempt is on record.", "Nothing was saved yet."):
        assert sentence in document.text


def test_a_run_that_was_torn_in_mid_line(eventful: RunDir, tmp_path: Path):
    """Every file cut anywhere: there is a report, and it is as far as the last whole line tells."""
    draw = random.Random(11)
    for number in range(8):
        run = RunDir.at(shutil.copytree(eventful.root, tmp_path / f"run{number}"))
        for path in (run.record, run.events, run.metrics, run.config, run.attempt(4), run.attempt(2)):
            path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
        document, _ = report(run, tmp_path)
        steps = [event["step"] for event in read_jsonl(run.events) if event["event"] == "step"]
        assert re.search(rf"at step {steps[-1]}\b", document.text)


ODD_VALUES = [math.nan, math.inf, -math.inf, 1e308, -1e308, 10**400, True, None, "0.5", [1], {"a": 1}, -0.0, 5e-324]


def test_odd_values_of_metrics_and_events(tmp_path: Path):
    story = report_runs.Story(40)
    story.start()
    story.steps(1, 40)
    for number, value in enumerate(ODD_VALUES):
        for name in ("critic/rewards/mean", "timing_s/rollout", "made/of_its_own"):
            story.metrics[number][name] = value
        story.events[number + 2]["step"] = value
        story.say("checkpoint_saved", step=value, num_bytes=value, write_s=value)
        story.say("attempt_started", total_steps=value, checked=value)
        story.say("failed", **{"class": value, "message": value})
    document, _ = report(story.write(tmp_path / "run"), tmp_path)
    paths = "".join(value for key, value in document.attributes if key == "d")
    assert "nan" not in paths and "inf" not in paths


def test_numbers_whose_sum_is_none(tmp_path: Path):
    """Larger than anything that a metric means: left out, also where several steps share a point."""
    story = report_runs.Story(1000)
    story.start()
    story.steps(1, 1000)
    for row_of in story.metrics:
        row_of |= {"made/of_its_own": 1.7e308, "timing_s/rollout": 1.7e308, "timing_s/update": 1.7e308}
    document, _ = report(story.write(tmp_path / "run"), tmp_path)
    assert "made/of_its_own" not in document.text and "log_probs" in document.text


@pytest.mark.parametrize("name", names())
def test_every_fault_has_a_report(name: str, tmp_path: Path):
    document, text = report(RunDir.at(DATA / name), tmp_path)
    assert "What the doctor says" in text or name in ("healthy", "running")
    assert document.tags.count("h2") >= 4


def test_without_out_it_lies_in_the_run(eventful: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = RunDir.at(shutil.copytree(eventful.root, tmp_path / "run"))
    assert main(["report", str(run.root)]) == 0
    assert capsys.readouterr().out.strip() == str(run.root / "report.html")
    assert (run.root / "report.html").is_file()


def test_refusals_name_the_way_out(eventful: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "trainer.output_dir" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["report", str(eventful.root), "--out", str(tmp_path / "file" / "out.html")]) == 2
    assert "--out" in capsys.readouterr().err


def test_texts_of_numbers():
    durations = [duration_text(s).replace("\u00a0", " ") for s in (0.44, 12, 200, 7500, 273_600, 3600)]
    assert durations == ["0.4 s", "12 s", "3 min 20 s", "2 h 5 min", "3 d 4 h", "1 h"]
    numbers = [number_text(v) for v in (0.0, 0.5, 123456.0, 6.9149e-6, 2e9)]
    assert numbers == ["0", "0.5", "123456", "6.91e-06", "2e+09"]
    assert [bytes_text(n) for n in (5, 2048, 5 * 2**30)] == ["5 B", "2 KiB", "5 GiB"]
    assert spread(range(100), 4) == [0, 33, 66, 99] and spread([1, 2], 4) == [1, 2]


def test_an_attempt_without_a_step_is_a_flat_line_where_the_run_stood(tmp_path: Path):
    """Ten steps, an attempt that fails at its start, and one that goes on: time is lost, and no step."""
    story = report_runs.Story(20)
    story.start()
    story.steps(1, 10)
    story.end("preempted", **{"class": "preempted", "message": "bye"})
    story.start()
    story.end("failed", **{"class": "no_progress", "message": "Ray did not start"})
    story.start(10)
    story.steps(11, 20)
    story.end("finished", step=20)
    evidence = gather(story.write(tmp_path / "run"))
    chart = wall_time_chart(evidence, history.attempts(evidence))
    assert chart is not None and [mark.css for mark in chart.marks] == ["is-preempted", "is-failed", "is-finished"]
    first, flat, last = (coordinates(mark.line) for mark in chart.marks)
    assert first[0] == (0, HEIGHT) and last[-1] == (WIDTH, 0)
    assert {y for _, y in flat} == {HEIGHT / 2} and flat[-1][0] > flat[0][0]


def test_metrics_named_by_settings_share_a_chart(tmp_path: Path):
    """pass@k of a validation as points, parts of the reward as lines; neither stands among the others."""
    story = report_runs.Story(40)
    story.start()
    story.steps(1, 40)
    for row_of in story.metrics:
        row_of |= {"reward/format/mean": 0.5, "reward/answer/mean": 0.25}
        row_of |= {"val/pass@2": 0.6, "val/pass@4": 0.8} if row_of["step"] % 20 == 0 else {}
    rows = series.last_rows(gather(story.write(tmp_path / "run")).metrics)
    by_title = {chart.title: chart for chart in curves(rows, [])}
    assert [mark.label for mark in by_title["Validation, best of k"].marks] == ["val/pass@2", "val/pass@4"]
    assert all(mark.dots for mark in by_title["Validation, best of k"].marks)
    assert [mark.label for mark in by_title["Parts of the reward"].marks] == [
        "reward/format/mean",
        "reward/answer/mean",
    ]
    assert [chart.title for chart in other_curves(rows, [])] == ["made/of_its_own"]
