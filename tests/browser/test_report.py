"""`keepstep report` in a browser: light, dark, on a phone; readable, and on its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from keepstep.cli.main import main
from tests.browser.chromium import BINARY, NO_BROWSER, Browser
from tests.unit import report_runs

pytestmark = pytest.mark.skipif(not BINARY, reason=NO_BROWSER)
PHONE, DESK = 390, 1280
CONTRAST = """
(() => {
  const context = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const rgb = (text) => { context.clearRect(0, 0, 1, 1); context.fillStyle = text; context.fillRect(0, 0, 1, 1);
                          return [...context.getImageData(0, 0, 1, 1).data]; };
  const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = (c) => { const [r, g, b] = c.map(v => linear(v / 255));
                         return .2126 * r + .7152 * g + .0722 * b; };
  const ground = (element) => { for (; element; element = element.parentElement) {
      const colour = rgb(getComputedStyle(element).backgroundColor); if (colour[3] === 255) return colour; } };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || element.closest("svg, style") || !element.checkVisibility()) continue;
    const [a, b] = [light(rgb(getComputedStyle(element).color)), light(ground(element))];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) found.push(`${element.tagName} ${element.className} ${element.textContent.slice(0, 30)} ${ratio}`);
  }
  return [...new Set(found)];
})()
"""
"""Texts whose contrast is below WCAG's 4.5 to 1."""
OPEN_ALL = "document.querySelectorAll('details').forEach(one => one.open = true)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = report_runs.preempted_often(tmp_path_factory.mktemp("runs") / "qwen3-8b-gsm8k")
    report_runs.rollouts(run, [1, 100, 200])
    assert main(["report", str(run.root)]) == 0
    return (run.root / "report.html").as_uri()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [DESK, PHONE], ids=["desk", "phone"])
def test_it_is_readable(browser: Browser, page: str, width: int, dark: bool):
    """No sideways scrolling, contrast as WCAG asks, with everything folded out."""
    browser.show(page, width=width, dark=dark)
    browser.keep(f"report-{'phone' if width == PHONE else 'desk'}-{'dark' if dark else 'light'}")
    browser.ask(OPEN_ALL)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask(CONTRAST) == []


def test_it_stands_alone(browser: Browser, page: str):
    """One file, no request, no script of its own or of a response."""
    browser.requests.clear()
    browser.show(page, width=DESK)
    assert browser.requests == [page]
    assert browser.ask("document.querySelectorAll('script').length") == 0
    assert "<script>alert('x')</script>" in browser.ask("document.body.textContent")


def test_the_curves_are_where_the_numbers_are(browser: Browser, page: str):
    """The reward's line ends where the axis has its last value: measured in pixels of the drawn page."""
    browser.show(page, width=DESK)
    shares = browser.ask("""
    (() => {
      const figure = [...document.querySelectorAll('figure')].find(f => f.querySelector('h3').textContent === 'Reward');
      const plane = figure.querySelector('svg').getBoundingClientRect();
      const labels = [...figure.querySelectorAll('.tick.y')].map(t => [+t.textContent, t.getBoundingClientRect()]);
      const ticks = labels.map(([value, box]) => [value, box.top + box.height / 2]);
      const line = figure.querySelector('.line'), end = line.getPointAtLength(line.getTotalLength());
      return {ticks, y: plane.top + plane.height * end.y / 400, x: end.x};
    })()""")
    (value, at), (other, other_at) = shares["ticks"][0], shares["ticks"][-1]
    drawn = value + (shares["y"] - at) * (other - value) / (other_at - at)
    assert drawn == pytest.approx(report_runs.metrics_of(200, 200)["critic/rewards/mean"], abs=0.01)
    assert shares["x"] == pytest.approx(1000)
