"""The table of a sweep as files and on the screen, and what is wrong with a plan or a record."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.core.settings import UserError
from harness.read import load_sweep, load_sweep_runs
from harness.read.records.baseline import GAIN, POINTS
from harness.read.records.sweeps import read_sweep
from harness.read.report.report import make_report
from harness.read.table import Table, chosen, latex_lines
from harness.read.tables.sweep_table import sweep_table
from tests.support.paired import Verb
from tests.support.records import TARGET, Plan, epochs, record, row_of, timed_epochs


@pytest.fixture
def small(plan: Plan) -> Path:
    """Two seeds on one process and on two, one of them failed, and a set-up that was skipped."""
    plan.run("1_1", seed=1, train_samples_per_s=1000.0, epochs=timed_epochs(0.9, 0.8))
    plan.run("1_1", seed=2, train_samples_per_s=1020.0, epochs=timed_epochs(0.7, 0.82))
    plan.run("1_2", seed=1, devices=2, updates=50, train_samples_per_s=1515.0,
             train_samples_per_s_per_gpu=757.5, epochs=timed_epochs(0.9))  # fmt: skip
    plan.run("1_2", seed=2, devices=2, outcome="oom", reason="no room | for `x`")
    plan.planned("2_1", seed=1, skipped="needs 2 nodes")
    return plan.write(target=TARGET)


# sd of 0.80 and 0.82 is 0.0141, of 1000 and 1020 it is 14.1; of seed 1, 1515 / 1000 = 1.515.
GOLDEN = r"""### Which batch?

sweep sizes (--tiny), a-cpux2, all: batch per GPU 4

| setup | n | batch | updates | accuracy | eval loss | samples/s | per GPU | vs base | weak eff. | epoch s | train s | wall s | target train s | target wall s | reached |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
| 1_1 | 2/2 | 4 | 100 | 0.8100 ± 0.0141 | 0.5000 | 1,010 ± 14 | 100 | base | 1.00 | 10.0 | 20.0 | 40.0 | missed 1 of 2 | missed 1 of 2 | 1/2 |
| 1_2 | 1/2 | 8 | 50† | 0.9000 | 0.5000 | 1,515 | 758 | +51.5%¶ | 0.76¶ | 10.0 | 10.0 | 40.0 | 10.0 | 13.0 | 1/1 |
| 2_1 | 0/1 | - | - | skipped | - | - | - | - | - | - | - | - | - | - | - |

Against the baseline:

- setup 1_2 against setup 1_1:
  - samples/s: 1.51 times as many, of unknown noise (of 1 pair with the same seed)
  - wall time to accuracy 0.9: reached by 1 of 1 runs, of the baseline by 1 of 2
  - training time to accuracy 0.9: reached by 1 of 1 runs, of the baseline by 1 of 2
  - accuracy: not compared (effective batch, updates, one seed on a side)
  - 1 to 2 runs each.

Not finished:

- setup 1_2, seed 2 (`bert/1_2_4_2`): `oom: no room | for 'x'`
- 1 run: `skipped: needs 2 nodes`

n: runs finished/planned; numbers are means over the finished ones; ±: sample standard deviation; batch: samples of one update over all processes; samples/s: training only, all processes, first steps left out, harmonic mean; train s: without evaluation and saving; wall s: everything

base: setup 1_1 with the same batch per GPU; vs base: samples/s, ratio of geometric means (those shown are harmonic); ¶ 1 row: by 1 pair with the same seed alone, beside means of all that count; eff.: scaling efficiency, weak X_N/(N X_1) of samples/s at equal batch per device; † other number of updates than the baseline: not the same training; held fixed: batch per GPU; learning-rate rule: none

target: first epoch with accuracy at least 0.9; target train s: its training and that before; target wall s: everything until its row but the measuring; reached: of the finished runs; a run that misses counts as infinite

Environment: a-cpux2 (A CPU, 2 cores, 8 GiB); torch 2.13.0; transformers 5.23.0; commit 0123456789ab

