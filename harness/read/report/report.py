"""python -m harness report [FOLDER]: one page, tables and figures of all that was measured.

The page is HTML and needs nothing else; the same stands in Markdown, for a README.
"""

from __future__ import annotations

import argparse
import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.core.command_line import print_json
from harness.core.settings import UserError
from harness.read.drawing import Drawn, colour_rules, for_page, save
from harness.read.explain.explain import explain_sweep
from harness.read.figures.catalogue import FIGURES, draw_all
from harness.read.figures.panels import Styles
from harness.read.labels import label_text
from harness.read.records.baseline import baseline_of, group_rows, run_row
from harness.read.records.recorded import warn
from harness.read.records.sweeps import SweepResults, read_all
from harness.read.table import Table, escaped, html_lines, markdown_lines, table_of
from harness.read.tables.command import csv_text, markdown
from harness.read.tables.results import by_node, fairness, results
from harness.read.tables.sweep_table import SweepTable, sweep_table


@dataclass
class Section:
    """One sweep, or the runs of one task that belong to no sweep."""

    name: str  # of its folder of files
    table: SweepTable
    results: Table
    nodes: Table
    figures: dict[str, Drawn]
    not_drawn: dict[str, str]
    explained: list[str]
    fairness: list[str]
    problems: list[str]
    uncompared: str  # why there is no answer
    drawings: dict[str, str] = field(default_factory=dict)  # SVG inside the page

    @property
    def answers(self) -> list[str]:
        return self.table.answers or [self.uncompared]

    @property
    def lists(self) -> list[tuple[str, Sequence[str]]]:
        """Lists of sentences that are not empty, with their titles."""
        lists = (("Explanation", self.explained), ("Fairness", self.fairness),
                 ("Not read", self.problems))  # fmt: skip
        return [(title, texts) for title, texts in lists if texts]


# Words that all tables use; each table defines its own besides.
DEFINITIONS = {
    "samples/s": "training samples of the timed steps over all processes, divided by their time; "
    "evaluation, saving and the first steps are left out.",
    "training time": "the training part of all epochs, without evaluation and saving.",
    "wall time": "everything from the start of a run to its end, all attempts added up.",
    "loss, top-1, top-5": "of the last epoch, over the whole evaluation set, each sample once.",
    "effective batch": "samples of one update over all processes.",
    "±": "sample standard deviation over the seeds; bands and bars in figures are 95 % intervals "
    "of the mean (Student's t), points are single runs.",
    "scaling efficiency": "weak X_N/(N X_1) of samples/s at equal batch per device, strong "
    "T_1/(N T_N) of training time at equal effective batch.",
    "time to accuracy": "training time to the end of the first epoch that reaches the target; a "
    "miss is infinite, and is counted.",
    "where the time went": "of the median rank, means over the seeds; what the records do not "
    "separate is one part.",
}


def run(options: argparse.Namespace) -> int:
    files = make_report(options.folder, options.out or options.folder / "report")
    if options.json:
        print_json({"written": files})
    else:
        print(*(f"written: {file}" for file in files), sep="\n")
    return 0


def make_report(folder: Path, out: Path) -> list[Path]:
    """Write everything below out; the page and the text are named last, when all is there."""
    sweeps, problems = read_all(folder)
    warn([*problems, *(line for sweep in sweeps for line in sweep.problems)])
    styles, sections = Styles(sweeps), list[Section]()
    for sweep in sweeps:
        try:
            section = _section_of(sweep, styles, {s.name for s in sections})
            _write_numbers(sweep, out / section.name)
            _write_figures(section, out)
        except UserError:
            raise
        except Exception as error:  # the rest of the page is whole
            problems.append(f"{sweep.name} is not shown: {type(error).__name__}: {error}")
            warn(problems[-1:])
        else:
            sections.append(section)
    page_file, text_file = out / "report.html", out / "report.md"
    _write(page_file, page(str(folder), sections, problems))
    _write(text_file, markdown_report(str(folder), sections, problems))
    return [page_file, text_file, *(out / section.name for section in sections)]


def _section_of(sweep: SweepResults, styles: Styles, taken: set[str]) -> Section:
    table, _ = sweep_table(sweep)
    figures, not_drawn = draw_all(sweep, styles)
    return Section(
        name=_file_name(sweep.name, taken),
        table=table,
        results=results(sweep),
        nodes=by_node(sweep),
        figures=figures,
        not_drawn=not_drawn,
        explained=explain_sweep(sweep),
        fairness=fairness(sweep),
        problems=sweep.problems,
        uncompared=_uncompared(sweep),
    )


def _uncompared(sweep: SweepResults) -> str:
    if sweep.baseline is None:
        return "Nothing is compared: no baseline is named."
    found = any(g.finished and baseline_of(sweep, g) is g for g in sweep.groups)
    named = label_text(sweep.baseline, sweep.axes)
    which = "beside" if found else "of"
    return f"Nothing is compared: no finished run {which} the baseline ({named})."


def _file_name(name: str, taken: set[str]) -> str:
    plain = re.sub(r"[^A-Za-z0-9.]+", "_", name).strip("_.") or "runs"
    free, number = plain, 2
    while free in taken:
        free, number = f"{plain}_{number}", number + 1
    return free


