"""One rule of what is compared, and one of whose times count, for every verb that reads records."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.core.records import RunFolder
from harness.core.settings import UserError
from harness.read.compare.answers import answers
from harness.read.compare.compare import compare, sentence
from harness.read.drawing import NothingToDraw
from harness.read.explain.explain import group_breakdown
from harness.read.figures.catalogue import draw
from harness.read.predict.fitting import measured_beside
from harness.read.records.comparable import ONE_PAIR, ONE_SEED, QUALITY, SPEED, judge, refused
from harness.read.records.groups import Group
from harness.read.records.runs import Run
from harness.read.records.selection import read_group, select
from harness.read.records.sweeps import read_sweep
from tests.support.drawn import measured, points
from tests.support.paired import Verb, pair, timed
from tests.support.records import TARGET, Plan, epochs, lines, row_of, with_epochs, with_ranks

BUSY = {"launch": {"cpu_busy_share": 0.6}}
GAIN, POINTS = "train_samples_per_s_gain_percent", "accuracy_gain_points"


def add(folder: Path, facts: dict[str, Any]) -> None:
    """Facts to the environment of a record."""
    file = folder / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def on_cpu(threads: int) -> dict[str, Any]:
    return {"threads": threads, "observed": {"device": "cpu"}}


def compared(plan: Plan) -> tuple[dict[str, Any], set[str]]:
    """The second group of the table, and the questions that `compare` answers of both."""
    row = plan.groups()[1]
    verdicts = compare(*read_sweep(plan.folder).groups).verdicts
    return row, {question for question, verdict in verdicts.items() if not verdict.reasons}


@pytest.mark.parametrize(
    ("facts", "summary", "asked"),
    [
        ({}, {}, {SPEED, QUALITY}),
        ({"effective_batch": 8}, {}, {SPEED}),
        ({}, {"updates": 50}, {SPEED}),
        ({"data": {"data_checksum": "other"}}, {}, set[str]()),
        ({"data": {"test_samples": 7}}, {}, {SPEED}),
        (BUSY, {}, {QUALITY}),
        (on_cpu(2), {}, {QUALITY}),
    ],
)
def test_a_cell_shows_what_compare_would_and_nothing_else(
    facts: dict[str, Any], summary: dict[str, Any], asked: set[str], plan: Plan
) -> None:
    plain = {"effective_batch": 4, "data": {"data_checksum": "one", "test_samples": 500}}
    for seed in (1, 2):
        plan.run("1_1", seed=seed, environment=plain | on_cpu(1))
        other = plain | on_cpu(1) | facts
        other["data"] = plain["data"] | facts.get("data", {})
        plan.run("1_2", seed=seed, devices=2, environment=other, **summary)
    row, questions = compared(plan)
    assert questions == asked
    assert (row[GAIN] is not None) == (SPEED in asked)
    assert (row[POINTS] is not None) == (QUALITY in asked)


def test_what_is_not_compared_is_said_below_the_table(plan: Plan, table: Verb) -> None:
    for seed in (1, 2):
        plan.run("1_1", seed=seed)
        plan.run("1_2", seed=seed, devices=2, updates=50, environment=BUSY)
    output = table(plan.write(columns=[GAIN, POINTS]))
    assert row_of(output, "1_2")[-2:] == ["-", "-"]
    assert "-: samples/s not compared with the baseline in 1 row (other programs)" in output
    assert (
        "-: accuracy not compared with the baseline in 1 row (effective batch, updates)" in output
    )


def test_a_batch_that_the_sweep_asks_about_is_compared(plan: Plan) -> None:
    for seed in (1, 2):
        plan.run("1_1", 4, seed, accuracy=0.9)
        plan.run("1_1", 8, seed, updates=50, accuracy=0.8)
    _, row = plan.groups(baseline={"per_gpu_batch": 4})
    assert row[POINTS] == pytest.approx(-10)


def test_repeats_of_seeds_are_no_further_seeds(plan: Plan) -> None:
    """A seed that is measured again ends with the same weights: it says nothing of other seeds."""
    for seed, accuracy in ((1, 0.90), (2, 0.92), (3, 0.94)):
        for repeat in (1, 2):
            plan.run("1_2", 8, seed=seed, accuracy=accuracy, label={"repeat": repeat})
    (row,) = plan.groups()
    assert (row["finished"], row["accuracy_n"]) == (6, 3)
    assert row["accuracy"] == pytest.approx(0.92) and row["accuracy_sd"] == pytest.approx(0.02)
    assert row["accuracy_low"] == pytest.approx(0.8703, abs=1e-4)
    assert row["accuracy_high"] == pytest.approx(0.9697, abs=1e-4)


@pytest.mark.parametrize(
    ("busy", "noted", "ending"),
    [
        ((1, 2), "of unknown noise (of 1 pair with the same seed)",
         "; with one pair of the same seed its noise is unknown"),
        ((1,), "no spread to judge noise by (of 2 pairs with the same seed)",
         ", 95 % interval 1.100 to 1.100, 2 seeds paired by seed: no spread to judge noise by"),
    ],
)  # fmt: skip
def test_a_ratio_is_that_of_the_seeds_of_both_sides(
    busy: tuple[int, ...], noted: str, ending: str, plan: Plan
) -> None:
    """The seeds take 2, 4 and 8 s, and 1.1 times as long."""
    for seed in (1, 2, 3):
        facts = BUSY if seed in busy else {}
        plan.run("1_1", seed=seed, environment=facts, epochs=epochs(0.95, seconds=2.0**seed))
        rows = epochs(0.95, seconds=1.1 * 2.0**seed)
        plan.run("1_2", seed=seed, devices=2, epochs=rows)
    sweep = read_sweep(plan.write(target=TARGET))
    (answer,) = map(str, answers(sweep))
    assert f"training time to accuracy 0.9: 1.10 times as long, {noted}; " in answer
    one, other = (replace(group, target=sweep.target) for group in sweep.groups)
    sides = replace(one, name="A"), replace(other, name="B")
    (row,) = [row for row in compare(*sides).rows if row.measure.name == "tta_train_s"]
    assert sentence(row, sides).endswith(f": B has 1.100 times that of A{ending}")
    assert plan.groups(target=TARGET)[1]["tta_train_s_ratio_n"] == 3 - len(busy)


def test_seeds_without_a_pair_are_told_of_some_cases(plan: Plan) -> None:
    for batch, busy in ((4, (1, 2)), (8, (1,)), (16, ())):
        for seed in (1, 2, 3):
            facts = BUSY if seed in busy else {}
            plan.run("1_1", batch, seed, environment=facts, train_samples_per_s=100.0 + seed)
            plan.run("1_2", batch, seed, train_samples_per_s=200.0 + batch * seed)
    (answer,) = map(str, answers(read_sweep(plan.write())))
    assert " (of 1 to 2 pairs with the same seed in 2 of 3 cases); accuracy: equal" in answer


@pytest.mark.parametrize(("seeds", "known"), [((1,), False), ((1, 1), False), ((1, 2), True)])
def test_one_seed_shows_no_points(seeds: tuple[int, ...], known: bool, plan: Plan) -> None:
    """Repeats of one seed are one value of its quality."""
    for repeat, seed in enumerate(seeds):
        for setup in ("1_1", "1_2"):
            batch = {"effective_batch": 4}
            plan.run(setup, seed=seed, label={"repeat": repeat}, environment=batch)
    _, row = plan.groups()
    assert (row[POINTS] is not None) == known
    assert row[GAIN] is not None


def test_one_seed_on_either_side_shows_no_points(plan: Plan) -> None:
    for seed in (1, 2):
        plan.run("1_1", seed=seed)
    plan.run("1_2", seed=1)
    plan.write()
    one, two = read_sweep(plan.folder).groups[::-1]
    assert refused(one, two, QUALITY) == refused(two, one, QUALITY) == [ONE_SEED]


def test_one_seed_in_common_is_one_seed(plan: Plan, table: Verb) -> None:
    """Of two a side, one that both have: it is equal, where the means are 7.5 points apart."""
    for setup, accuracies in (("1_1", {2: 0.95, 4: 0.90}), ("1_2", {4: 0.90, 42: 0.80})):
        for seed, accuracy in accuracies.items():
            plan.run(setup, seed=seed, accuracy=accuracy)
    (answer,) = map(str, answers(read_sweep(plan.write())))
    assert "samples/s: 1.00 times as many, of unknown noise (of 1 pair with" in answer
    assert f"; accuracy: not compared ({ONE_PAIR}); 2 runs each." in answer
    assert row_of(table(plan.write(columns=["accuracy", POINTS])), "1_2")[-1] == "-"


def test_batches_of_other_shares_are_one_question(plan: Plan) -> None:
    """Both settings of the effective batch may differ, and nothing else beside them."""
    for setup, batch, grad_acc in (("1_1", 4, 1), ("1_1", 8, 2), ("1_2", 8, 2)):
        for seed in (1, 2):
            plan.run(setup, batch, seed, label={"grad_acc": grad_acc},
                     environment={"effective_batch": batch * grad_acc})  # fmt: skip
    plan.write(axes=["setup", "per_gpu_batch", "grad_acc"])
    base, other, on_two = read_sweep(plan.folder).groups
    assert refused(other, base, QUALITY) == []
    assert refused(on_two, base, QUALITY) == ["effective batch"]


def test_without_finished_runs_nothing_else_is_a_reason() -> None:
    failed = replace(finished_run(1, environment=on_cpu(2)), state="failed", reason="no disk")
    killed = replace(failed, state="interrupted", reason=None)
    quiet = Group((finished_run(1), finished_run(2)), name="B")
    verdicts = judge(Group((killed, failed), name="A"), quiet)
    (why,) = verdicts[SPEED].reasons
    assert why == "A has no finished run(s) and 1 failed, 1 interrupted: no disk"
    assert verdicts[QUALITY].reasons == [why] and verdicts[QUALITY].notes == []


def test_why_a_condition_matters_is_said_where_both_sides_know_it() -> None:
    def side(name: str, checksum: str | None) -> Group:
        facts = {**on_cpu(1), "data": {"data_checksum": checksum}}
        return Group((finished_run(1, environment=facts),), name=name)

    def reason(checksum: str | None) -> str:
        (why,) = judge(side("A", "aaaa"), side("B", checksum))[SPEED].reasons
        return why

    assert reason("bbbb").endswith("A has aaaa, B has bbbb (they trained on other samples)")
    assert reason(None) == "data checksum: A has aaaa, B has an unknown one"


def test_times_of_unlike_threads_have_no_mean(plan: Plan, table: Verb) -> None:
    for seed in (1, 2):
        plan.run("1_1", seed=seed, environment=on_cpu(seed), train_samples_per_s=100.0 * seed)
    (row,) = plan.groups()
    assert row["train_samples_per_s"] is None and row["accuracy"] is not None
    output = table(plan.write())
    left_out = "no times of 1 group whose runs had unlike numbers of threads per process"
    assert f"-: {left_out}" in output
    with pytest.raises(NothingToDraw, match=f"no finished run has accuracy and a time; {left_out}"):
        draw("frontier", measured(plan))
    with pytest.raises(UserError, match="differ in threads \\(1, 2\\): name one kind"):
        group_breakdown(Group(read_sweep(plan.folder).runs, name="RUN", selector="there"))
    for batch in (8, 16):
        plan.run("1_1", batch, epochs=epochs(0.5, 0.8))
    for name in ("epoch_time", "time_to_accuracy", "frontier"):
        assert f"{left_out} (b4)" in draw(name, measured(plan)).notes
    assert not any(left_out in note for note in draw("accuracy", measured(plan)).notes)


@pytest.fixture
def half_busy(plan: Plan) -> Plan:
    """Two seeds on each of two batches; of one batch one run was beside others, and slower."""
    for batch, seed, slow in ((4, 1, 1), (4, 2, 1), (8, 1, 1), (8, 2, 10)):
        rows = epochs(0.5, 0.95, seconds=2.0 * slow)
        facts = BUSY if slow > 1 else {}
        plan.run("1_1", batch, seed, environment=facts, epochs=rows,
                 accuracy=0.95 - seed / 100)  # fmt: skip
    return plan


def test_figures_show_the_times_that_tables_show(half_busy: Plan) -> None:
    sweep = measured(half_busy, target=TARGET, baseline=None)
    note = "1 run with others on the machine"
    drawn = draw("epoch_time", sweep)
    assert [y for _, y in points(drawn)] == [2.0, 2.0, 2.0]
    assert any(note in text for text in drawn.notes)
    for name in ("time_to_accuracy", "frontier"):
        drawn = draw(name, sweep)
        assert max(x for x, _ in points(drawn)) < 40, name
        assert any(note in text for text in drawn.notes), name
    accuracy = draw("accuracy", sweep)
    assert not any(note in text for text in accuracy.notes) and len(points(accuracy)) == 8


def test_the_table_of_runs_marks_what_a_sweep_marks(half_busy: Plan, table: Verb) -> None:
    half_busy.write()
    output = table(half_busy.output_dir)
    assert output.count("finished§") == 1 and output.count("finished") > 3
    assert "§ 1 run with others on the machine" in output
    rows = json.loads(table(half_busy.output_dir, "--json"))["runs"]
    assert sorted(row["disturbed"] for row in rows) == [False, False, False, True]


def test_times_of_another_batch_than_asked_for_are_in_no_table(plan: Plan, table: Verb) -> None:
    folder = plan.run()
    (folder / "settings.json").write_text(json.dumps({"schema": 1, "per_gpu_batch": 8}))
    start = {"event": "start", "attempt": 1, "unix": 1.0, "from_update": 0, "per_gpu_batch": 4}
    lines(RunFolder(folder).attempts, [start])
    (row,) = json.loads(table(plan.output_dir, "--json"))["runs"]
    assert row["train_samples_per_s"] is None and row["accuracy"] is not None
    assert "§ 1 run in another batch per process than asked for" in table(plan.output_dir)


def of_batches(root: Path, changed: dict[str, Any], slow: float = 1.0) -> Path:
    """Batches 8, 16, 32, and facts of one of the runs with 32."""
    for batch in (8, 16, 32):
        for seed in (1, 2):
            run_folder = pair(root, seed, "--per_gpu_batch", str(batch),
                         environment={"effective_batch": 2 * batch, **on_cpu(1)})  # fmt: skip
            once = slow if (batch, seed) == (32, 2) else 1.0
            rows = [row | {"samples": 100 + batch, "epoch_time_s": 2.0 * once}
                    for row in epochs(0.5, 0.7, 0.95)]  # fmt: skip
            with_epochs(run_folder, rows)
            if once != 1.0 or (batch, seed) == (32, 2):
                add(run_folder, changed)
    return root


def test_batches_take_the_times_that_tables_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = Verb("batches", capsys)
    of_batches(tmp_path, BUSY, slow=100.0)
    output = batches.in_one_line(tmp_path, "--target", "accuracy=0.9")
    assert "303.00" not in output and "1 run with others on the machine" in output
    assert "only their times count" in output and "least training time" in output


def test_batches_do_not_compare_times_of_unlike_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = Verb("batches", capsys)
    of_batches(tmp_path, on_cpu(2))
    output = batches.in_one_line(tmp_path, "--target", "accuracy=0.9")
    assert (
        "times are not compared: threads per process: batch 16 has 1, batch 64 has 1 and 2"
        in output
    )
    assert "least training time" not in output


def test_a_batch_whose_misses_leave_no_time_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is left out itself; the times of the others are still those of one machine."""
    of_batches(tmp_path, {})
    for run_folder in (tmp_path / "bert" / "1_2").glob("run_*"):
        if json.loads((run_folder / "settings.json").read_text())["per_gpu_batch"] == 8:
            is_first = run_folder.name.startswith("run_1_")
            add(run_folder, {} if is_first else BUSY)
            rows = [row | {"samples": 100} for row in epochs(0.5, 0.6 if is_first else 0.95)]
            with_epochs(run_folder, rows)
    output = Verb("batches", capsys).in_one_line(tmp_path, "--target", "accuracy=0.9")
    assert "batch 16 is left out: 1 of 2 runs miss the target" in output
    assert "times are not compared" not in output and "least training time" in output


