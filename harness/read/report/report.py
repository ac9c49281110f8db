"""python -m harness report [FOLDER]: one page, tables and figures of all that was measured."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from harness.core.command_line import print_json
from harness.core.records import FINISHED
from harness.core.settings import UserError
from harness.read.drawing import for_page, save
from harness.read.explain.explain import explain_sweep
from harness.read.figures.catalogue import draw_all
from harness.read.figures.panels import Styles
from harness.read.labels import label_text
from harness.read.records.baseline import group_rows, run_row
from harness.read.records.loading import UNFINISHED
from harness.read.records.runs import SKIPPED, WAITING
from harness.read.records.sweeps import SweepResults, read_all
from harness.read.report.page import Section, markdown_report, page
from harness.read.tables.files import csv_text
from harness.read.tables.results import by_node, fairness, results
from harness.read.tables.sweep_table import one_line, sweep_table


def run(options: argparse.Namespace) -> int:
    files = make_report(options.folder, options.out or options.folder / "report")
    if options.json:
        print_json({"written": files})
    else:
        print(*(f"written: {file}" for file in files), sep="\n")
    return 0


def make_report(folder: Path, out: Path) -> list[Path]:
    """Write everything below out; the page and the text are named last, when all is there."""
    parts, problems = read_all(folder)
    styles, sections = Styles(parts), list[Section]()
    for sweep in parts:
        sections.append(_section(sweep, styles, {s.name for s in sections}))
        _write_numbers(sweep, out / sections[-1].name)
        _write_figures(sections[-1], out)
    page_file, text_file = out / "report.html", out / "report.md"
    _write(page_file, page(str(folder), sections, problems))
    _write(text_file, markdown_report(str(folder), sections, problems))
    return [page_file, text_file, *(out / section.name for section in sections)]


def _section(sweep: SweepResults, styles: Styles, taken: set[str]) -> Section:
    table, _ = sweep_table(sweep)
    figures, not_drawn = draw_all(sweep, styles)
    return Section(
        name=_file_name(sweep.name, taken),
        title=table.title,
        about=table.about,
        table=table,
        results=results(sweep),
        nodes=by_node(sweep),
        figures=figures,
        not_drawn=not_drawn,
        explained=explain_sweep(sweep),
        failures=_failures(sweep),
        fairness=fairness(sweep),
        problems=sweep.problems,
    )


def _file_name(name: str, taken: set[str]) -> str:
    plain = re.sub(r"[^A-Za-z0-9.]+", "_", name).strip("_.") or "runs"
    found, number = plain, 2
    while found in taken:
        found, number = f"{plain}_{number}", number + 1
    return found


def _failures(sweep: SweepResults) -> list[tuple[str, str, str]]:
    """Every run that has not finished, but for those that have not begun: these are counted."""
    found = []
    for run in sweep.runs:
        if run.state in (FINISHED, WAITING, SKIPPED):
            continue
        state, unfinished = run.current_state, run.state == UNFINISHED
        reason = run.progress if unfinished else run.reason or "no reason was recorded"
        which = label_text(run.label, sweep.axes)
        found.append((which, f"{state}: {one_line(reason)}", run.path or ""))
    for state in (WAITING, SKIPPED):
        if number := sum(run.state == state for run in sweep.runs):
            reasons = {run.reason for run in sweep.runs if run.state == state} - {None}
            why = "; ".join(sorted(one_line(str(reason)) for reason in reasons)) or "not begun"
            found.append((f"{number} run{'s' if number > 1 else ''}", f"{state}: {why}", ""))
    return found


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
