"""Strategies in tables and figures: how they are named, what each is compared with, what it costs.

Every expected number here was worked out by hand.
"""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from harness.cli import main
from harness.core.settings import UserError
from harness.read.compare.answers import answers
from harness.read.figures.catalogue import draw, figure_for
from harness.read.figures.panels import Styles
from harness.read.labels import shown_axes, strategy_text
from harness.read.records.baseline import compared_groups
from harness.read.records.comparable import ACCURACY, QUALITY, measured_against
from harness.read.records.selection import read_sweep_part
from harness.read.records.sweeps import read_sweep
from tests.support.paired import Verb
from tests.support.records import TARGET, Plan, row_of

DDP: dict[str, Any] = {"strategy": "ddp"}
POWER = DDP | {"compress": "powersgd"}
FAR = {"strategy": "diloco", "sync_every": 50}
SLOW, FAST = "80ms/50mbit", "1ms/1000mbit"


class Links(Plan):
    """A sweep over strategies, set-ups and links, in the order of slow_links.yaml."""

    def __init__(self, output_dir: Path) -> None:
        super().__init__(output_dir)
        self.content |= {
            "axes": ["strategy", "compress", "sync_every", "setup", "link"],
            "baseline": {"strategy": "ddp"}, "target": TARGET,
        }  # fmt: skip

    def measured(
        self, how: dict[str, Any], seconds: float, seed: int = 1, setup: str = "2_1",
        link: str = SLOW, accuracy: float = 0.95, **more: Any,
    ) -> None:  # fmt: skip
        """A run that reaches 0.9 after so many seconds, or never (infinity), and ends with an
        accuracy of its own.
        """
        missed = math.isinf(seconds)
        last = min(accuracy, 0.89) if missed else accuracy
        epoch = {"samples": 200, "wall_s": 3.0}
        first = {"accuracy": 0.5 if missed else 0.92, "epoch_time_s": 14.0 if missed else seconds}
        rows = [epoch | first | {"epoch": 1},
                epoch | {"epoch": 2, "accuracy": last, "epoch_time_s": 0.0}]  # fmt: skip
        label = {k: v for k, v in how.items() if v is not None} | {"link": link}
        facts = {"nodes": int(setup[0]), "processes_per_node": 1, "effective_batch": 32}
        self.run(setup, seed=seed, label=label, epochs=rows, environment=facts, **more)  # fmt: skip
        del self.content["runs"][-1]["label"]["per_gpu_batch"]

    def waiting(self, how: dict[str, Any], seed: int = 9) -> None:
        self.planned("2_1", seed=seed, link=SLOW, **how)
        del self.content["runs"][-1]["label"]["per_gpu_batch"]


@pytest.fixture
def plan(tmp_path: Path) -> Links:
    return Links(tmp_path / "outputs")


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (DDP | {"compress": None, "sync_every": None}, "ddp"),
        (DDP | {"compress": "none"}, "ddp"),
        (POWER, "ddp powersgd"),
        (DDP | {"compress": "powersgd:4"}, "ddp powersgd:4"),
        (FAR | {"compress": "int8", "sync_scope": "rank"}, "diloco int8 h50 by rank"),
        (FAR | {"outer_lr": 0.7, "local_updates": False}, "diloco h50 lr0.7"),
        ({"strategy": "hivemind", "local_updates": True}, "hivemind local updates"),
        ({"compress": "bf16"}, "bf16"),
        ({"setup": "2_1"}, None),
    ],
)
def test_a_strategy_is_named_with_its_flags(label: dict[str, Any], text: str | None) -> None:
    assert strategy_text(label) == text


def test_flags_stand_alone_where_the_strategy_does_not_vary() -> None:
    assert shown_axes(["strategy", "compress", "lr", "sync_every"]) == ("strategy", "lr")
    assert shown_axes(["compress", "lr"]) == ("compress", "lr")


def test_rows_of_the_table_are_strategies(plan: Links, table: Verb) -> None:
    plan.measured(DDP, 40)
    plan.measured(POWER, 30)
    plan.measured(FAR, 8)
    plan.measured(FAR | {"sync_every": 10}, 9, outcome="oom", reason="no room")
    said = table(plan.write(columns=["accuracy"]))
    for name in ("ddp", "ddp powersgd", "diloco h50"):
        row_of(said, *name.split(), "1/1")  # one line: set-up and link are the same for all
    assert "compress" not in said and "sync every" not in said
    assert "base: strategy ddp with the same setup, link" in said
    assert "oom: no room (strategy diloco h10, seed 1)" in said