def test_an_example_with_a_blank_is_quoted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for column in ("review text", "title"):
        timed(tmp_path, 8, 1, 1, "--image_column", column, seed=len(column))
    error = Verb("predict", capsys).refused(tmp_path, "--setup", "1_1")
    assert f"for example '{tmp_path}:image_column=review text'" in error


def test_predict_refuses_unlike_threads_and_takes_one_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predict = Verb("predict", capsys)
    for batch, threads in ((8, 1), (16, 1), (32, 2)):
        add(timed(tmp_path, batch), on_cpu(threads) | {"updates": 1})
    error = predict.refused(tmp_path, "--setup", "1_1")
    assert "its runs differ in threads (1, 2): name one kind, for example" in error
    assert f"{tmp_path}:threads=1 (a sweep gives all runs as many" in error
    assert "fitted on 2 runs" in predict(
        f"{tmp_path}:threads=1", "--setup", "1_1", "--backend=gloo"
    )
    group = read_group("A", f"{tmp_path}:threads=2", None)
    assert [run.threads for run in group.runs] == [2]


def test_a_table_takes_a_part_of_a_sweep_or_of_a_folder(half_busy: Plan, table: Verb) -> None:
    folder = half_busy.write(axes=["per_gpu_batch"], baseline={"per_gpu_batch": 4})
    output = table(f"{folder}:per_gpu_batch=8")
    assert "2/2§" in output and "vs base" not in output  # its baseline is left out
    assert "vs base" in table(f"{folder}:setup=1_1") and "2/2§" in table(f"{folder}:setup=1_1")
    assert "no run with per_gpu_batch=5" in table.refused(f"{folder}:per_gpu_batch=5")
    assert "--write is for a whole sweep" in table.refused(f"{folder}:per_gpu_batch=8", "--write")
    add(half_busy.output_dir / "bert" / "1_1_8_1", on_cpu(2))
    (run,) = json.loads(table(f"{half_busy.output_dir}:threads=2", "--json"))["runs"]
    assert run["path"].endswith("1_1_8_1")


