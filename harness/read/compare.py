"""python -m harness compare A B: what B differs by from A, with interval, where it may be said."""

from __future__ import annotations

import math
import sys
from typing import Literal

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from harness.read.comparable import SPEED
from harness.read.differences import (
    Comparison,
    Row,
    absolute,
    compare,
    interval,
    judgement,
    sentence,
)
from harness.read.sides import Side, command_for_seeds, differing, read_side
from harness.read.statistics import spread
from harness.read.sweeps import Target, parse_target
from harness.settings import UserError

USAGE = """usage: python -m harness compare A B [--target METRIC=VALUE]

A, B: a run, a folder whose runs differ only in their seed, or FOLDER:NAME=VALUE,NAME=VALUE, those
of its runs (or of a sweep's) with these settings:
  python -m harness compare outputs:script=vit,setup=1_1 outputs:script=vit,setup=1_2
--target: also the time to it, for example accuracy=0.9 (the sweep's, where A and B are of one)"""
LEGEND = (
    "difference: B less A; interval: 95 %, Student's t, of the differences of pairs where A and B "
    "have the same seeds, else Welch's; per cent are of A's mean; each measure is judged by "
    "itself: of twenty without any difference one looks like more than noise"
)
SEEDS = 3  # from which on an interval says something


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    try:
        words, target = _words(argv)
        one, other = (read_side(n, w, target) for n, w in zip("AB", words, strict=True))
        _check_apart(one, other)
    except UserError as error:
        print(f"harness compare: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    found = compare(one, other)
    show(found)
    return 0 if found.rows else 2


def _words(argv: list[str]) -> tuple[list[str], Target | None]:
    words: list[str] = []
    target = None
    rest = iter(argv)
    for word in rest:
        if word.startswith("--"):
            name, equals, text = word.partition("=")
            if name != "--target":
                raise UserError(f"unknown flag {name}: there is --target METRIC=VALUE")
            target = parse_target(text if equals else next(rest, ""))
        else:
            words.append(word)
    if len(words) != 2:
        raise UserError(f"two sides are expected, A and B, not {len(words)}: {' '.join(words)}")
    return words, target


def _check_apart(one: Side, other: Side) -> None:
    """A run on both sides would make them alike; the very same sides are seen to be equal."""
    paths = [{record.path.absolute() for record in side.records} for side in (one, other)]
    if paths[0] != paths[1] and (both := paths[0] & paths[1]):
        raise UserError(f"{min(both)} is on both sides")


def show(found: Comparison) -> None:
    # Markup off: reasons and names hold brackets.
    screen = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    one, other = found.sides
    for side in found.sides:
        screen.print(f"{side.name}: {side.about()}")
    unlike = [f"{n} (A {a}, B {b})" for n, a, b in differing(one, other)]
    screen.print(f"settings that differ: {', '.join(unlike) or 'none'}")
    for kind, verdict in found.verdicts.items():
        screen.print(f"{kind}: {'not comparable' if verdict.reasons else 'comparable'}")
        for text in (*verdict.reasons, *(f"note: {note}" for note in verdict.notes)):
            screen.print(f"  {text}")
    for note in found.notes:
        screen.print(note)
    if found.rows:
        table = _table(found)
        # Never cropped: a terminal that is too narrow wraps the lines, a file has no width.
        width = Measurement.get(screen, screen.options.update(max_width=1000), table).maximum
        Console(highlight=False, width=width).print(table)
        for row in found.rows:
            screen.print(sentence(row, found.sides))
        screen.print(LEGEND, style="dim")
    elif not any(verdict.reasons for verdict in found.verdicts.values()):
        screen.print("nothing is known on both sides")
    for line in more_seeds(found):
        screen.print(line)


def _table(found: Comparison) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    headings = ("", "A", "B", "difference", "95 % interval", "%", "95 % interval", "")
    for n, heading in enumerate(headings):
        side: Literal["left", "right"] = "left" if n in (0, len(headings) - 1) else "right"
        table.add_column(heading, justify=side, no_wrap=True)
    for row in found.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    means = [_mean(row, values) for values in row.values]
    if row.difference is None:
        return [row.measure.title, *means, "-", "-", "-", "-", "target missed"]
    low, high = row.percent(row.difference.low), row.percent(row.difference.high)
    percent = row.percent(row.difference.value)
    return [
        row.measure.title,
        *means,
        absolute(row.measure, row.difference.value),
        interval(row),
        "-" if percent is None else f"{percent:+.1f}",
        "-" if low is None or high is None else f"{low:+.1f} to {high:+.1f}",
        judgement(row),
    ]


def _mean(row: Row, values: tuple[float, ...]) -> str:
    found = spread(values)
    assert found.mean is not None
    if math.isinf(found.mean):
        return f"{sum(map(math.isfinite, values))} of {len(values)} reach it"
    text = row.measure.form.format(found.mean)
    return text if found.sd is None else f"{text} ± {row.measure.form.format(found.sd)}"


def more_seeds(found: Comparison) -> list[str]:
    """How noise that is unknown becomes known."""
    lines = []
    for n, side in enumerate(found.sides):
        few = min(
            (len(row.values[n]) for row in found.rows if row.measure.kind != SPEED),
            default=min((len(row.values[n]) for row in found.rows), default=SEEDS),
        )
        if few >= SEEDS:
            continue
        said = f"{side.name} has {few} seed{'s' if few > 1 else ''}"
        command = command_for_seeds(side, SEEDS - few)
        how = f"; more: {command}" if command else "; only its source can measure more"
        lines.append(f"{said}: {'noise is unknown' if few == 1 else 'a wide interval'}{how}")
    return lines
