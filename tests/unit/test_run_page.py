"""The run's state as Markdown: what a renderer makes of it, and that a run's text means nothing but itself."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from keepstep.cli.report_command import extras
from keepstep.config.load import load
from keepstep.doctor.evidence import gather
from keepstep.report.markdown import state, text
from keepstep.run import RunDir
from tasks.artifacts import key_of, links, progress_text
from tests.faults.seen import DATA, names
from tests.unit import report_runs

LINKS = [("report", "keepstep report runs/x")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return report_runs.preempted_often(tmp_path_factory.mktemp("runs") / "run")


def markdown_of(run: RunDir) -> str:
    return state(gather(run), extras(run), LINKS)


def html_of(markdown: str) -> str:
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)


def test_hostile_text_stays_text(run: RunDir):
    """A message with markup, in a renderer that lets HTML pass."""
    html = html_of(markdown_of(run))
    assert "<script" not in html and "&lt;script&gt;alert('x')&lt;/script&gt;" in html


@pytest.mark.parametrize(
    "value", ["a|b", "`x`", "*bold* _it_ ~no~", "[a](b)", "<b>", "1\n2", "\\|", "$x$ & #1!", "{x}"]
)
def test_any_text_fits_into_a_cell(value: str):
    html = html_of(f"| a | b |\n|---|---|\n| {text(value)} | end |")
    cells = re.findall("<td>(.*?)</td>", html)
    shown = " ".join(value.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert cells == [shown, "end"]


def test_attempts_and_checkpoints_with_their_marks(run: RunDir):
    html = html_of(markdown_of(run))
    rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", html, re.DOTALL)]
    by_first = {row[0]: row for row in rows if row}
    assert by_first["4"][1] == "finished" and by_first["1"][1] == "killed" and by_first["1"][5] == "17"
    # Step, here, verified here, in the store, marks.
    assert by_first["200"] == ["200", "✓", "✓", "✓", "latest"]
    assert by_first["180"] == ["180", "✓", "✓", "", ""]
    assert by_first["20"] == ["20", "", "", "", "rejected"]
    assert "<li>step 20 was rejected: " in html and "<li>attempt 2: rank 1 died" in html


def test_the_curve_is_an_image_that_can_be_read(run: RunDir):
    found = re.search(r"!\[reward by step\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", markdown_of(run))
    assert found is not None
    image = ElementTree.fromstring(base64.b64decode(found[1]))
    words = ["".join(element.itertext()) for element in image.iter("{http://www.w3.org/2000/svg}text")]
    newest = report_runs.metrics_of(200, 200)["critic/rewards/mean"]
    assert any(f"critic/rewards/mean {newest:.4g}" in word for word in words)
    assert {"50", "100", "150", "200"} <= set(words)


@pytest.mark.parametrize("name", names())
def test_every_fault_has_its_state_and_what_to_do(name: str):
    markdown = markdown_of(RunDir.at(DATA / name))
    assert markdown.startswith("**") and "### What to do\n\n- " in markdown
    assert len(markdown) < 60_000


def test_a_key_is_what_prefect_takes():
    """Lower-case letters, digits, dashes; two folders of one name have two keys."""
    one, other = (key_of(RunDir.at(path)) for path in ("/a/Qwen3 8B_ü", "/b/Qwen3 8B_ü"))
    assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", one) and one != other


def test_time_left_is_told():
    assert progress_text(10, 40, [2.0, 4.0]).replace("\u00a0", " ") == "step 10 of 40, 1 min 30 s left"
    assert progress_text(40, 40, []) == "step 40 of 40"


def test_links_name_the_dashboard_of_a_cluster(tmp_path: Path):
    folder, run = f"trainer.output_dir={tmp_path}/run", RunDir.at(tmp_path / "run")
    assert "Ray dashboard" not in dict(links(load("quickstart", [folder]), run))
    cluster = load("quickstart", [folder, "ray.address=http://head:8265"])
    assert ("Ray dashboard", "http://head:8265") in links(cluster, run)


def test_links_name_the_store(tmp_path: Path):
    folder = f"trainer.output_dir={tmp_path}/run"
    run = RunDir.at(tmp_path / "run")
    remote = load("quickstart", [folder, "s3.embedded=false", "s3.bucket=b", "s3.prefix=p"])
    assert ("store", "s3://b/p") in links(remote, run)
    assert f"tensorboard --logdir {run.tensorboard}" in dict(links(load("quickstart", [folder]), run)).values()
