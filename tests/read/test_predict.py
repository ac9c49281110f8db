"""python -m harness predict: what it reads from records, what it says, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli import main, parser_of
from harness.core.collectives import GLOO, NCCL, Shape, Wire
from harness.core.command_line import parse
from harness.core.strategies import STRATEGIES
from harness.read.predict.facts import Overrides
from harness.read.predict.fitting import fit_records
from harness.read.predict.lossy.tcp import CUBIC
from harness.read.predict.model import EXPOSED
from harness.read.predict.phases import EVALUATION
from tests.support.paired import (
    GRADIENT,
    TEXT,
    Verb,
    imported,
    measured,
    planted_s,
    text_file,
    timed,
)
from tests.support.records import with_epochs

FAR = ["--link", "20ms,200mbit"]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No test changes them."""
    root = tmp_path_factory.mktemp("planted")
    for batch in (8, 16, 32):
        for seed in (1, 2):
            noise = 1.01 if seed == 1 else 0.99
            timed(root, batch, seed=seed, step_s=noise * planted_s(batch))
    timed(root, 16, 1, 2)
    timed(root, 32, 1, 2)
    return root


@pytest.fixture
def records(planted: Path, tmp_path: Path) -> Path:
    """For a test that adds to them."""
    return shutil.copytree(planted, tmp_path / "outputs")


@pytest.fixture
def predicted(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb("predict", capsys)


def with_threads(folder: Path, threads: int) -> None:
    file = folder / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"threads": threads}))


def test_planted_parameters_are_found(planted: Path) -> None:
    fitted = fit_records(str(planted), Overrides())
    line = fitted.model.line
    assert (line.fixed_s, line.per_sample_s) == pytest.approx((0.010, 0.001), rel=1e-3)
    assert line.spread == pytest.approx(0.01 * (6 / 4) ** 0.5, rel=1e-2)
    assert fitted.model.sharing == pytest.approx(0.1, rel=1e-2)
    assert (fitted.model.gradient_bytes, fitted.model.backend) == (GRADIENT, GLOO)
    assert (fitted.runs, fitted.train_samples) == (8, 1437)
    assert fitted.phases.at(Shape(1, 2), Wire(), CUBIC)[EVALUATION].fixed_s == 0.2
    assert fitted.power_w is None and fitted.assumed == ()


def test_an_exchange_inside_a_machine_is_not_its_sharing(tmp_path: Path) -> None:
    timed(tmp_path, 16)
    timed(tmp_path, 16, 1, 2, step_s=0.0352, comm_exposed_share=0.25)
    model = fit_records(str(tmp_path), Overrides()).model
    assert model.sharing == pytest.approx(0.0264 / 0.026 - 1)
    assert model.inside_s == pytest.approx(0.0088)


def test_links_are_read_from_runs_and_from_files(records: Path) -> None:
    timed(records, 16, 2, 1, link=measured(20, 200, 1.5))
    result = {
        "backend": GLOO, "nodes": 2, "processes_per_node": 1, "asked": None,
        "rtt_min_ms": 10.0, "bandwidth_mbit": 80.0,
        "allreduce": [{"bytes": 10**6, "s": 0.3}, {"bytes": None, "s": None}],
    }  # fmt: skip
    (records / "link-lab.json").write_text(json.dumps(result))
    run, file = fit_records(str(records), Overrides()).model.table
    assert [(row.size, row.shape.nodes) for row in (run, file)] == [(GRADIENT, 2), (10**6, 2)]
    assert (run.factor, file.wire) == (pytest.approx(1.5), Wire(0.005, 1e7))