def test_ddp_as_it_is_is_the_baseline_at_the_same_setup_and_link(plan: Links) -> None:
    for setup, link, seconds in (("2_1", SLOW, 40), ("2_1", FAST, 4), ("4_1", SLOW, 80)):
        for seed in (1, 2):  # the second takes twice as long, with every strategy
            at = {"seed": seed, "setup": setup, "link": link}
            plan.measured(POWER, 1.5 * seconds * seed, accuracy=0.94, **at)
            plan.measured(FAR, seconds * seed / 8, accuracy=0.93, **at)
            plan.measured(DDP, seconds * seed, accuracy=0.95, **at)
    groups = plan.groups()
    assert len(groups) == 9
    for group in groups:
        assert group["baseline"] is (group["strategy"] == "ddp" and group["compress"] is None)
        share, points = {"diloco": (0.125, -2)}.get(group["strategy"], (1.5, -1))
        if group["baseline"]:
            share, points = 1, 0
        assert group["accuracy_gain_points"] == pytest.approx(points)
        assert group["tta_train_s_ratio"] == pytest.approx(share)
        if not group["baseline"]:  # every seed says the same: so does whatever is drawn
            assert group["tta_train_s_ratio_low"] == pytest.approx(share)
            assert group["tta_train_s_ratio_high"] == pytest.approx(share)
        assert group["tta_wall_s_ratio"] == 1  # 3 s to the row of every run


def test_a_baseline_may_name_flags_and_without_a_plain_one_the_nearest_is_taken(
    plan: Links, table: Verb
) -> None:
    plan.measured(POWER, 30)
    plan.measured(FAR, 60)
    assert "base: strategy ddp powersgd with" in table(plan.write(baseline=POWER))
    powersgd, far = plan.groups(baseline=POWER)
    assert powersgd["baseline"] and far["tta_train_s_ratio"] == pytest.approx(2)
    powersgd, far = plan.groups()  # ddp: only compressed
    assert powersgd["baseline"] and far["tta_train_s_ratio"] is None
    plan.measured(DDP | {"compress": "none"}, 15)
    powersgd, far, plain = plan.groups()
    assert plain["baseline"] and powersgd["tta_train_s_ratio"] == pytest.approx(2)
    assert far["tta_train_s_ratio"] == pytest.approx(4)
    plan.measured(FAR | {"compress": "int8"}, 180)
    assert plan.groups(baseline=FAR)[-1]["tta_train_s_ratio"] == pytest.approx(3)


@pytest.mark.parametrize(
    ("ddp", "far", "ratio"),
    [
        ((40.0, 48.0), (5.0, 5.0), 1 / math.sqrt(76.8)),
        ((40.0, 60.0), (5.0, 5.0), 1 / math.sqrt(96)),
        ((40.0, 60.0), (5.0, math.inf), math.inf),
        ((40.0, math.inf), (5.0, 5.0), None),
        ((math.inf, math.inf), (math.inf, math.inf), None),
    ],
)
def test_a_missed_target_has_infinite_time(
    plan: Links, table: Verb, ddp: tuple[float, ...],
    far: tuple[float, ...], ratio: float | None) -> None:  # fmt: skip
    for seed in (0, 1):
        plan.measured(DDP, ddp[seed], seed)
        plan.measured(FAR, far[seed], seed)
    _, group = plan.groups()
    assert group["tta_train_s_ratio"] == (None if ratio is None else pytest.approx(ratio))
    folder = plan.write(columns=["reached", "tta_train_s_ratio", "tta_train_s"])
    shown = row_of(table(folder), "diloco")
    reached = f"{sum(map(math.isfinite, far))}/2"
    # 5 s of 40 and of 48: 1/8 and 1/9.6, logarithms -2.08 and -2.26, sd 0.129, t 12.706. Of 40 and
    # of 60 the interval is 0.0079 to 1.34: its ends are more than 100-fold apart.
    known = "0.11 (0.04 to 0.36)" if ddp[1] == 48 else "0.10 (too wide)"
    written = {math.inf: "infinite", None: "-"}.get(ratio, known)
    assert shown[3 : 4 + len(written.split())] == [reached, *written.split()]


