"""Figures for a column of a paper: nothing is cut, nothing lies on anything, words are whole."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from harness.core.settings import UserError
from harness.read.drawing import Drawn, grid, lay_out, page_width
from harness.read.figures.catalogue import draw
from harness.read.records.sweeps import SweepResults, read_sweep
from harness.read.scales import named_rows
from harness.read.table import Table, latex_lines
from tests.support.drawn import measured, texts
from tests.support.records import TARGET, Plan, epochs, lines

COLUMN = 3.3  # inches
LONG = {"dataset": "data/with/a/name/that/is/long.csv", "precision": "bf16"}


def placed(sweep: SweepResults, name: str, width: float = COLUMN) -> Drawn:
    with page_width(width):
        drawn = draw(name, sweep)
        lay_out(drawn.figure)
        FigureCanvasAgg(drawn.figure).draw()
    return drawn


def cut(figure: Figure) -> list[str]:
    """The texts that reach over an edge of the figure."""
    shown: list[Text] = [text for legend in figure.legends for text in legend.get_texts()]
    shown += [legend.get_title() for legend in figure.legends]
    for axes in figure.axes:
        shown += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        low, high = sorted(axes.get_ylim())
        shown += [t for t in axes.get_yticklabels() if low <= t.get_position()[1] <= high]
    boxes = {text.get_text(): text.get_window_extent() for text in shown if text.get_text()}
    edges = figure.bbox
    return [text for text, box in boxes.items() if box.x0 < edges.x0 - 1 or box.x1 > edges.x1 + 1]


@pytest.fixture
def long_names(plan: Plan) -> SweepResults:
    """Two seeds of two groups that differ in the end of their names, with readings."""
    for lr in (0.00125, 0.0025):
        for seed in (1, 2):
            label = {"strategy": "diloco", "sync_every": 50, "outer_lr": 0.7, "lr": lr}
            rows = [row | {"timed_steps": 8, "timed_s": 1.5, "timed_samples": 64}
                    for row in epochs(0.5, 0.9)]  # fmt: skip
            folder = plan.run("2_1", 4, seed, 2, epochs=rows, label=label | LONG, updates=20)
            reading = {"gpus": [], "node": {"cpu_percent": 50.0, "memory_gib": 1.0}}
            lines(folder / "telemetry" / "node_0.jsonl",
                  [reading | {"unix": 1000.0 + n} for n in range(4)])  # fmt: skip
    plan.run("1_1", 4, epochs=epochs(0.5, 0.8), label={"strategy": "single", "lr": 0.00125})
    return measured(plan, axes=["strategy", "sync_every", "outer_lr", "dataset", "precision",
                                "setup", "per_gpu_batch", "lr"], target=TARGET)  # fmt: skip


@pytest.mark.parametrize(
    "name", ["accuracy", "loss", "frontier", "usage", "time_to_accuracy", "where_time_went"]
)
def test_no_word_is_cut_in_a_column_of_a_paper(name: str, long_names: SweepResults) -> None:
    drawn = placed(long_names, name)
    assert drawn.figure.get_figwidth() == COLUMN and cut(drawn.figure) == []
    said = " ".join(text.get_text() for text in drawn.figure.findobj(Text))  # type: ignore[attr-defined]
    assert "..." not in said and "lr 0.00125" in " ".join(said.split())


def test_rows_have_whole_names_of_what_differs(long_names: SweepResults) -> None:
    """One process has no timed steps here, and what the others share stands in no name."""
    (axes,) = draw("where_time_went", long_names).figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["lr 0.00125", "lr 0.0025"]
    wall, *_ = placed(long_names, "time_to_accuracy").figure.axes
    first, *_ = (label.get_text() for label in wall.get_yticklabels())
    assert first.replace("\n", " ").startswith("diloco h50 lr0.7") and first.endswith("0.00125")


def test_a_page_that_is_too_narrow_is_told_which_width_a_figure_needs() -> None:
    def wide() -> Figure:
        figure, (axes,) = grid([2.0])
        named_rows(axes, ["a" * 30])
        lay_out(figure)
        return figure

    with (
        page_width(2.0),
        pytest.raises(UserError, match=r"the labels of this figure need \d\.\din or more") as told,
    ):
        wide()
    least = float(str(told.value).partition("need ")[2].partition("in")[0])
    with page_width(least):
        assert wide().get_figwidth() == least > 2


def linked(plan: Plan, link: str, seconds: float, **label: Any) -> None:
    """Runs of three seeds that reach 0.9 after so many seconds, the last of them never."""
    for seed in (1, 2, 3):
        last = (0.6 if seed == 3 else 0.93) - seconds / 100
        rows = epochs(0.5, last, seconds=seconds * seed)
        facts = {"nodes": 2, "processes_per_node": 1, "effective_batch": 8}
        plan.run("2_1", 4, seed, environment=facts, epochs=rows, label={**label, "link": link})


@pytest.fixture
def links(plan: Plan) -> SweepResults:
    for link in ("1ms/50mbit", "20ms/50mbit", "80ms/50mbit"):
        linked(plan, link, 1.0, strategy="ddp")
        linked(plan, link, 2.0, strategy="diloco", sync_every=50)
    folder = plan.write(axes=["strategy", "sync_every", "setup", "per_gpu_batch", "link"],
                        baseline={"strategy": "ddp"}, target=TARGET)  # fmt: skip
    return read_sweep(folder)


@pytest.mark.parametrize("width", [COLUMN, 5.0])
def test_misses_and_titles_of_strategies_have_their_places(
    width: float, links: SweepResults
) -> None:
    figure = placed(links, "strategies", width).figure
    assert cut(figure) == []
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        assert not any(
            one.overlaps(other) for n, one in enumerate(boxes) for other in boxes[n + 1 :]
        )
    short = "1/3" if width == COLUMN else "\u2191 1 of 3"
    assert texts(Drawn(figure)).count(short) == 6
    points = texts(Drawn(figure), -1)
    assert points == ["\u22121.0"] or width > COLUMN


def test_words_of_strategies_have_the_medians_that_are_drawn(links: SweepResults) -> None:
    """The second of three: 2 s an epoch and twice as long the second, the third misses."""
    alt = draw("strategies", links).alt
    assert "Training time to accuracy at least 0.9 over the delay between nodes, medians: " in alt
    assert "strategy ddp, link 1ms/50mbit 4 s (from 2 to 4), 1 of 3 missed; " in alt
    assert "strategy diloco h50, link 80ms/50mbit 8 s (from 4 to 8), 1 of 3 missed." in alt


def test_labels_of_ticks_do_not_overlap(plan: Plan) -> None:
    for n, seconds in enumerate((1, 30, 900, 20_000), 1):
        plan.run("1_1", n, train_time_s=seconds, wall_s=seconds, accuracy=0.5 + n / 10)
    axes, _ = placed(measured(plan), "frontier").figure.axes  # beside it the wall time
    low, high = axes.get_xlim()
    labels = [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
    boxes = [label.get_window_extent() for label in labels if label.get_text()]
    assert len(boxes) >= 3
    assert all(one.x1 < other.x0 for one, other in pairwise(boxes))


def test_numbers_of_the_frontier_lie_inside_its_panel(plan: Plan) -> None:
    for batch, seconds, accuracy in ((4, 20, 0.8), (16, 10, 0.7), (64, 60, 0.6)):
        plan.run("1_1", batch, train_time_s=seconds, accuracy=accuracy)
    axes, _ = placed(measured(plan), "frontier").figure.axes  # beside it the wall time
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 2
    for box in boxes:
        assert axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1
        assert axes.bbox.y0 < box.y0 and box.y1 < axes.bbox.y1


def test_the_sign_of_a_number_is_a_minus(root: Path) -> None:
    drawn = draw("strategies", read_sweep(root / "outputs/published/sweeps/slow_links-tiny"))
    said = [text.get_text() for text in drawn.figure.findobj(Text)]  # type: ignore[attr-defined]
    assert any("\u2212" in text for text in said)
    assert not any(" -" in text or "(-" in text for text in said)
    *_, row, _, _ = latex_lines(Table(["points"], [("-2.0 (-4.5 to -0.5), 80ms-50mbit",)]))
    assert row == r"$-$2.0 ($-$4.5 to $-$0.5), 80ms-50mbit \\"
