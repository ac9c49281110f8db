"""python -m harness report [FOLDER]: one page, tables and figures of all that was measured.

The page is HTML and needs nothing else; the same stands in Markdown, for a README.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from harness.core.command_line import print_json
from harness.core.process import working
from harness.core.records.disk import write_whole
from harness.core.settings import UserError
from harness.read.compare.answers import failed_variants
from harness.read.compare.expected import tally
from harness.read.compare.fastest import first_to_target, next_question
from harness.read.drawing import Drawn
from harness.read.explain.sweep import explain_sweep
from harness.read.figures.catalogue import FIGURES, draw_all, figures_for, headline
from harness.read.figures.panels import Styles
from harness.read.files import for_page, save
from harness.read.labels import file_name, label_text, plain_text, shown_axes
from harness.read.records.baseline import baseline_of, run_row
from harness.read.records.comparable import all_beside_others
from harness.read.records.recorded import warn_not_read
from harness.read.records.selection import read_all_parts, refuse_part, without_flags
from harness.read.records.sweeps import SweepResults
from harness.read.report.page import page
from harness.read.report.sections import Section, Shown, definitions
from harness.read.table import Item, Table, as_code, escaped, markdown_lines, markdown_list
from harness.read.tables.columns import Row, filters_of
from harness.read.tables.command import csv_text, markdown
from harness.read.tables.results import by_node, fairness, results
from harness.read.tables.sweep_table import SweepTable, table_of_begun

UNNAMED = "no baseline is named"
NO_HYPOTHESIS = "none was written down before the runs."
MANY_RUNS = 100  # from here on, drawing takes longer than starting another process


def run(options: argparse.Namespace) -> int:
    if options.out is None:
        refuse_part(str(options.folder), "give --out DIR for the report of a part")
    files = make_report(options.folder, options.out or options.folder / "report")
    if options.json:
        print_json({"written": files})
    else:
        print(*(f"written: {file}" for file in files), sep="\n")
        print(f"open {files[0]}")
    return 0


def make_report(folder: Path, out: Path) -> list[Path]:
    """Write everything below `out`, the page and its text last; return what was written."""
    sweeps, problems = read_all_parts(str(folder))
    warn_not_read([*problems, *(line for sweep in sweeps for line in sweep.problems)])
    sweeps.sort(key=_last_unix, reverse=True)  # the latest measurements come first
    names = list[str]()
    for sweep in sweeps:
        names.append(file_name(sweep.name, names))
    sections = list[Section]()
    for sweep, made in zip(sweeps, _sections(sweeps, names, out), strict=True):
        if isinstance(made, Section):
            sections.append(made)
        else:  # the rest of the page is whole
            problems.append(f"{sweep.name} is not shown: {made}")
            warn_not_read(problems[-1:])
    page_file, text_file = out / "report.html", out / "report.md"
    write_whole(page_file, page(str(folder), sections, problems))
    write_whole(text_file, markdown_report(str(folder), sections, problems))
    return [page_file, text_file, *(out / section.name for section in sections)]


def _last_unix(sweep: SweepResults) -> float:
    """The time of the sweep's latest measurement; 0 where no record says."""
    times = (attempt.get("unix") for run in sweep.runs for attempt in run.attempts)
    return max((time for time in times if time), default=0.0)


def _sections(
    sweeps: Sequence[SweepResults], names: Sequence[str], out: Path
) -> Iterator[Section | str]:
    """The section of each sweep; drawn in several processes where that is faster than in one."""
    styles, sizes = Styles(sweeps), [len(sweep.planned) for sweep in sweeps]
    processes = min(os.cpu_count() or 1, len(sweeps)) if sum(sizes) >= MANY_RUNS else 1
    if processes == 1:
        for sweep, name in zip(sweeps, names, strict=True):
            with _drawing(sweep):
                made = _made(sweep, styles, name, out)
            yield made
        return
    try:
        with ProcessPoolExecutor(processes, get_context("spawn"), _end_quietly) as pool:
            # The largest first, so that none is left alone at the end. replace() drops the runs
            # that were read: a process reads them faster than it receives them.
            order = sorted(range(len(sweeps)), key=lambda n: -sizes[n])
            try:
                with _interrupts_blocked():
                    futures = {
                        n: pool.submit(_made, replace(sweeps[n]), styles, names[n], out)
                        for n in order
                    }
                for n, sweep in enumerate(sweeps):
                    with _drawing(sweep):
                        made = futures[n].result()
                    yield made
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                raise
    except BrokenProcessPool:
        raise UserError(
            "a process that draws was ended from outside, perhaps for lack of memory: report one "
            "sweep, as outputs/sweeps/NAME"
        ) from None


