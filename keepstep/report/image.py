"""A chart as an image of its own, for pages that take only an address: SVG as a `data:` address. Pure."""

from __future__ import annotations

import base64
from xml.sax.saxutils import escape, quoteattr

from keepstep.report.chart import HEIGHT, WIDTH, Chart

LEFT, RIGHT, TOP, BOTTOM = 70, 20, 50, 40
COLOURS = ("#2f81d6", "#d0722b", "#3a9d5d", "#9a5fc0")
SOFT = "#808790"
"""Grey that is read on white and on black: the page decides what is behind."""


def data_address(chart: Chart) -> str:
    """`data:image/svg+xml;base64,…`"""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg(chart).encode()).decode()}"


def svg(chart: Chart) -> str:
    """The chart with its labels, in colours for a light or a dark page."""
    width, height = LEFT + WIDTH + RIGHT, TOP + HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="20" fill="{SOFT}" role="img" aria-label={quoteattr(chart.summary)}>',
        f'<g transform="translate({LEFT} {TOP})" fill="none" stroke-width="3">',
        *(f'<path d="M0 {tick.at / 100 * HEIGHT:g}H{WIDTH}" stroke="{SOFT}" stroke-width="0.5"/>'
          for tick in chart.y_ticks),
        *(f'<path d="M{x:g} 0V{HEIGHT}" stroke="{SOFT}" stroke-width="1.5" stroke-dasharray="6 6"/>'
          for x in chart.cuts),
    ]  # fmt: skip
    for mark in chart.marks:
        colour = COLOURS[mark.colour % len(COLOURS)]
        parts += [f'<path d="{mark.area}" fill="{colour}" fill-opacity="0.2"/>'] if mark.area else []
        if mark.dots:
            parts.append(f'<path d="{mark.dots}" stroke="{colour}" stroke-width="10" stroke-linecap="round"/>')
        else:
            parts.append(f'<path d="{mark.line}" stroke="{colour}"/>')
    return "".join([*parts, "</g>", *_labels(chart), *_legend(chart), "</svg>"])


def _labels(chart: Chart) -> list[str]:
    """Those of both axes."""
    beside = [(LEFT - 10, TOP + tick.at / 100 * HEIGHT + 7, "end", tick.label) for tick in chart.y_ticks]
    below = [(LEFT + tick.at / 100 * WIDTH, TOP + HEIGHT + 28, "middle", tick.label) for tick in chart.x_ticks]
    return [
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(label)}</text>'
        for x, y, anchor, label in (*beside, *below)
    ]


def _legend(chart: Chart) -> list[str]:
    """Name and newest value of every series, one beside the other."""
    spans = [
        f'<tspan fill="{COLOURS[mark.colour % len(COLOURS)]}">{escape(mark.label)}</tspan> {escape(mark.newest)}'
        for mark in chart.marks
    ]
    return [f'<text x="{LEFT}" y="28">{"    ".join(spans)}</text>']