def test_points_and_ratios_have_intervals_where_they_are_asked_for(
    plan: Links, table: Verb
) -> None:
    for seed, points in ((1, 1), (2, 3)):
        plan.measured(DDP, 100, seed, accuracy=0.9)
        plan.measured(FAR, 2 + seed, seed, accuracy=0.9 - points / 100)
    asked = ["accuracy_gain_points", "tta_train_s_ratio"]  # the wall time stands beside it
    said = table(plan.write(columns=asked))
    # -1 and -3 points: sd 1.414, 12.706 * 1.414 / sqrt(2). Ratios 0.03 and 0.04: logarithms -3.507
    # and -3.219, sd 0.203, -3.363 -+ 1.828.
    expected = "-2.00 (-14.71 to +10.71) 0.035 (0.006 to 0.215) 1.00 (no spread)"
    assert " ".join(row_of(said, "diloco")[3:]) == expected
    assert (
        "in brackets: 95 % interval over the seeds, Student's t" in said
        and "target vs base:" in said
    )
    said = table(plan.write())  # the usual columns
    assert "-2.00" in row_of(said, "diloco") and "to -1.00" not in said
    assert "in brackets" not in said
    plan.content["runs"] = [run for run in plan.content["runs"] if run["label"]["seed"] == 1]
    said = table(plan.write(columns=asked))  # one seed has none
    assert row_of(said, "diloco")[3:] == ["-", "0.030", "1.00"] and "in brackets" not in said


def test_bytes_are_told_an_update_and_unknown_is_empty(plan: Links, table: Verb) -> None:
    plan.measured(DDP, 40, updates=100, payload_bytes=40_000_000, network_sent_bytes=43_000_000)
    plan.measured(FAR, 8, updates=100, payload_bytes=800_000)
    plan.measured(POWER, 30, payload_bytes=None)
    columns = ["payload_mb_per_update", "network_mb_per_update"]
    said = table(plan.write(columns=columns))
    assert row_of(said, "ddp", "1/1")[2:] == ["0.400", "0.430"]
    assert row_of(said, "diloco")[3:] == ["0.00800", "-"]
    assert row_of(said, "ddp", "powersgd")[3:] == ["-", "-"]
    assert "payload: what the strategy hands over" in said and "sent: what left" in said
    table(plan.folder, "--write")
    rows = list(csv.DictReader((plan.folder / "runs.csv").read_text().splitlines()))
    assert [row["payload_mb_per_update"] for row in rows] == ["0.4", "0.008", ""]
    # A sweep of runs that counted nothing may ask for them all the same.
    plan.content["runs"] = plan.content["runs"][2:]
    assert row_of(table(plan.write(columns=columns)), "ddp")[-2:] == ["-", "-"]


def drawn(figure: Figure) -> dict[str, Axes]:
    """Panels by their titles; those of the bottom row, which have none, by their number."""
    return {axes.get_title() or f"quality {n}": axes for n, axes in enumerate(figure.axes)}


def line(axes: Axes, name: str) -> tuple[list[float], list[float]]:
    (found,) = (drawn for drawn in axes.lines if drawn.get_label() == name)
    return np.asarray(found.get_xdata()).tolist(), np.asarray(found.get_ydata()).tolist()


def full(plan: Links) -> Figure:
    for setup in ("2_1", "4_1"):
        for link in (SLOW, FAST, "20ms/50mbit"):
            for seed in (1, 2, 3):
                at = {"seed": seed, "setup": setup, "link": link}
                plan.measured(FAR, math.inf if link == SLOW and seed < 3 else 8.0 + seed,
                              accuracy=0.9 - seed / 100, **at)  # fmt: skip
                plan.measured(DDP, 40.0 * seed**2, accuracy=0.9, **at)
    return draw("strategies", read_sweep(plan.write())).figure


