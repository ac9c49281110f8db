"""The progress of a sweep for the user: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from harness.core import process
from harness.core.identity import REPETITIONS, number
from harness.core.records import FINISHED, RUNNING, SKIPPED, WAITING
from harness.launch.outcome import ELSEWHERE, State

STYLES = {FINISHED: "green", RUNNING: "bold cyan", WAITING: "dim", ELSEWHERE: "cyan",
          SKIPPED: "dim"}  # fmt: skip
EVERY_S = 0.25


class Screen:
    """print() adds a line; note() adds one unless the table is shown; warn() adds a warning, on
    stderr where no terminal shows the lines; show() redraws the table.
    """

    def __init__(self, title: str, states: list[State], in_turn: bool = True) -> None:
        """in_turn: runs go one after the other, so that the remaining time can be estimated."""
        self.title, self.states, self.in_turn = title, states, in_turn
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.live: Live | None = None
        self.drawn_s = 0.0

    def __enter__(self) -> Screen:
        if self.console.is_terminal:
            self.live = Live(console=self.console, auto_refresh=False, transient=True)
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the terminal; later lines are printed plainly."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def print(self, line: str) -> None:
        stamp = time.strftime("%H:%M:%S")
        self.console.print(f"{stamp} {line}", markup=False)

    def warn(self, text: str) -> None:
        if self.console.is_terminal:
            self.print(f"warning: {text}")
        else:
            process.warn(text)

    def note(self, line: str, ended: bool = False) -> None:
        if self.live is not None:
            return
        left = self._left() if ended else ""
        self.print(f"{line}; {left}" if left else line)

    def show(self) -> None:
        if self.live is None or time.monotonic() - self.drawn_s < EVERY_S:
            return
        self.drawn_s = time.monotonic()
        self.live.update(self.picture(self.console.height), refresh=True)

    def picture(self, height: int) -> Group:
        """The table and the line below it, at most as high as the terminal."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("run", "state", "epoch", "accuracy", "loss", "samples/s", "elapsed"):
            right = heading not in ("run", "state")
            table.add_column(
                heading, justify="right" if right else "left", no_wrap=True,
                overflow="ellipsis", min_width=0 if heading == "run" else len(heading) + 1,
            )  # fmt: skip
        shown = window(self.states, max(3, height - 5))
        for state in shown:
            style = STYLES.get(state.state, "red")
            run = Text(short_label(state, self.states))
            table.add_row(run, Text(standing(state), style), *progress_of(state))
        hidden = len(self.states) - len(shown)
        more = [Text(f"... and {hidden} more", "dim")] if hidden else []
        return Group(Text(self.title, "bold"), table, *more, Text(self._footer(), "dim"))

    def _footer(self) -> str:
        count = {s: sum(x.state == s for x in self.states) for s in (FINISHED, SKIPPED, WAITING)}
        failed = sum(state.failed for state in self.states)
        counts = [f"{count[FINISHED]} finished"]
        counts += [f"{failed} failed"] if failed else []
        counts += [f"{count[SKIPPED]} skipped"] if count[SKIPPED] else []
        counts += [f"{count[WAITING]} to go"]
        left = self._left()
        return ", ".join([*counts, left] if left else counts)

    def _left(self) -> str:
        return left_text(self.states) if self.in_turn else ""


def standing(state: State) -> str:
    """The state of a run, and why it waits if a cluster decides that."""
    if state.state == WAITING and state.reason:
        return f"{state.state} ({state.reason})"
    return state.state


def window(states: list[State], rows: int) -> list[State]:
    """The states that fit into so many rows, around the current run, in order."""
    if len(states) <= rows:
        return states
    now = next((i for i, s in enumerate(states) if s.state == RUNNING), None)
    if now is None:
        now = next((i for i, s in enumerate(states) if s.state == WAITING), len(states) - 1)
    first = min(max(0, now - rows // 2), len(states) - rows)
    return states[first : first + rows]


def short_label(state: State, states: list[State]) -> str:
    """The label without parts that are equal for all runs."""
    label = state.job.label
    varied = [k for k in label if len({str(s.job.label.get(k)) for s in states}) > 1]
    return " ".join(f"{k}={number(label[k])}" for k in varied) or str(state.job)


def progress_of(state: State) -> tuple[str, ...]:
    """Epoch, accuracy, loss, samples/s and elapsed, as far as they are recorded."""
    rows: Sequence[Mapping[str, Any]] = ()
    if state.state not in (WAITING, SKIPPED):
        rows, _ = state.job.folder.read_epochs()
    last: Mapping[str, Any] = rows[-1] if rows else {}
    epoch = last.get("epoch")
    if state.state == RUNNING:
        progress = state.job.folder.read_progress()
        epoch = progress["epoch"] if progress is not None else epoch
    elapsed_s = state.took_s
    if state.state == RUNNING and state.began_s is not None:
        elapsed_s = state.before_s + time.monotonic() - state.began_s
    return (
        f"{epoch:.1f}/{state.job.settings.epochs}" if epoch is not None else "",
        _form(last.get("accuracy"), "{:.4f}"),
        _form(last.get("eval_loss"), "{:.4f}"),
        _form(last.get("train_samples_per_s"), "{:,.0f}"),
        short(elapsed_s) if elapsed_s is not None else "",
    )


Took = Sequence[tuple[Mapping[str, Any], float]]  # labels of ended runs, with their times


def left_text(states: list[State]) -> str:
    """The time left, a lower bound where no ended run had the strategy of some run; "" if unknown
    or nothing is left.
    """
    took, left_s = _took(states), time_left_s(states)
    to_go = [state for state in states if state.state in (WAITING, RUNNING)]
    at_least = not all(has_strategy_of(state.job.label, took) for state in to_go)
    return f"{'at least' if at_least else 'about'} {short(left_s)} left" if left_s else ""


def time_left_s(states: list[State]) -> float | None:
    """Estimated from the times of the runs most like each, without those whose strategy no ended
    run had; None until the first run has ended.
    """
    took = _took(states)
    if not took:
        return None
    left = 0.0
    for state in states:
        if state.state in (WAITING, RUNNING) and has_strategy_of(state.job.label, took):
            elapsed_s = time.monotonic() - state.began_s if state.began_s is not None else 0.0
            left += max(0.0, usual_s(state.job.label, took) - state.before_s - elapsed_s)
    return left


def _took(states: list[State]) -> Took:
    return [(state.job.label, state.took_s) for state in states if state.took_s is not None]


def has_strategy_of(label: Mapping[str, Any], took: Took) -> bool:
    """Whether an ended run had its strategy: another may take ten times as long."""
    return any(other.get("strategy") == label.get("strategy") for other, _ in took)


def usual_s(label: Mapping[str, Any], took: Took) -> float:
    """The median time of the finished runs most like this one; an equal link counts most."""

    def alike(other: Mapping[str, Any]) -> tuple[bool, int]:
        same = [label.get(name) == other.get(name) for name in label if name not in REPETITIONS]
        return label.get("link") == other.get("link"), sum(same)

    best = max(alike(other) for other, _ in took)
    return statistics.median(took_s for other, took_s in took if alike(other) == best)


def short(seconds: float) -> str:
    """A duration for people: 12 s, 3:05, 2:10:00."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def exact(seconds: float) -> str:
    """Like short(), but with tenths of a second below a minute."""
    return f"{seconds:.1f} s" if seconds < 60 else short(seconds)


def _form(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