Command: `python -m harness sweep sizes.yaml --tiny`
"""  # noqa: E501


def test_columns_that_tell_rows_apart_come_back() -> None:
    rows = [["a", "1ms", "1", "0.9"], ["a", "9ms", "1", "0.8"], ["b", "1ms", "1", "0.7"]]
    table = Table(["strategy", "link", "n", "accuracy"], rows, 3)
    one = chosen(table, ["accuracy"])
    assert one.headings == ["strategy", "link", "accuracy"] and one.keys == 2
    # Two rows would have the same name.
    two = chosen(table, ["strategy", "accuracy"])
    assert two.headings == ["link", "strategy", "accuracy"] and two.keys == 1
    assert chosen(table, ["accuracy", "link", "strategy"]).headings[0] == "accuracy"
    alone = chosen(Table(table.headings, [rows[0], rows[2]], 3), ["strategy", "n"])
    assert alone.headings == ["strategy", "n"]
    # The batch tells rows apart as well, as far as it does.
    rows = [["1ms", "10", "0.9"], ["1ms", "20", "0.8"], ["2ms", "10", "0.7"]]
    batches = Table(["link", "batch", "accuracy"], rows, 1)
    assert chosen(batches, ["batch", "accuracy"]).headings == ["link", "batch", "accuracy"]
    of_two = chosen(Table(batches.headings, rows[:2], 1), ["link", "batch"])
    assert of_two.headings == ["link", "batch"]


def test_any_field_of_runs_is_a_column_and_seeds_tell_them_apart(
    tmp_path: Path, table: Verb
) -> None:
    """The last key was taken for a value, as the batch stands among the keys."""
    for seed, share in (("1", 0.1), ("2", 0.9)):
        folder = record(tmp_path / seed, "--seed", seed).path
        facts = json.loads((folder / "environment.json").read_text())
        facts |= {"effective_batch": int(seed) * 64, "launch": {"cpu_busy_share": share}}
        (folder / "environment.json").write_text(json.dumps(facts))
    output = table(tmp_path, "--columns", "accuracy,updates")
    assert output.splitlines()[2].split() == ["batch", "seed", "accuracy", "updates"]
    # The mark stands beside the outcome alone.
    assert "§" not in output and "\n1 run with others on the machine" in output
    assert "§ 1 run with others" in table(tmp_path)
    assert "0.25" in table(tmp_path, "--columns", "seed,precision")
    assert "no column nonsense: there are" in table.refused(tmp_path, "--columns", "nonsense")


def test_runs_that_learned_nothing_are_named(plan: Plan, table: Verb) -> None:
    known = {"data": {"majority_share": 0.6}}
    for seed, accuracy in ((1, 0.6), (2, 0.5), (4, 0.61)):
        plan.run("1_1", seed=seed, epochs=epochs(accuracy), environment=known)
    plan.run("1_1", seed=42, epochs=epochs(0.1))
    folder = plan.write()
    text = (
        "2 runs with an accuracy that is no better than naming the largest class for every sample"
    )
    assert text in table(folder) and text in table(plan.output_dir)


def test_rows_that_have_not_run_may_have_another_batch(plan: Plan, table: Verb) -> None:
    plan.run("1_1", seed=1)
    plan.run("2_1", seed=1)
    plan.run("1_2", seed=1, outcome="oom", reason="no room", updates=None,
             environment={"effective_batch": None})  # fmt: skip
    folder = plan.write()
    assert ", batch 4, updates 100" in table(folder)
    plan.planned("4_1", seed=1)
    assert ", batch 4, updates 100" not in sweep_table(read_sweep(plan.write()))[0].about
    output = table(plan.folder)  # which has no row for it
    assert ", batch 4, updates 100" in output and "not begun, or not selected (1 run)" in output


def test_the_files_that_are_written(small: Path, table: Verb) -> None:
    output = table(small, "--write")
    names = ["runs.csv", "sweep.json", "table.csv", "table.md"]
    assert sorted(file.name for file in small.iterdir()) == names  # no draft is left
    assert all(f"written: {small / name}" in output for name in names if name != "sweep.json")
    assert (small / "table.md").read_text() == GOLDEN
    one, two, skipped = csv.DictReader((small / "table.csv").read_text().splitlines())
    assert (one["accuracy_values"], one["seeds"]) == ("0.8;0.82", "1;2")
    assert (one["tta_train_s"], one["tta_train_s_values"]) == ("inf", "10.0;inf")
    assert (two["accuracy"], two["accuracy_sd"], two["accuracy_low"]) == ("0.9", "", "")
    # 1515 against the 1000 of the same seed.
    assert float(two["train_samples_per_s_gain_percent"]) == pytest.approx(51.5)
    assert two["train_samples_per_s_gain_percent_n"] == "1"
    assert (skipped["outcome"], skipped["accuracy"], skipped["accuracy_n"]) == ("skipped", "", "0")
    runs = list(csv.DictReader((small / "runs.csv").read_text().splitlines()))
    assert [run["state"] for run in runs] == ["finished", "finished", "finished", "oom", "skipped"]
    assert [run["reason"] for run in runs[3:]] == ["no room | for `x`", "needs 2 nodes"]


@pytest.mark.usefixtures("undrawn")
def test_cells_of_the_seeds_of_both_sides_are_marked_beside_means_of_all_runs(
    plan: Plan, table: Verb, tmp_path: Path
) -> None:
    """A seed that one side alone has makes its mean the larger, and its gain is a loss."""
    for seed, rate in ((1, 1000.0), (2, 1000.0), (3, 3000.0)):
        plan.run("1_2", seed=seed, train_samples_per_s=rate)
        plan.run("2_1", seed=seed, train_samples_per_s=1300.0)
        if seed < 3:
            plan.run("1_1", seed=seed, train_samples_per_s=1099.0 + seed)
    output = table(plan.write(columns=["samples_per_s", GAIN, POINTS]))
    assert row_of(output, "1_2")[2:4] == ["1,286±1,155", "-9.1%¶"]
    assert row_of(output, "2_1")[3].endswith("%¶") and row_of(output, "1_1")[3] == "base"
    legend = "¶ 2 rows: by 2 pairs with the same seed alone, beside means of all that count"
    table(plan.folder, "--write")
    page, *_ = make_report(plan.folder, tmp_path / "report")
    for text in (output, (plan.folder / "table.md").read_text(), page.read_text()):
        assert legend in " ".join(text.split()) and "-9.1%¶" in text
    plan.run("1_1", seed=3, train_samples_per_s=1100.0)
    assert "¶" not in table(plan.write(columns=["samples_per_s", GAIN, POINTS]))
    for batch, seeds in ((8, (1, 2)), (16, (1, 2, 3))):
        for seed in seeds:
            plan.run("1_1", batch, seed)
        for seed in (1, 2, 3, 4):
            plan.run("1_2", batch, seed)
    assert "¶ 2 rows: by 2 to 3 pairs with the same seed alone" in table(plan.write())


def test_markdown_cannot_be_broken_by_names(plan: Plan) -> None:
    plan.run(label={"link": "a|b*c*"}, environment={"versions": {}, "commit": None})
    plan.run("1_2", label={"link": "<i>"}, devices=2)
    assert main(["table", str(plan.write(question="Is a|b\nslow?")), "--write"]) == 0
    markdown = (plan.folder / "table.md").read_text()
    assert r"a\|b\*c\*" in markdown and r"\<i\>" in markdown and r"### Is a\|b slow?" in markdown
    widths = {
        line.replace(r"\|", "").count("|") for line in markdown.splitlines() if line[:1] == "|"
    }
    assert len(widths) == 1
    assert "torch 2.13.0" in markdown and "commit 0123456789ab" in markdown


def test_the_hypothesis_opens_the_table_and_the_answer_follows_it(plan: Plan, table: Verb) -> None:
    plan.run()
    plan.run("1_2", train_samples_per_s=200.0)
    folder = plan.write(hypothesis="four is | enough.")
    output = table(folder, "--write")
    hypothesis, answer = (
        output.index("\nhypothesis: four is | enough.\n"),
        output.index("\n- setup 1_2 "),
    )
    assert hypothesis < output.index("samples/s") < answer
    assert "\n- setup 1_2 against setup 1_1:\n  - samples/s: " in output
    text = (plan.folder / "table.md").read_text()
    answer = "Against the baseline:\n\n- setup 1_2 against setup 1_1:\n  - samples/s: "
    assert "\n\nHypothesis: four is \\| enough.\n\n| setup |" in text and f"|\n\n{answer}" in text
    assert json.loads(table(folder, "--json"))["hypothesis"] == "four is | enough."
    plan.write(hypothesis=None)
    assert "hypothesis:" not in table(folder)


def test_runs_that_were_stopped_and_went_on_are_counted_below(plan: Plan, table: Verb) -> None:
    """Their wall times are those of others and what was lost."""
    plan.run("1_1", seed=1, attempts=1)
    assert "stopped and continued" not in table(plan.write())
    plan.run("1_2", seed=1, attempts=3)
    line = "1 run stopped and continued: wall times include the interruption"
    assert line in table(plan.write())


def test_many_samples_that_fill_no_batch_are_told(plan: Plan, table: Verb) -> None:
    few, many = ({"train_samples": 192, "left_out_samples": n} for n in (9, 43))
    plan.run("1_1", environment={"data": few})
    assert "fill no batch" not in table(plan.write())
    plan.run("1_2", environment={"data": many})
    text = "1 of 2 runs left out training samples that fill no batch, up to 43 of 235"
    assert f"{text}: --tail pad trains on them" in table(plan.write())


@pytest.mark.parametrize("strategy", ["hivemind", "dp"])
def test_padding_is_no_advice_where_it_is_refused(plan: Plan, table: Verb, strategy: str) -> None:
    many = {"data": {"train_samples": 192, "left_out_samples": 43}}
    folder = plan.run("1_1", environment=many)
    (folder / "settings.json").write_text(json.dumps({"schema": 1, "strategy": strategy}))
    output = table(plan.write())
    assert "fill no batch, up to 43 of 235" in output and "--tail pad" not in output


def test_sweep_json_selects_its_folder(small: Path, table: Verb) -> None:
    assert table(small / "sweep.json") == table(small)
    assert len(load_sweep(small / "sweep.json")) == 3


def test_a_folder_without_a_sweep_is_as_before(small: Path, table: Verb) -> None:
    output = table(small.parents[1])
    assert "no room | for `x`" in output and "Which batch?" not in output
    error = table.refused(small.parents[1], "--write")
    assert "--write is for a sweep: there is no sweep.json in" in error


@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_line_of_the_table_is_cut_or_wrapped(
    small: Path, table: Verb, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)  # a terminal
    monkeypatch.setenv("COLUMNS", str(width))
    output = table(small)
    drawn = output[: output.index("oom:")].splitlines()
    assert "\x1b[3" not in output and "…" not in output  # no colour, nothing cropped
    plain = [line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in drawn]
    assert max(map(len, plain)) <= width
    # Too narrow for all columns at once: tables below each other, each saying which row is which.
    tables = sum(line.split()[:2] == ["1_2", "1/2"] for line in plain)
    assert tables == {80: 2, 120: 2, 200: 1}[width]
    for word in ("50†", "0.9000", "1,515", "+51.5%", "0.76", "missed 1 of 2"):
        assert any(word in line for line in plain), word


def test_a_file_has_no_width(small: Path, table: Verb) -> None:
    assert len(row_of(table(small), "1_2")) == 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": 2}, "schema 2, this reads 1"),
        ({"schema": None}, "schema None, this reads 1"),
        ({"runs": []}, "runs: is empty"),
        ({"runs": None}, "runs: is empty"),
        ({"runs": ["x"]}, r"runs[0] is 'x': expected"),
        ({"runs": [{"label": {}, "path": "../../etc"}]}, "runs[0].path: ../../etc leads out of"),
        ({"runs": [{"label": {}, "path": "/etc"}]}, "runs[0].path: /etc leads out of"),
        ({"runs": [{"label": {}, "path": "a/../../b"}]}, "a/../../b leads out of"),
        ({"runs": [{"label": {}, "path": ""}]}, "leads out of"),
        ({"runs": [{"label": {}}]}, "runs[0].path: is missing"),
        ({"runs": [{"path": "a"}]}, "runs[0].label: is missing"),
        ({"runs": [{"label": {"lr": [1]}, "path": "a"}]}, "label.lr: must be a text, a number"),
        ({"runs": [{"label": {"seed": n}, "path": "a"} for n in (1, 2)]}, "a is there twice"),
        ({"axes": "setup"}, "axes is 'setup': expected list of text"),
        ({"baseline": {"seed": 1}}, "baseline: seed does not vary here: setup, per_gpu_batch"),
        ({"target": {"metric": "f1"}}, "target.value: must be a number, not None"),
        ({"target": {"metric": "f1", "value": "x"}}, "target.value: must be a number, not 'x'"),
        ({"question": 7}, "question is '7': expected text"),
    ],
)
def test_what_is_wrong_with_a_plan_is_said_in_one_line(
    plan: Plan, table: Verb, changes: dict[str, Any], words: str
) -> None:
    plan.run()
    folder = plan.write(**changes)
    message = table.refused(folder)
    assert words in message and "sweep.json" in message
    with pytest.raises(UserError):
        load_sweep_runs(folder)


def test_a_plan_that_cannot_be_read(plan: Plan, table: Verb) -> None:
    folder = plan.write()
    (folder / "sweep.json").write_text('{"schema": 1, "na')
    assert "sweep.json is not readable as JSON" in table.refused(folder)
    (folder / "sweep.json").unlink()
    with pytest.raises(UserError, match=r"there is no sweep\.json"):
        load_sweep(folder)


def test_a_run_of_other_definitions_is_refused(plan: Plan, table: Verb) -> None:
    (plan.run() / "settings.json").write_text('{"schema": 99}')
    assert "schema 99" in table.refused(plan.write())


def test_a_folder_that_cannot_be_written(small: Path, table: Verb) -> None:
    (small / "table.csv").mkdir()
    assert "table.csv cannot be written" in table.refused(small, "--write")
    assert not list(small.glob(".table*"))


def test_columns_are_chosen_by_heading_or_field(small: Path, table: Verb) -> None:
    output = table(small, "--columns", "train_samples_per_s, setup")
    assert ["samples/s", "setup"] in [line.split() for line in output.splitlines()]
    runs = table(small.parents[1], "--columns", "updates,train_time_s")
    assert ["100", "20.0"] in [line.split()[-2:] for line in runs.splitlines()]
    # What tells the rows apart stands before them, unless one of it was named.
    output = table(small, "--columns", "accuracy")
    assert ["setup", "n", "accuracy"] in [line.split() for line in output.splitlines()]
    assert "setup" in table(small, "--columns", "n,accuracy")
    for folder in (small, small.parents[1]):
        assert "no column fun: there are " in table.refused(folder, "--columns", "fun")
        assert "expected names" in table.refused(folder, "--columns", "setup,,n")
        assert "--json has all columns" in table.refused(folder, "--latex", "--json")


def test_latex_is_a_booktabs_table_whatever_the_names_hold() -> None:
    table = Table(("50% & more_", "n"), [("[a] {b}\\c^~#$", "-1.5 ± 0.2"), ("a\nb", "†¶")])
    assert [*latex_lines(table)] == [
        r"\begin{tabular}{ll}", r"\toprule", r"50\% \& more\_ & n \\", r"\midrule",
        r"{[}a{]} \{b\}\textbackslash{}c\textasciicircum{}\textasciitilde{}\#\$ & "
        r"$-$1.5 $\pm$ 0.2 \\",
        r"a b & \textdagger{}\P{} \\", r"\bottomrule", r"\end{tabular}",
    ]  # fmt: skip


def test_latex_stands_alone(small: Path, table: Verb) -> None:
    for folder in (small, small.parents[1]):
        lines = table(folder, "--latex").splitlines()
        assert lines[0].startswith("% ") and lines[2].startswith(r"\begin{tabular}{")
        assert lines[1] == r"% needs \usepackage{booktabs}" and lines[-1] == r"\end{tabular}"


@pytest.mark.process
@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs LaTeX")
def test_latex_takes_every_published_table(root: Path, table: Verb, tmp_path: Path) -> None:
    tables = [
        table(folder, "--latex") for folder in sorted((root / "outputs/published/sweeps").iterdir())
    ]
    paper = r"\documentclass{article}\usepackage{booktabs}\begin{document}"
    (tmp_path / "all.tex").write_text("\n\n".join([paper, *tables, r"\end{document}"]))
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    if "booktabs.sty' not found" in done.stdout:
        pytest.skip("needs the booktabs of texlive-latex-recommended")
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Missing character" not in done.stdout and "all.pdf" in done.stdout


def test_columns_of_one_kind_of_machine_stand_in_all_tables(
    plan: Plan, table: Verb, tmp_path: Path
) -> None:
    plan.run(seed=1, updates=100)
    plan.run(seed=2, updates=50, machine="b-gpux1", mfu=0.25)
    lines = [line.split() for line in table(tmp_path, "--columns", "updates,mfu").splitlines()]
    assert [line for line in lines if line[:1] in (["100"], ["50"])] == [
        ["100", "-"],
        ["50", "0.250"],
    ]
    assert "no column fun" in table.refused(tmp_path, "--columns", "updates,fun")


def test_a_table_says_that_other_weights_were_kept(plan: Plan, table: Verb) -> None:
    note = "of the last epoch, though --save best may have kept the weights of an earlier one"
    folder = plan.run()
    assert note not in table(plan.write()) and note not in table(folder)
    settings = json.loads((folder / "settings.json").read_text())
    (folder / "settings.json").write_text(json.dumps({**settings, "save": "best"}))
    assert note in table(plan.folder) and note in table(folder)


def test_a_target_that_no_run_has_names_what_is_near(plan: Plan, table: Verb) -> None:
    plan.run(epochs=epochs(0.5))
    output = table(plan.write(target={"metric": "acuracy", "value": 0.5}))
    assert "a number named acuracy: did you mean accuracy?" in output


def test_a_strategy_that_does_not_vary_is_named_above_the_table(plan: Plan) -> None:
    """One process has none beside several of ddp."""
    for setup, strategy in (("1_1", "single"), ("1_2", "ddp"), ("2_1", "ddp")):
        folder = plan.run(setup)
        (folder / "settings.json").write_text(json.dumps({"schema": 1, "strategy": strategy}))
    sizes = "sweep sizes (--tiny), a-cpux2, all: batch per GPU 4"
    about = sweep_table(read_sweep(plan.write()))[0].about
    assert about.startswith(sizes) and about.endswith(", strategy ddp")
    plan.content["runs"] = plan.content["runs"][:1]
    assert sweep_table(read_sweep(plan.write()))[0].about.endswith(", strategy single")
    for run in plan.content["runs"]:
        run["label"]["strategy"] = "single"
    named = read_sweep(plan.write(axes=["setup", "strategy"]))
    assert "strategy" not in sweep_table(named)[0].about  # a column has it