def test_panels_by_setup_and_rate_lines_by_strategy(plan: Links) -> None:
    panels = drawn(full(plan))
    assert [*panels] == [
        *(f"{setup}, {rate} Mbit/s, median {time} time"
          for rate in (1000, 50) for time in ("wall", "training") for setup in ("2_1", "4_1")),
        *("quality 8", "quality 9"),
    ]  # fmt: skip
    assert line(panels["2_1, 50 Mbit/s, median wall time"], "ddp")[1] == [3, 3]
    axes = panels["2_1, 50 Mbit/s, median training time"]
    x, y = line(axes, "ddp")
    assert x == pytest.approx([20, 80], rel=0.05) and y == [160, 160]  # medians of 40, 160, 360
    assert line(panels["4_1, 1000 Mbit/s, median training time"], "diloco h50")[1] == [10]
    assert axes.get_yscale() == "log" and "accuracy 0.9 (s)" in axes.get_ylabel()
    times = [y for points in axes.collections for _, y in np.asarray(points.get_offsets()).tolist()]
    # Every run that reached it is a point: at 80 ms two of diloco did not.
    assert sorted(times) == sorted([40, 160, 360] * 2 + [9, 10, 11] + [11])
    scales = {panels[name].get_ylim() for name in panels if name.endswith(" time")}
    assert len(scales) == 1  # to be compared by eye


def test_one_delay_stands_in_the_middle(plan: Links) -> None:
    for how in (DDP, FAR):
        plan.measured(how, 40.0)
    axes = drawn(draw("strategies", read_sweep(plan.write())).figure)[
        "2_1, 50 Mbit/s, median wall time"
    ]
    low, high = axes.get_xlim()
    assert low * high == pytest.approx(80.0**2) and [*axes.get_xticks()] == [80]


def test_answers_have_the_rate_where_the_target_is_missed(plan: Links) -> None:
    """Without a time it is all that tells which way is faster."""
    for how, seconds in ((DDP, 40.0), (FAR, 20.0), ({"strategy": "local_sgd"}, math.inf)):
        plan.measured(how, seconds, train_samples_per_s=9.0)
    reached, missed = map(str, answers(read_sweep(plan.write())))
    assert reached.startswith("diloco h50 against ddp: wall time to accuracy 0.9: ")
    rate = "against ddp: samples/s: 1.00 times as many"  # of one run each: equal would say too much
    by = "reached by 0 of 1 runs, of the baseline by 1 of 1"
    assert f"{rate}; wall time to accuracy 0.9: {by}" in missed


def test_a_miss_is_marked_at_the_top_and_not_drawn_as_a_time(plan: Links) -> None:
    panels = drawn(full(plan))
    axes = panels["2_1, 50 Mbit/s, median training time"]
    texts = {text.get_text(): text for text in axes.texts}
    assert set(texts) == {"↑ 2 of 3", "missed"}
    assert texts["↑ 2 of 3"].xy[0] == 80 and 0.9 < texts["↑ 2 of 3"].xy[1] < 1
    y = line(axes, "diloco h50")[1]  # two of three: the median is infinite, too
    assert y[0] == 10 and math.isnan(y[1])
    # The strip of the misses lies above every time.
    (strip,) = axes.patches
    assert strip.get_y() > 360 and axes.get_ylim()[1] == pytest.approx(
        strip.get_y() + strip.get_height()
    )
    assert "↑ 2 of 3" not in {
        t.get_text() for t in panels["2_1, 1000 Mbit/s, median wall time"].texts
    }


def test_a_miss_is_marked_where_too_few_times_count_for_a_median(plan: Links) -> None:
    """One of three misses, and one that reaches the target was disturbed."""
    for seed in (1, 2, 3):
        plan.measured(DDP, 40.0, seed)
        plan.measured(FAR, math.inf if seed == 1 else 10.0, seed)
    file = plan.output_dir / plan.content["runs"][-1]["path"] / "environment.json"
    facts = json.loads(file.read_text()) | {"launch": {"cpu_busy_share": 0.6}}
    file.write_text(json.dumps(facts))
    axes = drawn(draw("strategies", read_sweep(plan.write())).figure)[
        "2_1, 50 Mbit/s, median wall time"
    ]
    assert "\u2191 1 of 3" in {text.get_text() for text in axes.texts}


def test_panels_of_quality_have_one_scale(plan: Links) -> None:
    for setup, loss in (("2_1", 0.01), ("4_1", 0.2)):
        for seed in (1, 2):
            plan.measured(DDP, 40.0, seed, setup)
            plan.measured(FAR, 10.0, seed, setup, accuracy=0.95 - loss - seed / 1000)
    panels = drawn(draw("strategies", read_sweep(plan.write())).figure)
    one, other = (axes for title, axes in panels.items() if title.startswith("quality"))
    assert one.get_xlim() == other.get_xlim()