def _drawing(sweep: SweepResults) -> AbstractContextManager[None]:
    return working(f"drawing {sweep.name}")


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C, also in processes that are started meanwhile, until they have begun. A pending
    Ctrl-C takes effect at the end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_quietly() -> None:
    """Exit silently on Ctrl-C, which reaches all processes of a terminal: the first reports it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored in a background shell
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _made(sweep: SweepResults, styles: Styles, name: str, out: Path) -> Section | str:
    """The section, with its files written; or the reason why there is none."""
    try:
        write_whole(out / name / "runs.csv", csv_text([run_row(sweep, run) for run in sweep.runs]))
        begun, table, rows = table_of_begun(sweep)
        write_whole(out / name / "table.csv", csv_text(rows))
        return _section_of(begun, table, rows, styles, name, out)
    except UserError:
        raise
    except Exception as error:  # one that cannot be drawn is reported and stops no other
        return f"{type(error).__name__}: {error}"


def _section_of(
    sweep: SweepResults, table: SweepTable, rows: list[Row], styles: Styles, name: str, out: Path
) -> Section:
    drawn, not_drawn = draw_all(sweep, styles)
    first = figures_for(sweep)
    answering = [figure for figure in first if figure in drawn]
    figures = {
        figure: _saved(drawn[figure], f"{name}-{figure}", out / name / "figures", figure)
        for figure in dict.fromkeys((*answering, *drawn))
    }
    lists = {
        "Limits": [*map(Item, fairness(sweep))],
        "Not read": [*map(Item, sweep.problems)],
        "Explanation": explain_sweep(sweep),
    }
    return Section(
        name=name,
        table=table,
        headline="; ".join(
            filter(None, (headline(sweep) or " ".join(table.best), tally(table.verdicts)))
        ),
        hypothesis=sweep.hypothesis or (NO_HYPOTHESIS if sweep.has_question else ""),
        answers=_answers(sweep, table),
        next_question=next_question(sweep),
        repeat=_repeat(sweep),
        results=results(sweep, rows),
        nodes=by_node(sweep),
        not_finished=_not_finished(sweep, table),
        figures=figures,
        answering=max(1, len(answering)),
        not_drawn=not_drawn,
        lists={title: items for title, items in lists.items() if items},
    )


def _repeat(sweep: SweepResults) -> str:
    """The command that repeats the sweep; "" unless others disturbed all runs of some group, and
    where the recorded command cannot be read.
    """
    disturbed = (group.finished and all_beside_others(group) for group in sweep.groups)
    if not sweep.command or not any(disturbed):
        return ""
    try:
        words = [word for word in shlex.split(sweep.command) if word != "--pack"]
    except ValueError:  # an open quote
        return ""
    kept = without_flags(words, ["--rerun", "--isolation"])
    return shlex.join([*kept, "--rerun", "disturbed", "--isolation", "error"])


def _answers(sweep: SweepResults, table: SweepTable) -> list[Item]:
    compared = [answer.item for answer in table.answers] or [Item(_uncompared(sweep))]
    return [
        *map(Item, table.verdicts), *map(Item, table.best), *map(Item, first_to_target(sweep)),
        *compared, *map(Item, failed_variants(sweep)),
    ]  # fmt: skip


def _saved(drawn: Drawn, prefix: str, folder: Path, name: str) -> Shown:
    """Make the page's drawing, write the files in light colours, and then free the figure."""
    shown = Shown(for_page(drawn, prefix), drawn.alt, drawn.notes)
    save(drawn, folder, name, ["svg"], dark=False)  # a PNG takes as long as all else
    drawn.figure.clear()
    return shown


