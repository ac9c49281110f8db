"""python -m harness table [FOLDER]: what was measured, one row per run, failures included.

In the folder of a sweep: a row for each group of runs that differ only in their seed. --write puts
the table beside sweep.json; --columns and --latex shape what is shown.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.core.command_line import print_json
from harness.core.process import printable, warn
from harness.core.records import FINISHED, SWEEP
from harness.core.records.disk import write_whole
from harness.core.settings import UserError
from harness.read.labels import (
    UNKNOWN,
    column_of,
    heading_of,
    listed,
    plain_text,
    strategy_text,
    unfinished,
)
from harness.read.records.baseline import run_row
from harness.read.records.comparable import disturbed, learned_nothing
from harness.read.records.frames import frame_with_runs
from harness.read.records.groups import by_key
from harness.read.records.recorded import none_readable, warn_not_read
from harness.read.records.runs import Run, identity_settings, own_metrics_of
from harness.read.records.selection import parse_selector, read_sweep_part, refuse_part
from harness.read.records.sweeps import NO_RECORDS, SweepResults, sweep_file
from harness.read.table import (
    Item,
    Table,
    as_code,
    chosen,
    escaped,
    latex_lines,
    markdown_lines,
    markdown_list,
    screen,
    show,
    show_list,
)
from harness.read.tables import columns
from harness.read.tables.definitions import OF_IMPORTED, OF_LAST_EPOCH, OF_RUNS
from harness.read.tables.sweep_table import SweepTable, keeps_best, table_of_begun

MOST_NAMED = 8  # settings in a line
# What a spreadsheet would compute, in a text of anybody's record: no number, and not UNKNOWN.
FORMULA = re.compile(r"[=@]|[+-](?!$|inf$|(\d[\d.,]*|\.\d+)(e[+-]?\d+)?$)", re.IGNORECASE)
# Column of load_runs() -> how a value is shown.
COLUMNS = {
    "run": "{}",  # its folder, where nothing else tells two rows apart
    **dict.fromkeys(("script", "setup", "strategy", "model", "dataset", "number_format"), "{}"),
    "effective_batch": "{:.0f}",
    "lr": "{:g}",
    "seed": "{:.0f}",
    "updates": "{:.0f}",
    "accuracy": "{:.4f}",
    "test_accuracy": "{:.4f}",  # where a validation set chose the epoch
    "f1": "{:.4f}",
    "eval_loss": "{:.4f}",
    "train_samples_per_s": "{:,.0f}",
    "train_samples_per_s_per_gpu": "{:,.0f}",
    # These three where they are known.
    columns.MFU: "{:.3f}",
    columns.BUSY: "{:.0f}",
    columns.JOULES: "{:.3g}",
    "link_rtt_median_ms": "{:.2f}",  # where there is more than one node
    "link_bandwidth_mbit": "{:,.0f}",
    "train_time_s": "{:.1f}",
    "wall_s": "{:.1f}",
    "outcome": "{}",
}

# Said once above the table where it is the same for all runs of a machine.
STATED_ONCE = ("script", "model", "dataset", "strategy", "number_format", "effective_batch", "lr",
             "seed")  # fmt: skip

# Rows are in this order; these columns distinguish them.
BY = ("script", "dataset", "model", "strategy", "number_format", "setup", "lr")
SHOWN = (*BY, "effective_batch", "machine", "imported")
SETTINGS_SHOWN = (*BY, "precision", "compress", "sync_every")  # settings that those columns show


def run(options: argparse.Namespace) -> int:
    selector = str(options.folder)
    root, _ = parse_selector(selector)
    if options.json and (options.columns or options.latex):
        raise UserError("--json has all columns: leave out --columns and --latex")
    if sweep_file(root) is not None:
        if options.write:
            refuse_part(selector, "--write is for a whole sweep")
        _show_sweep(selector, options)
    elif options.write:
        raise UserError(f"--write is for a sweep: there is no {SWEEP} in {root}")
    else:
        _show_runs(selector, options)
    return 0


def _latex(table: Table, about: str) -> None:
    """The table with its title and the package that it needs as comments."""
    needs = r"% needs \usepackage{booktabs}"
    print(f"% {' '.join(printable(about).split())}", needs, *latex_lines(table), sep="\n")


def _show_runs(root: str, options: argparse.Namespace) -> None:
    runs, read, not_read = frame_with_runs(root, dtype=object if options.json else None)
    if runs.empty:
        raise UserError(NO_RECORDS.format(root))
    if options.json:
        print_json({"records": root, "runs": runs.to_dict("records"), "not_read": not_read})
        return
    runs["outcome"] = [run.current_state for run in read]
    if "strategy" in runs:
        runs["strategy"] = _strategies(runs)
    more, unlike = _other_settings(runs, read)
    _name_alike(runs, more)
    added = {"seed": [*more], "eval_loss": own_metrics_of(read)}  # before these columns
    tables = [
        _of_machine(group, machine, runs, more, added, options)
        for machine, group in runs.groupby("machine", dropna=False)
    ]
    marks_outcomes = "outcome" in (options.columns or COLUMNS)
    not_finished = [] if marks_outcomes else unfinished([*runs["outcome"]])
    if options.latex:
        for title, table in tables:
            _latex(table, title)
        print(*(f"% {line}\n" for line in not_finished), sep="", end="")
        return
    console = screen()
    for title, table in tables:
        console.print(title, style="italic")
        show(table)
    for line in not_finished:
        console.print(line)
    _show_notes(runs, read, unlike, f"{columns.DISTURBED} " if marks_outcomes else "")
    console.print(f"records: {root}")


def _show_notes(runs: pd.DataFrame, read: Sequence[Run], unlike: Sequence[str], mark: str) -> None:
    console = screen()
    finished = [run for run in read if run.state == FINISHED]
    disturbances = (f"{mark}{text}" for text in disturbed(finished, grouped=False))
    for line in (*_notes(runs, unlike), *learned_nothing(finished), *disturbances):
        console.print(line)
    for _, run in runs[runs["link_warning"].notna()].iterrows():
        warn(f"{run['path']}: {run['link_warning']}")
    of_imported = [OF_IMPORTED] * bool(runs["imported"].notna().any())
    for line in (OF_RUNS, *[OF_LAST_EPOCH] * keeps_best(read), *of_imported):
        console.print(line, style="dim")


def _notes(runs: pd.DataFrame, unlike: Sequence[str]) -> Iterator[str]:
    if unlike:
        yield f"rows also differ in: {listed(unlike, ', ', MOST_NAMED)}"
    failed = runs[runs["reason"].notna()] if "reason" in runs else runs[:0]
    yield from reasons(
        (f"{run['outcome']}: {run['reason']}", "", run["path"]) for _, run in failed.iterrows()
    )


def reasons(runs: Iterable[tuple[str, str, str | None]]) -> Iterator[str]:
    """Lines with the outcomes of runs, from (outcome, run, path); equal reasons share a line."""
    alike: dict[str, list[tuple[str, str | None]]] = {}
    for what, which, path in runs:
        alike.setdefault(what, []).append((which, path))
    for what, each in alike.items():
        names = listed([which for which, _ in each if which], "; ", MOST_NAMED)
        yield f"{what} ({names})" if names else what
        paths = [path for _, path in each if path]
        yield from (f"  {path}" for path in paths[:MOST_NAMED])
        if len(paths) > MOST_NAMED:
            yield f"  and {len(paths) - MOST_NAMED} more"


def _strategies(runs: pd.DataFrame) -> list[str | None]:
    """The strategies, with the settings that mostly distinguish runs of one strategy."""
    names = [name for name in ("strategy", "compress", "sync_every") if name in runs]
    labels = runs[names].astype(object).where(runs[names].notna(), None)
    return [strategy_text(dict(zip(names, row, strict=True))) for row in labels.to_numpy()]


def _other_settings(runs: pd.DataFrame, read: Sequence[Run]) -> tuple[dict[str, str], list[str]]:
    """Add a column to `runs` for each setting, and for known threads, in which runs differ that no
    shown column tells apart; return column -> heading. Also return the headings of other settings
    in which runs of one script and dataset differ.
    """
    shown = [runs[name].map(str) for name in SHOWN if name in runs]
    identities = [identity_settings(run.settings) for run in read]
    threads = [run.threads or None for run in read]  # 0 where a GPU computes
    alike = by_key(range(len(read)), [*zip(*shown, strict=True)].__getitem__)
    data = [(run.settings.get("script"), run.settings.get("dataset")) for run in read]
    of_data = by_key(range(len(read)), data.__getitem__)
    names = dict.fromkeys(name for each in identities for name in each)
    values = {n: [each.get(n) for each in identities] for n in names if n not in SETTINGS_SHOWN}
    headings, unlike = {}, []
    for name, of_runs in (values | {"threads": threads}).items():
        texts = [*map(plain_text, of_runs)]
        unknown = {UNKNOWN} if name == "threads" else set()  # a setting that is not there is off
        differ_in_some, differ_in_data = (
            any(len({texts[n] for n in rows} - unknown) > 1 for rows in together.values())
            for together in (alike, of_data)
        )
        if differ_in_some:
            runs[f"setting {name}"] = texts
            headings[f"setting {name}"] = heading_of(column_of(name))
        elif differ_in_data:
            unlike.append(heading_of(column_of(name)))
    return headings, unlike


def _name_alike(runs: pd.DataFrame, more: Iterable[str]) -> None:
    """Add the folder of each run where two rows would agree in all that tells runs apart."""
    if runs.duplicated([name for name in (*SHOWN, *more, "seed") if name in runs]).any():
        common = os.path.commonpath([*runs["path"]])
        runs["run"] = [os.path.relpath(path, common) for path in runs["path"]]


def _of_machine(
    runs: pd.DataFrame, machine: Any, everything: pd.DataFrame,
    more: dict[str, str], added: dict[str, list[str]], options: argparse.Namespace,
) -> tuple[str, Table]:  # fmt: skip
    """The title and table of a machine. A column asked for is shown if any machine has it."""
    having = everything if options.columns else runs
    known = [
        name for name in columns.DEVICE_FIELDS if name in having and having[name].notna().any()
    ]
    finished = having[having["outcome"] == FINISHED]
    on_cpu = columns.is_on_cpu({*finished["device"]} or {"cpu"})  # none is known before the end
    hidden = {*columns.DEVICE_FIELDS} - {*columns.usual(known, on_cpu)}
    usual = [name for column in COLUMNS for name in (*added.get(column, ()), column)]
    usual += [name for name in options.columns or () if name not in usual]  # any field of a run
    shown = [name for name in usual if name in runs and name not in hidden]
    # A value that is unknown for some run may differ.
    known_alike = (n for n in shown if runs[n].notna().all() and runs[n].nunique() == 1)
    same = [n for n in known_alike if n in STATED_ONCE and len(runs) > 1]
    headings = {name: more.get(name, heading_of(name)) for name in shown}
    title = "machine unknown" if pd.isna(machine) else str(machine)
    if same:
        first = runs.iloc[0]
        title += ", all: " + ", ".join(f"{headings[n]} {_shown(n, first[n])}" for n in same)
    if not options.columns:
        shown = [name for name in shown if name not in same]
    order = (*BY, *more, "seed", "run")
    ordered = runs.sort_values([name for name in order if name in runs])
    rows = [[_cell_of(run, name) for name in shown] for _, run in ordered.iterrows()]
    # The batch may stand among them.
    keys = 1 + max((n for n, name in enumerate(shown) if name in order), default=-1)
    table = Table([headings[name] for name in shown], rows, keys)
    if options.columns:
        table = chosen(table, [headings.get(name, name) for name in options.columns])
    return title, table


def _cell_of(run: pd.Series[Any], name: str) -> str:
    """The text of a cell; the outcome of a finished run has a mark if it was disturbed."""
    marked = name == "outcome" and run["disturbed"] and run["outcome"] == FINISHED
    return _shown(name, run[name]) + (columns.DISTURBED if marked else "")


def _shown(name: str, value: Any) -> str:
    if pd.isna(value):
        return UNKNOWN
    if name.startswith("setting "):
        return str(value)
    return COLUMNS[name].format(value) if name in COLUMNS else columns.number_text(name, value)


def _show_sweep(selector: str, options: argparse.Namespace) -> None:
    sweep = read_sweep_part(selector)
    if (bad := [*sweep.not_read]) and len(bad) == sum(run.folder is not None for run in sweep.runs):
        raise none_readable(bad)
    _, shown, rows = table_of_begun(sweep)
    warn_not_read(sweep.problems)
    files = write_files(sweep, shown, rows) if options.write else []
    table = chosen(shown.table, options.columns) if options.columns else shown.table
    if options.latex:
        _latex(table, f"{shown.title} {shown.about}")
        return
    if options.json:
        print_json({
            "sweep": sweep.name, "question": sweep.question, "hypothesis": sweep.hypothesis,
            "verdicts": shown.verdicts, "best": shown.best,
            "answers": [*map(str, shown.answers)], "rows": rows,
            "runs": [run_row(sweep, run) for run in sweep.runs], "written": files,
            "not_read": sweep.problems,
        })  # fmt: skip
        return
    console = screen()
    console.print(shown.title, style="bold")
    console.print(shown.about)
    if shown.hypothesis:
        console.print(f"hypothesis: {shown.hypothesis}")
    show(table)
    show_list([*map(Item, shown.verdicts), *map(Item, shown.best)])
    show_list(answer.item for answer in shown.answers)
    for line in reasons((what, which, path) for which, what, path in shown.not_finished):
        console.print(line)
    for note in shown.notes:
        console.print(note)
    environment = ["; ".join(shown.environment)] if shown.environment else []
    for line in (*shown.legend, *environment, *([shown.command] if shown.command else [])):
        console.print(line, style="dim")
    for file in files:
        console.print(f"written: {file}")
    console.print(f"records: {sweep.output_dir}")


def write_files(sweep: SweepResults, shown: SweepTable, rows: list[columns.Row]) -> list[Path]:
    """table.md, table.csv and runs.csv, each whole or not at all."""
    texts = {
        "table.md": markdown(shown),
        "table.csv": csv_text(rows),
        "runs.csv": csv_text([run_row(sweep, run) for run in sweep.runs]),
    }
    files = []
    for name, text in texts.items():
        write_whole(file := sweep.folder / name, text)
        files.append(file)
    return files


def csv_text(rows: Any) -> str:
    """Rows as CSV: unknown is empty, a miss is inf, a list is its values with ; between them; a
    text that would be a formula has a ' before it.
    """
    cells = [{_cell(name): _cell(value) for name, value in row.items()} for row in rows]
    return str(pd.DataFrame(cells, dtype=object).to_csv(index=False, lineterminator="\n"))


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return ";".join("" if part is None else str(_cell(part)) for part in value)
    if not isinstance(value, str):
        return value
    text = " ".join(value.split())
    return f"'{text}" if FORMULA.match(text) else text


def markdown(shown: SweepTable) -> str:
    """The table as Markdown, to be pasted into an issue or a README as it is."""
    return "\n".join(_markdown(shown)) + "\n"


def _markdown(shown: SweepTable) -> Iterator[str]:
    yield f"### {escaped(shown.title)}"
    yield ""
    yield escaped(shown.about)
    yield ""
    if shown.hypothesis:
        yield f"Hypothesis: {escaped(shown.hypothesis)}\n"
    yield from markdown_lines(shown.table)
    if shown.verdicts:
        yield "\nWhat the hypothesis says in numbers, where the sweep can judge it:\n"
        yield from markdown_list(map(Item, shown.verdicts))
    yield from (f"\n{escaped(text)}" for text in shown.best)
    if shown.answers:
        yield "\nAgainst the baseline:\n"
        yield from markdown_list(answer.item for answer in shown.answers)
    if shown.not_finished:
        yield "\nNot finished:\n"
        for which, what, path in shown.not_finished:
            where = f" ({as_code(path)})" if path else ""
            yield f"- {escaped(which)}{where}: {as_code(what)}"
    for text in (*shown.notes, *shown.legend):
        yield ""
        yield escaped(text)
    if shown.environment:
        yield ""
        yield f"Environment: {escaped('; '.join(shown.environment))}"
    if shown.command:
        yield ""
        yield f"Command: {as_code(shown.command)}"