def test_the_loss_of_quality_is_stated(plan: Links) -> None:
    panels = drawn(full(plan))
    axes = panels["quality 8"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["diloco h50"]
    (text,) = (text.get_text() for text in axes.texts)
    # -1, -2 and -3 points of three seeds, on each of three links: three values, not nine.
    assert text == "\u22122.0 (\u22124.5 to +0.5)" and "that of ddp" in axes.get_xlabel()
    assert "bars, brackets: 95 % interval" in axes.get_xlabel()
    (bar,) = (x for x in map(np.asarray, (line.get_xdata() for line in axes.lines))
              if len(x) == 2 and len({*x}) == 2)  # fmt: skip
    assert [*bar] == pytest.approx([-2 - 2.484138, -2 + 2.484138])
    points = np.asarray(axes.collections[0].get_offsets()).tolist()
    assert sorted(x for x, _ in points) == pytest.approx([-3] * 3 + [-2] * 3 + [-1] * 3)


def test_without_a_seed_in_common_the_loss_of_quality_is_that_of_tables(plan: Links) -> None:
    for seed in (1, 2):
        plan.measured(DDP, 40.0, seed, accuracy=0.95 + seed / 1000)
        plan.measured(FAR, 10.0, seed + 2, accuracy=0.93 - seed / 100)
    sweep = read_sweep(plan.write())
    ((group, base),) = compared_groups(sweep)
    gain = measured_against(group, base, ACCURACY, QUALITY).scaled(100)
    panels = drawn(draw("strategies", sweep).figure)
    (axes,) = (panel for title, panel in panels.items() if title.startswith("quality"))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["diloco h50"]
    bars = (np.asarray(line.get_xdata()) for line in axes.lines)
    assert any([*bar] == pytest.approx([gain.low, gain.high]) for bar in bars if len({*bar}) == 2)
    assert gain.value == pytest.approx(-3.65) and not gain.paired


def test_strategies_keep_their_colours_and_the_baseline_is_black(plan: Links) -> None:
    figure = full(plan)
    marks = colours(figure)
    assert [*marks] == ["ddp", "diloco h50"] and marks["ddp"] == "#000000"
    for title, axes in drawn(figure).items():
        if title.endswith(" time"):
            shown = {str(found.get_label()): to_hex(found.get_color()) for found in axes.lines}
            assert {name: shown[name].upper() for name in marks} == marks


def colours(figure: Figure) -> dict[str, str]:
    """Of the names in the legend; only these occur in the figure, but for references."""
    (legend,) = figure.legends
    return {str(mark.get_label()): str(mark.get_color()) for mark in legend.get_lines()}


def test_strategies_setups_and_links_have_one_colour_on_a_page(plan: Links) -> None:
    """In every figure, whichever of them a sweep has and in whatever order it has them."""
    full(plan)
    other = Links(plan.output_dir.parent / "other")
    for how in (FAR, FAR | {"sync_every": 10}, POWER, DDP):
        other.measured(how, 8.0, setup="4_1")
    sweeps = [read_sweep(plan.folder), read_sweep(other.write())]
    styles = Styles(sweeps)
    shown: dict[str, set[str]] = {}
    for sweep in sweeps:
        for name in ("strategies", "frontier"):
            for label, colour in colours(draw(name, sweep, styles).figure).items():
                # The frontier has set-ups in one panel, and tells them apart by their marks.
                shown.setdefault(label.removesuffix(", 2_1").removesuffix(", 4_1"), set()).add(
                    colour
                )
    assert {*shown} == {"ddp", "diloco h50", "diloco h10", "ddp powersgd"}
    assert all(len(found) == 1 for found in shown.values())
    assert len({colour for (colour,) in shown.values()}) == len(shown)
    for axis, values in (("setup", {"2_1", "4_1"}), ("link", {SLOW, FAST})):
        of_axis = styles.of_axis(axis, values)
        assert {*of_axis} == values and len({*of_axis.values()}) == 2
        assert of_axis == Styles(reversed(sweeps)).of_axis(axis, values)


def test_texts_and_legend_do_not_overlap(plan: Links) -> None:
    """No two texts of a panel overlap, nor does the legend lie over a panel."""
    for number, how in enumerate((POWER, FAR | {"sync_every": 10}, {"strategy": "hivemind"})):
        for link in (SLOW, "20ms/50mbit", "1ms/50mbit"):
            plan.measured(how, math.inf, link=link, accuracy=0.5 + number / 100)
    figure = full(plan)
    figure.draw_without_rendering()  # lays out
    (legend,) = figure.legends
    edge = legend.get_window_extent().y0
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
        assert all(
            not one.overlaps(other) for n, one in enumerate(boxes) for other in boxes[n + 1 :]
        )
        marked = [text for text in axes.texts if text.get_text().startswith("↑")]
        assert all(text.get_window_extent().x0 >= axes.bbox.x0 for text in marked)
        tight = axes.get_tightbbox()
        assert tight is not None and tight.y1 < edge and tight.x1 <= figure.bbox.x1
        assert tight.x0 >= 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": None}, "has no target"),
        ({"target": {"metric": "acuracy", "value": 1}}, "has a number named acuracy"),
    ],
)
def test_what_the_figure_needs(
    plan: Links, figures: Verb, changes: dict[str, Any], words: str
) -> None:
    plan.measured(DDP, 40)
    assert words in figures.refused(plan.write(**changes))