def _not_finished(sweep: SweepResults, table: SweepTable) -> Table:
    filters = {run.path: filters_of(run) for run in sweep.runs}
    rows = [(which, what, path or "") for which, what, path in table.not_finished]
    # Runs that did not begin are counted over all values of a filter.
    return Table(
        ["run", "outcome", "record"], rows, attributes=[filters.get(path, {}) for *_, path in rows]
    )


def _uncompared(sweep: SweepResults) -> str:
    if sweep.baseline is None:
        alike = "all runs have the same settings" if len(sweep.runs) > 1 else "there is one run"
        if len(sweep.groups) == 1 or not sweep.has_question:
            return f"Nothing is compared: {alike if len(sweep.groups) == 1 else UNNAMED}."
        label = sweep.groups[0].label
        entry = "".join(f"{a}: {plain_text(label[a])}" for a in shown_axes(sweep.varied)[:1])
        return f"Nothing is compared: {UNNAMED}, such as baseline: {{{entry}}} in its file."
    is_baseline = [baseline_of(sweep, g) is g for g in sweep.groups if g.finished]
    named = label_text(sweep.baseline, sweep.axes)
    if any(is_baseline) and not all(is_baseline):
        others = "no finished run has its baseline with the same other settings"
        return f"Nothing is compared: {others} ({named})."
    which = "beside" if any(is_baseline) else "of"
    return f"Nothing is compared: no finished run {which} the baseline ({named})."


def markdown_report(folder: str, sections: Sequence[Section], problems: Sequence[str]) -> str:
    return "\n".join(_lines(folder, sections, problems)) + "\n"


def _lines(folder: str, sections: Sequence[Section], problems: Sequence[str]) -> Iterator[str]:
    yield f"# What was measured: {escaped(folder)}"
    for problem in problems:
        yield f"\n- {escaped(problem)}"
    yield "\n## In short\n"
    yield from markdown_list(
        Item(section.table.title, [section.headline] if section.headline else [])
        for section in sections
    )
    yield "\n## Answers"
    for section in sections:
        yield f"\n**{escaped(section.table.title)}**\n"
        if section.hypothesis:
            yield f"Hypothesis: {escaped(section.hypothesis)}\n"
        if section.table.about:
            yield f"Measured: {escaped(section.table.about)}\n"
        yield from markdown_list(section.answers)
        if section.repeat:
            yield f"\nRepeat when nothing else runs: {as_code(section.repeat)}"
        if section.next_question:
            yield f"\nNext: {escaped(section.next_question)}"
    for section in sections:
        yield from _section_lines(section)
    yield "\n## Definitions\n"
    yield from (f"- **{word}**: {text}" for word, text in definitions(sections).items())


def _section_lines(section: Section) -> Iterator[str]:
    yield ""
    yield markdown(section.table).rstrip().replace("### ", "## ", 1)
    yield "\n### Results\n"
    yield from markdown_lines(section.results)
    if section.nodes.rows:
        yield "\n### By node\n"
        yield from markdown_lines(section.nodes)
    for title, items in section.lists.items():
        yield f"\n### {title}\n"
        yield from markdown_list(items)
    if section.table.not_finished:
        yield "\n### Not finished\n"
        not_finished = section.table.not_finished
        yield from markdown_list(Item(f"{which}: {what}") for which, what, _ in not_finished)
    if section.figures:
        yield "\n### Figures"
    for name, drawn in section.figures.items():
        alt = escaped(drawn.alt.replace("]", ")").replace("[", "("))
        yield f"\n![{alt}]({section.name}/figures/{name}.svg)"
        yield f"\n{FIGURES[name].title}" + "".join(f"; {escaped(note)}" for note in drawn.notes)