def test_figures_and_reports_take_a_part_with_a_folder_of_their_own(
    half_busy: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = half_busy.write(axes=["per_gpu_batch"], baseline=None)
    part, out = f"{folder}:seed=1", tmp_path / "part"
    for verb in ("figures", "report"):
        assert main([verb, part]) == 2
        assert "give --out DIR for the" in capsys.readouterr().err
    assert main(["figures", part, "--out", str(out)]) == 0
    assert (out / "epoch_time.png").exists() and not (folder / "epoch_time.png").exists()
    assert "others on the machine" not in capsys.readouterr().out
    assert main(["report", f"{half_busy.output_dir}:seed=1", "--out", str(out)]) == 0
    text = (out / "report.md").read_text()
    assert "1/1" in text and "2/2" not in text
    assert main(["report", f"{half_busy.output_dir}:seed=9", "--out", str(out)]) == 2
    assert "no run with seed=9; there is 1, 2" in capsys.readouterr().err


def test_bars_nodes_and_readings_are_those_of_quiet_runs(plan: Plan) -> None:
    facts = {"nodes": 2, "processes_per_node": 1}
    for seed, wall_s in ((1, 400.0), (2, 40.0)):
        busy = BUSY if seed == 1 else {}
        row = {"epoch": 1.0, "epoch_time_s": 22.0, "timed_steps": 8, "timed_s": 16.0,
               "timed_samples": 64, "unix": 1000.0}  # fmt: skip
        folder = plan.run("2_1", seed=seed, epochs=[row], environment=facts | busy, updates=10,
                          wall_s=wall_s, eval_time_s=5.0, save_time_s=2.0)  # fmt: skip
        with_ranks(folder, *[{"user_s": wall_s, "system_s": 1.0}] * 2)
        node = {"cpu_percent": float(seed), "memory_gib": 1.0}
        lines(folder / "telemetry" / "node_0.jsonl", [{"unix": 1000.0, "gpus": [], "node": node}])
    sweep = measured(plan, baseline=None, per_node=True)
    assert sum(
        bar.get_width() for bar in draw("where_time_went", sweep).figure.axes[0].patches
    ) == (pytest.approx(40))
    assert "seed 2: cores busy (%) 2 in the mean" in draw("usage", sweep).alt
    (row,) = plan.groups(baseline=None, per_node=True)
    assert row["user_s_per_node"] == [40, 40]


def finished_run(seed: int, busy: bool = False, **fields: Any) -> Run:
    facts = {**on_cpu(1), **(BUSY if busy else {})}
    return Run({"seed": seed}, "run", state="finished", **{"environment": facts, **fields})


def test_a_miss_brings_no_disturbed_time_back() -> None:
    times = {1: 26.0, 2: math.inf, 3: 2.5}
    runs = [finished_run(seed, seed == 1, measures={"tta_train_s": times[seed]}) for seed in times]
    group = Group(tuple(runs))
    assert [run.seed for run in group.timed] == [2, 3]
    # Two of three reach the target, and the time of one of these is unknown.
    assert group.values("tta_train_s") == []
    quiet = replace(runs[0], environment=on_cpu(1))
    assert Group((quiet, *runs[1:])).values("tta_train_s") == [26.0, math.inf, 2.5]
    more = [finished_run(seed, measures={"tta_train_s": math.inf}) for seed in (4, 5)]
    assert Group((*runs, *more)).values("tta_train_s") == [math.inf, 2.5, math.inf, math.inf]
    unlike = replace(runs[2], environment=on_cpu(2))
    assert Group((*runs[:2], unlike)).values("tta_train_s") == []
    misses = [replace(run, measures={"tta_train_s": math.inf}) for run in (quiet, unlike)]
    assert Group(tuple(misses)).values("tta_train_s") == [math.inf, math.inf]


def test_a_group_whose_times_are_all_disturbed_is_not_compared_as_quiet() -> None:
    """Its only quiet run has another batch than asked for, and thus no times."""
    rate = {"train_samples_per_s": 100.0}
    quiet = Group(tuple(finished_run(seed, measures=rate) for seed in (1, 2)), name="B")
    mixed = Group(
        (finished_run(1, True, measures=rate), finished_run(2, other_batches=(8,))), name="A"
    )
    assert judge(mixed, quiet)[SPEED].reasons == [
        "other programs: 1 of 2 runs of A ran beside them (--pack, or more than 25% of the cores)"
    ]


def test_threads_count_where_a_cpu_computes() -> None:
    """LogCallback alone records no device, and the GPUs that it trains on."""
    on_gpu = {"threads": 2, "gpus": ["H100"]}
    assert finished_run(1, environment={"threads": 2, "gpus": []}).threads == 2
    assert finished_run(1, environment=on_gpu).threads == 0
    assert finished_run(1, environment={}).threads is None
    assert finished_run(1, environment={"observed": {"device": "cuda:0"}}).threads == 0
    assert finished_run(1, environment=on_gpu | {"observed": {"device": "cpu"}}).threads == 2
    rate = {"train_samples_per_s": 100.0}
    alone = [finished_run(n, environment=on_gpu | {"threads": n}, measures=rate) for n in (1, 8)]
    ours = finished_run(1, environment=on_gpu | {"observed": {"device": "cuda:0"}}, measures=rate)
    assert Group(tuple(alone)).values("train_samples_per_s") == [100.0, 100.0]
    assert judge(Group(tuple(alone), name="A"), Group((ours,), name="B"))[SPEED].reasons == []


@pytest.mark.parametrize("first", ["0.1", None])
def test_a_setting_of_some_runs_selects_whichever_comes_first(first: str | None) -> None:
    decays = [first, "0.1" if first is None else None]
    runs = [
        finished_run(seed, settings={} if decay is None else {"weight_decay": decay})
        for seed, decay in enumerate(decays)
    ]
    runs = [replace(run, label=run.label | run.settings) for run in runs]
    (chosen,) = select(Path("out"), runs, {"weight_decay": "0.1"})
    assert chosen.settings == {"weight_decay": "0.1"}
    (other,) = select(Path("out"), runs, {"weight_decay": "none"})
    assert other.settings == {}
    with pytest.raises(
        UserError, match=r"out: its runs have no momentum; they have .*weight_decay"
    ):
        select(Path("out"), runs, {"momentum": "1"})


def test_links_beside_a_selection_count_whatever_its_values_have(tmp_path: Path) -> None:
    link = {
        "nodes": 2, "processes_per_node": 1, "backend": "gloo", "rtt_min_ms": 66.0,
        "bandwidth_mbit": 300.0, "allreduce": [{"bytes": 4_000_000, "s": 0.4}],
    }  # fmt: skip
    (tmp_path / "link1.json").write_text(json.dumps(link))
    every = [*measured_beside(str(tmp_path))]
    assert len(every) == 1
    for part in ("script=vit", "dataset=embedded:digits", "script=vit,dataset=embedded:digits"):
        assert [*measured_beside(f"{tmp_path}:{part}")] == every


def test_compare_says_that_all_runs_of_both_were_disturbed(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        plan.run("1_1", seed=seed, environment=BUSY)
        plan.run("1_2", seed=seed, environment=BUSY)
    folder = plan.write()
    assert main(["compare", f"{folder}:setup=1_1", f"{folder}:setup=1_2"]) == 0
    output = capsys.readouterr().out
    assert "speed: comparable, as far as disturbed runs are" in output
    assert "quality: comparable\n" in output