def _write_numbers(sweep: SweepResults, folder: Path) -> None:
    _write(folder / "table.csv", csv_text(group_rows(sweep)))
    rows = [run_row(sweep, run) for run in sweep.runs]
    _write(folder / "runs.csv", csv_text(rows))


def _write_figures(section: Section, out: Path) -> None:
    """The page's drawing first: a figure is dark when it has been saved, and then let go."""
    for name, drawn in section.figures.items():
        section.drawings[name] = for_page(drawn, f"{section.name}-{name}")
        save(drawn, out / section.name / "figures", name)
        drawn.figure.clear()


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from None


def markdown_report(folder: str, sections: Sequence[Section], problems: Sequence[str]) -> str:
    return "\n".join(_lines(folder, sections, problems)) + "\n"


def _lines(folder: str, sections: Sequence[Section], problems: Sequence[str]) -> Iterator[str]:
    yield f"# What was measured: {escaped(folder)}"
    for problem in problems:
        yield f"\n- {escaped(problem)}"
    yield "\n## Answers"
    for section in sections:
        yield f"\n**{escaped(section.table.title)}**\n"
        yield from (f"- {escaped(text)}" for text in section.answers)
    for section in sections:
        yield ""
        yield markdown(section.table).rstrip().replace("### ", "## ", 1)
        yield "\n### Results\n"
        yield from markdown_lines(section.results)
        if section.nodes.rows:
            yield "\n### By node\n"
            yield from markdown_lines(section.nodes)
        for title, texts in section.lists:
            yield f"\n### {title}\n"
            yield from (f"- {escaped(text)}" for text in texts)
        if section.table.not_finished:
            yield "\n### Not finished\n"
            for which, what, _ in section.table.not_finished:
                yield f"- {escaped(which)}: {escaped(what)}"
        if section.figures:
            yield "\n### Figures"
        for name, drawn in section.figures.items():
            alt = escaped(drawn.alt.replace("]", ")").replace("[", "("))
            yield f"\n![{alt}]({section.name}/figures/{name}.png)"
            yield f"\n{FIGURES[name][1]}" + "".join(f"; {escaped(note)}" for note in drawn.notes)
    yield "\n## Definitions\n"
    yield from (f"- **{word}**: {text}" for word, text in DEFINITIONS.items())


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
    yield "<nav><ul>"
    for section in sections:
        yield f'<li><a href="#{section.name}">{_text(section.table.title)}</a>'
        yield from _list(section.answers)
        yield "</li>"
    yield '<li><a href="#definitions">Definitions</a></li></ul></nav>'
    if problems:
        yield '<section class="problems"><h2>Not read</h2>'
        yield from _list(problems)
        yield "</section>"
    for section in sections:
        yield from _section(section)
    yield '<section id="definitions"><h2>Definitions</h2><dl>'
    yield from (f"<dt>{_text(w)}</dt><dd>{_text(t)}</dd>" for w, t in DEFINITIONS.items())
    yield '</dl></section>\n<div id="tip" role="status" hidden></div>'
    yield f"<script>\n{(here / 'report.js').read_text('utf-8')}</script>\n</body>\n</html>"


def _section(section: Section) -> Iterator[str]:
    shown = section.table
    yield f'<section id="{section.name}">\n<h2>{_text(section.table.title)}</h2>'
    yield f"<p>{_text(section.table.about)}</p>"
    yield from _list(section.answers)
    yield "<h3>Results</h3>"
    yield from html_lines(section.results)
    for title, texts in section.lists:
        yield f"<h3>{title}</h3>"
        yield from _list(texts)
    if shown.not_finished:
        yield "<h3>Not finished</h3>"
        rows = [(which, what, path or "") for which, what, path in shown.not_finished]
        yield from html_lines(table_of(["run", "outcome", "record"], rows))
    yield from _figures(section)
    if section.nodes.rows:
        yield "<h3>By node</h3>"
        yield from html_lines(section.nodes)
    yield "<h3>All that was compared</h3>"
    yield from html_lines(shown.table)
    yield from (f'<p class="small">{_text(text)}</p>' for text in (*shown.notes, *shown.legend))
    yield "<h3>Environment and command</h3>"
    yield from _list(shown.environment or ["unknown"])
    if shown.command:
        yield f"<pre><code>{_text(shown.command)}</code></pre>"
    yield "</section>"


def _figures(section: Section) -> Iterator[str]:
    yield "<h3>Figures</h3>"
    for name, drawn in section.figures.items():
        caption = "; ".join([FIGURES[name][1], *drawn.notes])
        yield f'<figure id="{section.name}-{name}-figure"><div class="wide">'
        yield section.drawings[name]
        files = ", ".join(
            f'<a href="{section.name}/figures/{name}.{kind}">{kind.upper()}</a>'
            for kind in ("svg", "png")
        )
        yield f"</div><figcaption>{_text(caption)} ({files})</figcaption>"
        yield f"<details><summary>In words</summary><p>{_text(drawn.alt)}</p></details></figure>"
    if section.not_drawn:
        yield "<details><summary>Figures that these records cannot fill</summary>"
        yield from _list([f"{FIGURES[n][1]}: {why}" for n, why in section.not_drawn.items()])
        yield "</details>"


def _list(texts: Sequence[str]) -> Iterator[str]:
    yield "<ul>" + "".join(f"<li>{_text(text)}</li>" for text in texts) + "</ul>"


def _text(text: str) -> str:
    return html.escape(str(text))
