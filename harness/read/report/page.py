"""The page of a report: answers first, then the figure that answers, the rest folded."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from harness.read.figures.catalogue import FIGURES
from harness.read.files import colour_rules
from harness.read.labels import counted, heading_of
from harness.read.report.sections import Section, definitions
from harness.read.table import Item, Table, html_lines, html_list
from harness.read.tables.columns import FILTERS

OPEN = ("Limits", "Not read")  # lists that nobody should have to look for


def page(folder: str, sections: Sequence[Section], problems: Sequence[str]) -> str:
    return "\n".join(_page(folder, sections, problems)) + "\n"


def _page(folder: str, sections: Sequence[Section], problems: Sequence[str]) -> Iterator[str]:
    here = Path(__file__).parent
    light, dark = colour_rules()
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="color-scheme" content="light dark">'
    yield f"<title>What was measured: {_text(folder)}</title>"
    yield f"<style>\n:root{{{light}}}"
    yield f"@media (prefers-color-scheme: dark){{:root{{{dark}}}}}"
    yield (here / "report.css").read_text("utf-8")
    yield f"</style>\n</head>\n<body>\n<h1>What was measured</h1>\n<p>{_text(folder)}</p>"
    yield from _controls()
    yield '<nav aria-label="questions"><ul>'
    for section in sections:
        short = f'<br><span class="small">{_text(section.headline)}</span>'
        link = f'<a href="#{section.name}">{_text(section.table.title)}</a>'
        yield f"<li>{link}{short if section.headline else ''}</li>"
    yield '<li><a href="#definitions">Definitions</a></li></ul></nav>'
    if problems:
        yield '<section class="problems"><h2>Not read</h2>'
        yield html_list(map(Item, problems))
        yield "</section>"
    for section in sections:
        yield from _section(section)
    yield '<section id="definitions"><h2>Definitions</h2><dl>'
    yield from (f"<dt>{_text(w)}</dt><dd>{_text(t)}</dd>" for w, t in definitions(sections).items())
    yield '</dl></section>\n<div id="tip" role="status" hidden></div>'
    yield f"<script>\n{(here / 'report.js').read_text('utf-8')}</script>\n</body>\n</html>"


def _controls() -> Iterator[str]:
    """The filters; hidden unless the script runs."""
    yield '<form id="filter" hidden><strong>Rows of all tables</strong>'
    for name in FILTERS:
        yield f'<label>{_text(heading_of(name))} <select name="{name}"></select></label>'
    yield '<button type="reset">all rows</button>'
    yield '<button type="button" id="unfold" aria-pressed="false">open everything</button>'
    yield "<output></output></form>"


def _section(section: Section) -> Iterator[str]:
    title = section.table.title
    yield f'<section id="{section.name}" class="sweep">\n<h2{_as_it_is(title)}>{_text(title)}</h2>'
    yield '<div class="lead"><div>'
    yield from _answers(section)
    for title, items in section.lists.items():
        if title in OPEN:
            yield f"<h3>{title}</h3>"
            yield html_list(items)
    yield "</div>"
    yield "<div>"
    for name in [*section.figures][: section.answering]:
        yield from _figure(section, name)
    yield "</div></div>"
    yield from _folded("Results", _table(section, section.results), section.results)
    for title, table in (("Not finished", section.not_finished), ("By node", section.nodes)):
        if table.rows:
            yield from _folded(title, _table(section, table), table)
    for title, items in section.lists.items():
        if title not in OPEN:
            yield from _folded(title, [html_list(items)])
    yield from _folded("More figures", _more_figures(section))
    yield from _folded("All that was compared", _compared(section), section.table.table)
    yield from _folded("Environment and command", _environment(section))
    yield "</section>"


def _folded(title: str, lines: Iterable[str], table: Table | None = None) -> Iterator[str]:
    """A part that opens by a click; table: its rows are counted, those a filter leaves, too."""
    count = f' <span class="count">{counted(len(table.rows), "row")}</span>' if table else ""
    yield f"<details><summary><h3>{title}</h3>{count}</summary>"
    yield from lines
    yield "</details>"


def _table(section: Section, table: Table) -> Iterator[str]:
    yield from html_lines(table)
    yield (
        f'<p class="small">All numbers as CSV: <a href="{section.name}/table.csv">by group</a>, '
        f'<a href="{section.name}/runs.csv">by run</a></p>'
    )


def _compared(section: Section) -> Iterator[str]:
    shown = section.table
    yield from _table(section, shown.table)
    yield from (f'<p class="small">{_text(text)}</p>' for text in (*shown.notes, *shown.legend))


def _environment(section: Section) -> Iterator[str]:
    yield html_list(map(Item, section.table.environment or ["unknown"]))
    if section.table.command:
        yield f"<pre><code>{_text(section.table.command)}</code></pre>"


def _more_figures(section: Section) -> Iterator[str]:
    yield '<div class="figures">'
    for name in [*section.figures][section.answering :]:
        yield from _figure(section, name)
    yield "</div>"
    if section.not_drawn:
        yield "<h4>Not drawn</h4>"
        yield html_list(Item(f"{FIGURES[n].title}: {why}") for n, why in section.not_drawn.items())


def _figure(section: Section, name: str) -> Iterator[str]:
    shown = section.figures[name]
    caption = "; ".join([FIGURES[name].title, *shown.notes])
    yield f'<figure id="{section.name}-{name}-figure"><div class="wide" tabindex="0">'
    yield shown.svg
    file = f'<a href="{section.name}/figures/{name}.svg">SVG</a>'
    yield f"</div><figcaption>{_text(caption)} ({file})</figcaption>"
    yield (
        f'<details class="words"><summary>In words</summary><p>{_text(shown.alt)}</p></details>'
        "</figure>"
    )


def _answers(section: Section) -> Iterator[str]:
    if section.hypothesis:
        text = section.hypothesis
        yield f"<h3>Hypothesis</h3>\n<p{_as_it_is(text)}>{_text(text)}</p>"
    yield "<h3>Answer</h3>"
    if section.table.about:
        yield f'<p class="small">Measured: {_text(section.table.about)}</p>'
    yield html_list(section.answers)
    if section.repeat:
        yield f"<p>Repeat when nothing else runs: <code>{_text(section.repeat)}</code></p>"
    if section.next_question:
        question, _, command = section.next_question.partition(": ")
        yield f"<p>Next: {_text(question)}: <code>{_text(command)}</code></p>"


def _as_it_is(text: str) -> str:
    """For a text that begins with a name, such as local_sgd: its first letter stays small."""
    first, *_ = text.split(maxsplit=1) or [""]
    return ' class="as_it_is"' if "_" in first else ""


def _text(text: str) -> str:
    return html.escape(str(text))