@pytest.mark.parametrize(("change", "words"), [
    ({"nodes": "two"}, "nodes is 'two': expected integer"),
    ({"nodes": -2}, "nodes is '-2'"), ({"processes_per_node": None}, "is not what `harness link"),
    ({"bandwidth_mbit": -80.0}, "link.bandwidth_mbit is '-80.0'"),
    ({"rtt_min_ms": [10]}, "link.rtt_min_ms is"), ({"allreduce": 7}, "is not what `harness link"),
    ({"allreduce": [{"bytes": 10**6, "s": -0.3}]}, "allreduce holds"),
    ({"allreduce": ["fast"]}, "allreduce holds fast"), ({"asked": {"delay_ms": "1"}}, "delay_ms"),
])  # fmt: skip
def test_a_link_is_believed_once_it_is_checked(
    change: dict[str, object], words: str, records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timed(records, 16, 2, 1, link=measured(20, 200, 1.5))
    result = {
        "backend": GLOO, "nodes": 2, "processes_per_node": 1, "asked": None, "rtt_min_ms": 10.0,
        "bandwidth_mbit": 80.0, "allreduce": [{"bytes": 10**6, "s": 0.3}], **change,
    }  # fmt: skip
    (records / "link-lab.json").write_text(json.dumps(result))
    assert len(fit_records(str(records), Overrides()).model.table) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "warning: not read: " in told and words in told, told


def test_other_links_and_strategies_do_not_change_the_fit(records: Path) -> None:
    """Other links, gradients and strategies say nothing of computing, codes what they take."""
    before = fit_records(str(records), Overrides())
    timed(records, 16, 2, 1, step_s=9.0)
    timed(records, 16, 1, 2, "--compress", "bf16", step_s=9.0)
    for way in ("direct", "all_to_all"):
        timed(records / way, 16, 1, 2, "--exchange", way, step_s=9.0)
    timed(records, 16, 1, 2, "--strategy", "diloco", "--sync_scope", "rank", step_s=9.0)
    hosts = {"bf16": pytest.approx(9.0 - 1.1 * 0.026, rel=1e-3)}
    assert fit_records(str(records), Overrides()).model == replace(before.model, hosts=hosts)


def test_what_adapters_send_is_a_share_of_what_is_trained(records: Path) -> None:
    """A run that trains a hundredth of its weights says nothing of one that trains them all."""
    words = ("--strategy", "diloco", "--compress", "int8")
    for rank in (0, 4):
        root = records if rank else records.parent / "all"
        path = timed(root, 16, 2, 1, *words, "--lora", f"{rank}", link=measured(20, 200, 1.0))
        file = path / "environment.json"
        content = json.loads(file.read_text())
        content["observed"] |= {"trained_bytes": GRADIENT // 100, "exchanged_bytes": 10_000}
        content["launch"] = {"cpu_busy_share": 0.9}  # quiet runs elsewhere send nothing
        file.write_text(json.dumps(content))
    assert fit_records(str(records), Overrides()).model.payloads == {}
    for batch in (8, 16, 32):
        timed(records.parent / "all", batch)
    found = fit_records(str(records.parent / "all"), Overrides()).model.payloads
    assert found == {("diloco", "int8"): 0.25}


@pytest.mark.parametrize(
    ("control", "setting", "slow_start"),
    [("cubic", True, True), ("cubic", False, False), ("bbr", True, False), (None, None, True)],
)
def test_what_rests_begins_slowly_unless_the_kernel_says_otherwise(
    records: Path, control: str | None, setting: bool, slow_start: bool
) -> None:
    for file in records.rglob("environment.json"):
        content = json.loads(file.read_text())
        tcp = {"congestion_control": control, "slow_start_after_idle": setting}
        content["tcp"] = tcp if control else None
        file.write_text(json.dumps(content))
    assert fit_records(str(records), Overrides()).model.slow_start_after_idle is slow_start


def test_each_compression_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    said = text.partition("--compress COMPRESS")[2].partition("--exchange")[0]
    known = {way for name in EXPOSED for way in STRATEGIES[name].compress}
    assert set(re.findall(r"[a-z]+\d+|powersgd", said)) == known


def test_the_text_of_a_prediction(records: Path, predicted: Verb) -> None:
    timed(records, 16, 2, 1, link=measured(20, 200, 1.5))
    by_gloo = (*FAR, "--exchange", "backend")
    out = predicted(str(records), "--setup", "4_2", *by_gloo, "--batch", "16", "--epochs", "3")
    for words in (
        "10 ms + 1 ms a sample, over batches 8, 16, 32", "residuals by batch", "8: +1.0%",
        "each additional process on a machine makes all of them 10 % slower", "gradient: 4 MB",
        "most: waiting for the exchange", "energy       unknown", "cost         unknown",
        "all-reduce over this link was measured, at 4 MB", "evaluation and saving where known",
        "from 2 nodes on efficiency is below 0.5",
    ):  # fmt: skip
        assert words in out, words
    assert "interval unknown: one all-reduce over a link was measured, once" in out
    timed(records, 16, 2, 1, link=measured(20, 200, 1.6), seed=2)
    out = predicted(str(records), "--setup", "4_1", *by_gloo)
    assert re.search(r"95 % interval [\d,.]+ ms to [\d,.]+ ms", out)
    # What a run would take by itself.
    out = predicted(str(records), "--setup", "4_1", *FAR)
    assert "4_1 ddp direct, batch" in out and "note: --exchange direct, by a closed form" in out


def test_an_update_of_more_samples_than_there_are_is_said(planted: Path, predicted: Verb) -> None:
    said = "an update takes 2,048 samples, and the records have 1,437: choose fewer"
    assert said in predicted(str(planted), "--setup", "64_1", *FAR, "--batch", "32")
    assert "an update takes" not in predicted(str(planted), "--setup", "2_1", *FAR)


def test_the_numbers_for_programs(planted: Path, predicted: Verb) -> None:
    argv = [str(planted), "--setup", "2_1", "--link", "none", "--batch", "16", "--json"]
    result = json.loads(predicted(*argv, "--cost_per_gpu_hour", "3.6"))
    assert result["step_s"] == pytest.approx(0.026, rel=1e-3) and result["efficiency"] == 1
    assert result["samples_per_s"] == pytest.approx(32 / 0.026, rel=1e-3)
    # 1437 samples are 44 whole updates; evaluation is shared by two.
    assert result["updates"] == 44 and result["eval_s"] == 0.2
    assert result["epoch_s"] == pytest.approx(44 * 0.026, rel=1e-3)
    assert result["cost"] == pytest.approx((result["epoch_s"] + 0.2) * 2 * 0.001)
    assert result["energy_j"] is None and result["assumed"] == []


def test_a_restart_begins_again_and_repeats_half_an_epoch(records: Path, predicted: Verb) -> None:
    """As planted: 1.5 s until the first step, of every run, and 0.25 s a save."""
    for file in records.rglob("epochs.jsonl"):
        rows = [{"epoch": 1.0, "updates": 44, "timed_steps": 44, "timed_s": 2.2, "wall_s": 4.1,
                 "eval_time_s": 0.4}]  # fmt: skip
        with_epochs(file.parent, rows)
        summary = json.loads((file.parent / "summary.json").read_text())
        more = {"save_time_s": 0.25, "eval_time_s": 0.4, "attempts": 1}
        (file.parent / "summary.json").write_text(json.dumps(summary | more))
    argv = [str(records), "--setup", "1_1", "--batch", "32", "--epochs", "3", "--json"]
    once, twice = (json.loads(predicted(*argv, "--restarts", n)) for n in (0, 2))
    epoch_s = once["epoch_s"] + 0.4
    assert once["run_s"] == pytest.approx(1.5 + 3 * epoch_s + 2 * 0.25)
    assert twice["run_s"] - once["run_s"] == pytest.approx(2 * (1.5 + epoch_s / 2))


def test_energy_where_it_is_known(tmp_path: Path, predicted: Verb) -> None:
    for batch in (8, 16):
        path = timed(tmp_path, batch, energy_j=800.0)  # 200 W
        facts = json.loads((path / "environment.json").read_text())
        (path / "environment.json").write_text(json.dumps({**facts, "idle_power_w": 50.0}))
    result = json.loads(predicted(str(tmp_path), "--setup", "2_1", *FAR, "--json"))
    parts = result["parts_s"]
    step_j = 200 * parts["computing"] + 50 * parts["waiting for the exchange"]
    assert result["energy_j"] == pytest.approx(2 * result["updates"] * step_j)


def test_links_are_written_with_commas_too(planted: Path, predicted: Verb) -> None:
    argv = [str(planted), "--setup", "2_1", "--json"]
    one, other = (predicted(*argv, "--link", text) for text in ("0.2gbit, 20ms", "20ms/200mbit"))
    assert one == other
    slower = json.loads(predicted(*argv, "--link", "40ms,200mbit"))
    assert slower["step_s"] > json.loads(one)["step_s"]


def test_plot_writes_an_svg(planted: Path, tmp_path: Path, predicted: Verb) -> None:
    file = tmp_path / "new" / "curve.svg"
    predicted(str(planted), "--setup", "1024_1", *FAR, "--plot", str(file))
    text = file.read_text()
    assert "<svg" in text and "training samples/s" in re.sub(r"<!-- | -->", "", text)


def test_more_processes_of_a_machine_than_measured_are_an_extrapolation(
    records: Path, predicted: Verb
) -> None:
    text = predicted(str(records), "--setup", "1_8")
    assert "note: 8 processes of a machine are extrapolated: at most 2 were measured" in text
    assert "95 % interval unknown: at most 2 processes of a machine were measured" in text
    assert "extrapolated" not in predicted(str(records), "--setup", "1_2")
    timed(records, 16, 1, 4)
    assert "at most 4 were measured" in predicted(str(records), "--setup", "1_8")


def test_what_differs_is_named_at_once(tmp_path: Path, predicted: Verb) -> None:
    root = tmp_path / "records"
    timed(root, 16)
    timed(root, 16, 1, 1, "--precision", "bf16", "--optim", "sgd")
    text = predicted.refused(str(root), "--setup", "1_1")
    assert "differ in precision (bf16, fp32), optim (none, sgd): name one kind" in text
    shutil.rmtree(root)
    for n, torch in enumerate(("2.12.0", "2.13.0")):
        file = timed(root, 16, seed=n) / "environment.json"
        facts = {"versions": {"torch": torch}, "launch": {"cpu_busy_share": 0.5 * n}}
        file.write_text(json.dumps(json.loads(file.read_text()) | facts))
    assert "differ in torch (2.12.0, 2.13.0), on which a" in predicted.refused(root, "--setup=1_1")
    file.write_text(file.read_text().replace("2.13.0", "2.12.0"))
    said = predicted(root, "--setup=1_1")
    assert (
        "fitted on 1 run on one machine (1 disturbed left out)" in said
        and "count as if" not in said
    )
    busy = timed(root, 32, seed=2) / "environment.json"
    busy.write_text(json.dumps(json.loads(busy.read_text()) | facts | {"versions": None}))
    assert "assumed: 1 of 2 runs were disturbed" in predicted(root, "--setup=1_1")
    # An open quote in a command is none of the reader's business.
    file.write_text(json.dumps(json.loads(file.read_text()) | {"command": "vit.py 'x"}))
    assert "step time" in predicted(root, "--setup=1_1")


def test_a_run_with_fewer_updates_than_a_period_is_said(root: Path, predicted: Verb) -> None:
    """Its one exchange is that at the end, and the curve is that of a run as short."""
    argv = [str(root / "outputs/published/sweeps/prediction-tiny"), "--setup", "4_1"]
    argv += ["--link", "20ms,200mbit", "--strategy", "diloco", "--sync_every", "50"]
    text = predicted.in_one_line(*argv)
    assert "note: 11 updates are fewer than --sync_every 50: only the last exchange happens" in text
    assert text.count("(after each epoch but the last)") == 1  # nothing is saved in these records
    longer = predicted.in_one_line(*argv, "--epochs", "50")
    assert "only the last exchange" not in longer


def test_the_command_that_measures_a_link_can_be_typed(planted: Path, predicted: Verb) -> None:
    file = planted / "link.json"
    words = [str(planted), "--setup", "2_2", *FAR, "--exchange", "backend"]
    told = predicted.in_one_line(*words)
    start = "torchrun --nnodes=2 --node_rank=RANK_OF_THIS_NODE --master_addr=ADDRESS_OF_NODE_0"
    start += " --nproc_per_node=2"
    how = " (on each node; typed alone, python -m harness link prints it with address and ranks"
    assert f"measure the link with {start} -m harness link --json > {file}{how}" in told
    told = predicted.in_one_line(*words, "--emulated")
    start = "python -m harness nodes 2 --link 20ms/200mbit -- torchrun --nproc_per_node=2"
    assert f"measure the link with {start} -m harness link --json > {file}" in told
    assert how not in told
    typed = shlex.split(told.partition("measure the link with ")[2].partition(" >")[0])
    cut = typed.index("--")
    options = parser_of("nodes").parse_args(typed[4:cut])
    assert options.nodes == 2 and options.link == "20ms/200mbit"
    assert parser_of("link").parse_args(typed[typed.index("link") + 1 :]).json


def test_a_curve_may_begin_below_half_efficiency(planted: Path, predicted: Verb) -> None:
    text = predicted(str(planted), "--setup", "2_4", *FAR, "--sharing", "1")
    assert "efficiency is below 0.5 on one node already, and on more" in text


def test_what_emulated_nodes_print_of_a_link_is_read(records: Path, predicted: Verb) -> None:
    """Each line has the mark of its node; what is not JSON is named in one line."""
    link = {**measured(20, 200, 1.0), "nodes": 2, "processes_per_node": 1, "backend": GLOO,
            "allreduce": [{"bytes": GRADIENT, "s": 0.4}]}  # fmt: skip
    lines = [*json.dumps(link, indent=2).splitlines(), "no time in 60 s for an all-reduce"]
    file = records / "link.json"
    words = (str(records), "--setup", "2_1", *FAR, "--exchange", "backend")
    file.write_text("".join(f"[node0] {line}\n" for line in ["one moment", *lines]))
    assert "note: all-reduce over this link was measured, at 4 MB" in predicted(*words)
    file.write_text(file.read_text().replace("]", "", 99))
    line = f"{file} is not JSON: its all-reduces are left out"
    assert "no all-reduce was measured" in predicted(*words, warned=line)


def test_epochs_of_others(tmp_path: Path, predicted: Verb) -> None:
    """One GPU's epochs that others have published, and what they do not say by flags."""
    file = text_file(tmp_path, TEXT, "1_1_2e-05_16.txt")
    root = str(tmp_path / "imported")
    imported(Path(root), file, "--source", "a.paper")
    argv = [root, "--setup", "2_1", "--link", "1gbit,0.1ms", "--json"]
    said = predicted.refused(*argv)  # all at once
    assert said.endswith(
        "do not say how many samples an epoch has, what would exchange, how large a gradient is: "
        "give --train_size N --backend gloo or nccl --gradient_mb N\n"
    )
    assert "do not say what would exchange, how" in predicted.refused(*argv, "--train_size", "8000")
    argv += ["--train_size", "8000", "--backend", "nccl"]
    assert "--gradient_mb" in predicted.refused(*argv)
    result = json.loads(predicted(*argv, "--gradient_mb", "438"))
    assert "a gradient of 438 MB (--gradient_mb)" in result["assumed"]
    assert any("only batch 16" in line for line in result["assumed"])
    assert result["step_low_s"] is None and 0 < result["efficiency"] <= 1


def test_two_nodes_of_others_from_their_one_gpu(tmp_path: Path, predicted: Verb) -> None:
    """Two epochs of ImageNet on a T4 and on two nodes with one each, as a course published them (UC
    Berkeley W251, homework 9, 2021): 2 h 24 min 23 s and 1 h 14 min 47 s. Model and link are not
    stated: the gradient of ResNet-18 and 10 Gbit/s.
    """
    one_s, two_s = 2 * 3600 + 24 * 60 + 23, 3600 + 14 * 60 + 47
    file = text_file(tmp_path, f"times=[{one_s / 2},{one_s / 2}]\n", "1_1_0.001_256.txt", "vit")
    root = str(tmp_path / "imported")
    imported(Path(root), file, "--source", "w251")
    flags = ["--link", "10gbit,0.1ms", "--gradient_mb", "46.8", "--train_size", "1281167"]
    flags += ["--backend", "nccl", "--sharing", "0", "--epochs", "2"]
    result = json.loads(predicted(root, "--setup", "2_1", *flags, "--json"))
    assert 2 * result["epoch_s"] == pytest.approx(two_s, rel=0.05)


@pytest.mark.parametrize(("argv", "words"), [
    (["--setup", "8_1"], "the link between them is not known"), (["--setup", "8"], "expected N_M"),
    (["--setup", "200000_1", *FAR], "100,000 nodes at most"),
    (["--setup", "2_1", *FAR, "--strategy", "hivemind"], "not modelled"),
    (["--setup", "2_1", *FAR, "--strategy", "magic"], "there is single"),
    (["--setup", "3_1", "--link", "2+1:within=lan:between=continent"], "give the slowest"),
    (["--setup", "2_1", "--link", "20"], "expected none, 20ms"),
    (["--setup", "2_1", *FAR, "--strategy=diloco", "--fragments=3"], "--fragments 3: --sync_every"),
    (["--setup", "2_1", *FAR, "--exchange", "post"], "expected one of auto, backend, direct"),
    (["--setup", "2_1", *FAR, "--batch", "0"], "--batch 0: must be at least 1"),
    (["--setup", "2_1", *FAR, "--sharing", "2"], "a share, 0 to 1"),
    (["--setup", "2_1", *FAR, "--cost_per_gpu_hour", "free"], "hour free: expected a number"),
    (["--setup", "2_1", *FAR, "--plot", "curve.doc"], "png, svg or pdf"),
])  # fmt: skip
def test_mistakes(planted: Path, predicted: Verb, argv: list[str], words: str) -> None:
    assert words in predicted.refused(str(planted), *argv)


def test_too_few_runs_say_which(tmp_path: Path, predicted: Verb) -> None:
    timed(tmp_path, 16, 1, 2, "--lr", "1e-3")
    argv = [str(tmp_path), "--setup", "2_2", *FAR]
    text = predicted.refused(*argv)
    into = f"--output_dir {tmp_path}"  # beside the runs that it belongs to
    assert f"python vit.py --tiny --per_gpu_batch 16 {into} --setup 1_1" in text
    timed(tmp_path, 16)
    text = predicted.refused(*argv, "--batch", "64")
    assert "--setup 1_1 --per_gpu_batch 64" in text
    text = predicted(*argv)
    command = next(part for part in text.splitlines() if "one more: " in part).split("more: ")[1]
    words = shlex.split(command)[2:]
    assert parse("vit", words, {}).per_gpu_batch == 32
    # Without several processes on a machine nothing is known of them without --sharing.
    alone = tmp_path / "alone"
    timed(alone, 16)
    assert "measure --setup 1_2" in predicted.refused(str(alone), "--setup", "2_2", *FAR)
    assert "(--sharing)" in predicted(str(alone), "--setup", "2_2", *FAR, "--sharing", "0.05")


def test_the_missing_run_has_as_many_threads(tmp_path: Path, predicted: Verb) -> None:
    with_threads(timed(tmp_path, 16, 1, 2), 1)
    argv = [str(tmp_path), "--setup", "2_2", *FAR]
    assert "Measure one: OMP_NUM_THREADS=1 python vit.py --tiny" in predicted.refused(*argv)
    with_threads(timed(tmp_path, 16), 1)
    assert "one more: OMP_NUM_THREADS=1 python vit.py" in predicted(*argv)


def test_runs_over_nodes_must_have_the_threads_of_those_of_one_process(
    tmp_path: Path, predicted: Verb
) -> None:
    for batch in (8, 16):
        with_threads(timed(tmp_path, batch), 2)
    argv = ["--setup", "2_1", *FAR]
    assert "fitted on 2 runs" in predicted(str(tmp_path), *argv)
    with_threads(timed(tmp_path, 16, 2, 1, link=measured(20, 200, 1.5)), 1)
    text = predicted.refused(str(tmp_path), *argv)
    assert "threads per process: runs over nodes have 1, those of one process 2: " in text
    command = f"OMP_NUM_THREADS=1 python vit.py --tiny --per_gpu_batch 16 --output_dir {tmp_path}"
    assert f"{command} --setup 1_1 --rerun, then name {tmp_path}:threads=1" in text
    for batch in (8, 16):
        with_threads(timed(tmp_path, batch, seed=2), 1)
    assert f"for example {tmp_path}:threads=1 (" in predicted.refused(str(tmp_path), *argv)
    assert "fitted on 2 runs" in predicted(f"{tmp_path}:threads=1", *argv)
    # What computes elsewhere is another matter.
    with_threads(timed(tmp_path / "far", 16, 2, 1, machine="b-cpux8"), 8)
    assert "fitted on 2 runs" in predicted(f"{tmp_path}:threads=1", *argv)


def test_the_kind_that_is_advised_can_be_predicted_from(tmp_path: Path, predicted: Verb) -> None:
    """It has all of the settings that differ, and one process."""
    for batch in (8, 16):
        timed(tmp_path, batch, 1, 1, "--precision", "bf16", "--optim", "sgd")
    timed(tmp_path, 16, 1, 2)
    text = predicted.refused(str(tmp_path), "--setup", "1_1")
    advised = f"{tmp_path}:precision=bf16,optim=sgd"
    assert text.endswith(f"for example {advised}\n")
    assert "fitted on 2 runs" in predicted(advised, "--setup", "1_1")


def test_records_that_saw_other_numbers_of_gpus_of_one_kind(
    tmp_path: Path, predicted: Verb
) -> None:
    root = tmp_path / "outputs"
    for batch in (8, 16, 32):
        timed(root, batch, machine="h200x1", backend=NCCL)
        timed(root, batch, 1, 2, machine="h200x2", backend=NCCL)
    assert "2_1" in predicted(str(root), "--setup", "2_1", *FAR)


def test_no_records_and_unlike_ones(records: Path, predicted: Verb) -> None:
    argv = ["--setup", "2_1", *FAR]
    assert "there is no such folder" in predicted.refused(str(records / "no"), *argv)
    timed(records, 16, machine="b-gpux1")
    assert "2 kinds of machine (a-cpux2, b-gpux1)" in predicted.refused(str(records), *argv)
    other = records.parent / "other"
    timed(other, 16)
    timed(other, 16, 1, 1, "--precision", "bf16")
    text = predicted.refused(str(other), *argv)
    assert f"differ in precision (bf16, fp32): name one kind, for example {other}:" in text
    assert "vit-nano" in predicted(f"{other}:precision=fp32", *argv)


def test_a_training_set_too_small_or_unknown(records: Path, predicted: Verb) -> None:
    result = json.loads(predicted(str(records), "--setup", "999_1", *FAR, "--json"))
    assert result["updates"] == 0 and result["epoch_s"] is None and result["cost"] is None
    for file in records.rglob("environment.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "data": None}))
    argv = [str(records), "--setup", "2_1", *FAR]
    assert "epoch        training unknown" in predicted(*argv)


def test_what_is_missing_is_measured_without_an_exchange_of_others(
    tmp_path: Path, predicted: Verb
) -> None:
    folder = timed(tmp_path, 16, 4, 1, "--strategy", "diloco")
    facts = json.loads((folder / "environment.json").read_text())
    facts["command"] += (
        " --strategy diloco --sync_every=20 --sync_first 40 --compress int8 --exchange all_to_all"
        " --fsdp_offload --local_updates --lr 1e-3"
    )
    (folder / "environment.json").write_text(json.dumps(facts))
    text = predicted.refused(str(tmp_path), "--setup", "2_2", *FAR)
    into = f"--output_dir {tmp_path} --setup 1_1"
    assert f"python vit.py --tiny --per_gpu_batch 16 --lr 1e-3 {into}" in text