def test_an_axis_that_it_cannot_show_is_named(plan: Links) -> None:
    """One that has a single value, as where each entry of `runs` gives it, does not vary."""
    plan.measured(DDP | {"lr": 0.1}, 40)
    plan.measured(FAR | {"lr": 0.1}, 8)
    sweep = read_sweep(plan.write())
    assert figure_for(sweep) == "time_to_accuracy" and draw("strategies", sweep)  # over one link
    assert [sweep.short_name_of(group) for group in sweep.groups] == ["ddp", "diloco h50"]
    (answer,) = map(str, answers(sweep))
    assert answer.startswith("diloco h50 against ddp: ")
    plan.measured(FAR | {"lr": 0.2}, 8)
    sweep = read_sweep(plan.write())
    with pytest.raises(UserError, match=r"lr varies too.*/sizes:lr=0.1$"):
        draw("strategies", sweep)
    with pytest.raises(UserError, match="strategy, lr varies too"):
        draw("propagation", sweep)
    part = read_sweep_part(f"{sweep.folder}:lr=0.1")
    assert figure_for(part) == "time_to_accuracy" and draw("strategies", part)


def test_without_a_link_there_is_nothing_to_draw(plan: Links) -> None:
    plan.waiting(DDP)
    with pytest.raises(UserError, match="no finished run has a link"):
        draw("strategies", read_sweep(plan.write(baseline=None)))


@pytest.mark.parametrize("baseline", [None, FAR])
def test_one_strategy_alone_is_compared_with_nothing(
    plan: Links, baseline: dict[str, Any] | None
) -> None:
    plan.measured(FAR, 8)
    figure = draw("strategies", read_sweep(plan.write(baseline=baseline))).figure
    assert [axes.get_title() for axes in figure.axes] == [
        "2_1, 50 Mbit/s, median wall time", "2_1, 50 Mbit/s, median training time"
    ]  # fmt: skip


def test_the_file_is_called_after_the_figure_and_says_what_is_missing(
    plan: Links, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.measured(DDP, 40)
    plan.measured(FAR, 8)
    plan.measured(FAR, 7, link=FAST)
    assert main(["figures", str(plan.write())]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"written: {plan.folder / name}" for name in ("strategies.png", "strategies-dark.png")
    ]
    assert (plan.folder / "strategies.png").read_bytes()[:4] == b"\x89PNG"
    plan.measured(POWER, 8, outcome="failed", reason="no")
    plan.waiting(POWER)
    assert main(["figures", str(plan.write())]) == 0
    assert "2 of 5 runs have not finished: 1 failed, 1 waiting\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seeds", "updates", "why"),
    [((1, 2), 10, None), ((1, 2), 9, "updates"), ((1,), 10, "one seed on a side")],
)
def test_accuracy_is_drawn_where_it_is_compared(
    seeds: tuple[int, ...], updates: int, why: str | None, plan: Links
) -> None:
    for seed in seeds:
        plan.measured(DDP, 40, seed, updates=10)
        plan.measured(FAR, 8, seed, accuracy=0.9, updates=updates)
    drawn = draw("strategies", read_sweep(plan.write()))
    assert len(drawn.figure.axes) == (3 if why is None else 2)
    notes = [] if why is None else [f"accuracy of diloco h50 not compared ({why})"]
    assert drawn.notes[: len(notes)] == notes and len(drawn.notes) == len(notes) + 1
