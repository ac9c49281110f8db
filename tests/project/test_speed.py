"""benchmarks/speed.py: the plan, the equality of the arms' work, and what the tables say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers.trainer_callback import CallbackHandler

from benchmarks import speed, speed_data, speed_table
from benchmarks.recipes import clock, loop, ours, task
from benchmarks.speed_cases import ARMS, CPU_CASES, GPU_CASES, QUICK_CASES, Case, arms_of, is_exact
from benchmarks.speed_cases import task_of as fields_of
from benchmarks.speed_start import ArmFailed, call
from harness.core.command_line import parse
from harness.core.tasks import TASKS
from harness.train.data import embedded
from tests.support.calibrated import with_calibration
from tests.support.ranks import Done

TEXT, PICTURES = Case("text", "bert-mini", 512, 128, 16), CPU_CASES["jpeg"]


def test_arms_take_turns() -> None:
    turns = speed.plan({"text": TEXT}, ["a", "b", "ours"], [1, 2], rounds=3)
    assert [t.arm for t in turns if t.processes == 1] == [
        "a", "b", "ours", "b", "ours", "a", "ours", "a", "b",
    ]  # fmt: skip
    assert [t.processes for t in turns] == [1, 2] * 9
    assert arms_of(TEXT, list(ARMS)) == [arm for arm in ARMS if arm != "compiled"]
    assert {*ARMS} - {*arms_of(PICTURES, list(ARMS))} == {"ideal", "compiled"}
    in_half = arms_of(replace(TEXT, precision="bf16"), list(ARMS))
    assert in_half == [arm for arm in ARMS if arm != "bf16"]


@pytest.mark.parametrize("name", GPU_CASES)
def test_what_would_run_on_a_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = GPU_CASES[name]
    assert case.precision == "bf16" and case.train % case.batch == 0
    fields = fields_of(case, "compiled", Path("/of/case"), Path("/out"), ["--repeat", "2"])
    made = task.Task(**fields)
    settings = parse(made.script, ours.flags(made), environ={})
    assert settings.model == "/of/case/model" and settings.dataset == "/of/case/data"
    assert settings.precision == "bf16" and settings.dropout == 0
    assert settings.per_gpu_batch == case.batch and settings.train_size == "all"
    assert dict(settings.trainer)["torch_compile"] is True and settings.repeat == 2
    assert case.model in TASKS[made.script].architectures
    argv = ["--gpu", "--cases", name, "--rounds", "1", "--out", "x", "--dry_run"]
    assert speed.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(arms_of(case, list(ARMS))) - 1  # compiling takes minutes
    assert f"python -m benchmarks.recipes.examples {name}-examples.json" in lines


def test_several_processes_start_as_with_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--cases=text", "--arms=loop", "--processes=1,2", "--rounds=1", "--out=x"]
    assert speed.main([*argv, "--dry_run"]) == 0
    one, two = capsys.readouterr().out.splitlines()
    assert one == "python -m benchmarks.recipes.loop text-loop.json"
    assert two.startswith("torchrun --standalone --nproc_per_node=2 -m benchmarks.recipes.loop ")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--cases=texts"], "--cases texts: expected some of text,"),
        (["--arms=none"], "--arms none: expected some of seed,"),
        (["--processes=0"], "--processes 0: whole numbers"),
        (["--size=text.lr=2"], "--size text.lr=2: expected CASE.FIELD=NUMBER"),
        (["--size=text.train=40"], "case text: 40 training samples are no whole batches of 16"),
        (["--size=text.epochs=1"], "1 epochs leave none to be timed"),
    ],
)
def test_wrong_arguments(
    wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        speed.main(["--out=x", *wrong])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_sizes_can_be_changed() -> None:
    arguments = speed.arguments(["--out=x", "--cases=jpeg", "--size=jpeg.train=32"])
    assert arguments.cases == {"jpeg": replace(PICTURES, train=32)}


@pytest.fixture
def quick(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Done]:
    """The smallest sizes; its arms are forked from the server of this session, which is warm."""

    def run(*more: str) -> Done:
        for name in (*speed.OFFLINE, "OMP_NUM_THREADS"):
            monkeypatch.setenv(name, "1")  # and put back afterwards
        monkeypatch.setattr(speed, "call", with_calibration(call))
        code = speed.main(["--quick", "--rounds=1", "--out", str(tmp_path), *more])
        return Done(code, *capsys.readouterr())

    return run


def table_row(text: str, section: str, arm: str) -> list[str]:
    part = text.split(f"## {section}\n")[1].split("\n## ")[0]
    (line,) = [t for t in part.splitlines() if t.startswith(f"| {arm} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def arms_did_the_same(done: Done, folder: Path, processes: int, arms: list[str]) -> dict[str, Any]:
    assert done.code == 0, done.out + done.err
    record = json.loads((folder / "speed.json").read_text())
    for name, case in QUICK_CASES.items():
        runs = {r["arm"]: r for r in record["cases"][name]["runs"] if r["processes"] == processes}
        assert set(runs) == set(arms_of(case, arms))
        mine = runs["ours"]
        for arm, run in runs.items():
            assert run["failed"] is None
            steps = case.train // case.batch // processes
            assert [epoch["updates"] for epoch in run["epochs"]] == [steps] * case.epochs
            for what in ("samples", "labels", "token_sum"):
                assert run["fed"].get(what) == mine["fed"].get(what), (arm, what)
            assert run["fed"]["samples"] == case.train
            assert len(run["quality"]) == case.epochs
            if is_exact(case, arm, processes):
                for one, other in zip(run["quality"], mine["quality"], strict=True):
                    assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-5)
                    assert one["f1"] == pytest.approx(other["f1"])
            row = table_row(
                (folder / "speed.md").read_text(),
                f"{name}, {processes} process{'es' if processes > 1 else ''}",
                arm,
            )
            assert row[1] == "1" and float(row[6].replace(",", "")) > 0
            assert (row[7] == row[8] == "1.00") == (arm == "ours")
        if name == "text":
            of_text = {arm: run["fed"]["tokens"] / case.train for arm, run in runs.items()}
            assert of_text.get("seed", 500) == 500 and of_text.get("examples", 128) == 128
            if "ideal" in arms:
                assert of_text["ideal"] < of_text["loop"] <= 128
    return dict(record)


ONCE = ["examples", "loop", "ideal", "ours"]  # on one process


@pytest.mark.process
def test_arms_do_the_same_work(quick: Callable[..., Done], tmp_path: Path) -> None:
    done = quick(f"--arms={','.join(ONCE)}")
    record = arms_did_the_same(done, tmp_path, 1, ONCE)
    assert "Not equal" not in done.out and record["cases"]["text"]["roofline"]["matmul_tflops"] > 0


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_arms_on_one_and_two_processes(
    quick: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one process the others beside ours; test_arms_do_the_same_work has those of ONCE."""
    others = [arm for arm in ARMS if arm not in ONCE[:-1]]
    plan = speed.plan

    def of_others(*given: Any) -> list[speed.Turn]:
        return [turn for turn in plan(*given) if turn.processes > 1 or turn.arm in others]

    monkeypatch.setattr(speed, "plan", of_others)
    done = quick("--processes=1,2")
    arms_did_the_same(done, tmp_path, 1, others)
    arms_did_the_same(done, tmp_path, 2, list(ARMS))
    text = (tmp_path / "speed.md").read_text()
    assert text.count("| ours | 2 |") == len(QUICK_CASES)  # scaling efficiency


@pytest.mark.process
def test_a_case_that_cannot_be_prepared_stops_no_other(
    quick: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(QUICK_CASES, "text", replace(QUICK_CASES["text"], model="no-such-model"))
    done = quick("--arms=ours")
    assert done.code == 1 and "text cannot be prepared: " in done.err
    assert list(json.loads((tmp_path / "speed.json").read_text())["cases"]) == ["jpeg"]


@pytest.mark.process
def test_models_without_a_closed_form_are_counted_on_texts(tmp_path: Path) -> None:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
             "num_hidden_layers": 1, "layer_types": ["full_attention"]}  # fmt: skip
    case = replace(GPU_CASES["modernbert-base"], train=64, test=32, changed=small)
    facts = speed_data.prepare(case, tmp_path / "case", None)
    assert facts["gflop_per_sample"] > 0 and facts["mean_tokens"] > 10


@pytest.mark.process
def test_a_failed_arm_is_reported(quick: Callable[..., Done], tmp_path: Path) -> None:
    done = quick("--cases=jpeg", "--arms=loop,ours", "--flags=--no_such_flag 1")
    assert done.code == 1
    runs = json.loads((tmp_path / "speed.json").read_text())["cases"]["jpeg"]["runs"]
    assert [bool(run["failed"]) for run in runs] == [False, True]
    assert "no_such_flag" in runs[1]["failed"]
    assert "jpeg, ours on 1: failed: " in (tmp_path / "speed.md").read_text()


@pytest.mark.process
def test_a_process_that_gives_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with pytest.raises(ArmFailed, match="ended without a word"):
        call("os:abort", log=log)
    with pytest.raises(ArmFailed, match="took more than 0 s"):
        call("time:sleep", 20, log=log, timeout_s=0.3)
    with pytest.raises(ArmFailed, match="TypeError: "):
        call("math:sqrt", "two", log=log)
    assert call("os:getenv", "RANK", processes=2, log=log) == ["0", "1"]


def test_an_arm_without_its_task_file_prints_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["loop.py", "missing.json"])
    with pytest.raises(SystemExit, match=r"usage: loop\.py TASK\.json, a file with kind, model"):
        task.main(loop.run)


def test_a_failure_of_our_script_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bert.main", lambda settings: 3)
    monkeypatch.setattr(CallbackHandler, "call_event", CallbackHandler.call_event)
    monkeypatch.setattr("bert.load_data", None)
    for name in ("data", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    fields = fields_of(TEXT, "ours", tmp_path, tmp_path / "out", [])
    with pytest.raises(RuntimeError, match=r"bert\.py ended with 3"):
        ours.run(task.Task(**fields))


def test_a_task_is_read_as_it_was_written(tmp_path: Path) -> None:
    fields = fields_of(TEXT, "ours", tmp_path, tmp_path / "out", ["--save", "none"])
    made = task.Task(**fields)
    made.write(tmp_path / "task.json")
    assert task.read(tmp_path / "task.json") == made


def test_a_class_may_be_in_the_test_set_alone() -> None:
    sets = {"train": {"label": [2, 0]}, "test": {"label": [3, 0]}}
    data = {name: datasets.Dataset.from_dict(rows) for name, rows in sets.items()}
    assert task.labels_of(datasets.DatasetDict(data)) == ["0", "2", "3"]
    named = datasets.ClassLabel(names=["a", "b", "c", "d"])
    classes = datasets.DatasetDict(data).cast_column("label", named)
    assert task.labels_of(classes) == ["a", "b", "c", "d"]


def test_long_texts_are_cut_at_a_word(tmp_path: Path) -> None:
    text = " ".join(["unbelievable"] * 40)
    # Room for letters, and for few words of them.
    tokenizer = embedded.train_tokenizer(["unbelievable"], tmp_path / "tokenizer", 20)
    whole = tokenizer(text)["input_ids"]
    assert len(whole) > speed_data.LONGEST
    cut = speed_data._cut(text, tokenizer)
    ids = tokenizer(cut)["input_ids"]
    a_word = len(tokenizer("unbelievable")["input_ids"])
    assert speed_data.LONGEST - a_word < len(ids) <= speed_data.LONGEST
    assert ids[:-1] == whole[: len(ids) - 1] and cut.endswith("unbelievable")
    assert speed_data._cut(cut, tokenizer) == cut


def test_ideal_batches_hold_each_sample_once() -> None:
    made = task.Task("text", "m", "d", "o", batch=4, epochs=2, lr=1.0, batches="ideal")
    lengths = np.arange(32)[::-1] // 2
    for epoch in loop._plan(made, 32, lengths, processes=2):
        assert sorted(np.concatenate(epoch).tolist()) == list(range(32))
        for first, second in zip(epoch[::2], epoch[1::2], strict=True):
            update = lengths[np.concatenate([first, second])]
            assert update.max() - update.min() <= 3  # eight neighbours, two of each length


def test_time_belongs_to_what_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 3.0, 6.0, 10.0, 15.0, 21.0, 28.0, 36.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(seconds))
    watch = clock.EpochClock()
    for event in ("on_epoch_begin", "on_step_end", "on_save", "on_step_end", "on_epoch_end",
                  "on_evaluate", "on_epoch_begin", "on_log", "on_step_end"):  # fmt: skip
        watch.note(event)
    assert watch.epochs == [
        {"train_s": 2.0 + 4.0 + 5.0, "evaluate_s": 6.0, "save_s": 3.0, "updates": 2},
        {"train_s": 7.0 + 8.0, "evaluate_s": 0.0, "save_s": 0.0, "updates": 1},
    ]


def test_what_is_fed_does_not_depend_on_padding() -> None:
    model = torch.nn.Module()
    model.forward = lambda **inputs: None  # type: ignore[method-assign]
    fed = clock.Fed()
    fed.begin(model)
    labels = torch.tensor([1, 2])
    model(input_ids=torch.tensor([[5, 6, 0], [7, 0, 0]]), labels=labels)
    model.eval()
    model(input_ids=torch.tensor([[9, 9]]), labels=labels)  # an evaluation
    model.train()
    fed.end()
    model(input_ids=torch.tensor([[9, 9]]), labels=labels)  # a later epoch
    assert fed.total() == {"samples": 2, "labels": 3, "tokens": 6, "token_sum": 18,
                           "real_tokens": 3}  # fmt: skip


def test_events_of_a_trainer_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallbackHandler, "call_event", lambda *args, **kwargs: args[4])
    watch = clock.EpochClock()
    watch.watch_trainers()
    handler = CallbackHandler([], torch.nn.Linear(1, 1), None, None, None)
    control = type("Control", (), {"should_evaluate": False, "should_save": False})()
    for event in ("on_train_begin", "on_epoch_begin", "on_step_end", "on_epoch_end"):
        assert handler.call_event(event, None, None, control) is control
    assert watch.epochs[0]["updates"] == 1 and watch.fed.handle is None


def a_run(arm: str, number: int, seconds: float, **more: Any) -> dict[str, Any]:
    """A run of TEXT whose timed epochs took so long, evaluation a tenth more."""
    epoch = {"train_s": seconds, "evaluate_s": seconds / 10, "save_s": 0.0, "updates": 32}
    quality = {"eval_loss": 1.0, "accuracy": 0.5, "f1": 0.5, "eval_samples": 128}
    return {
        "round": number, "arm": arm, "processes": 1, "failed": None, "prepare_s": 3.0 / number,
        "epochs": [{**epoch, "train_s": 99.0}, epoch, epoch], "quality": [quality] * 3,
        "fed": {"samples": 512, "labels": 700.0, "tokens": 51200.0, "token_sum": 9.0},
        **more,
    }  # fmt: skip


def a_record(runs: list[dict[str, Any]], processes: list[int]) -> dict[str, Any]:
    facts = {"parameters": 10_000_000, "data": "AG News", "mean_tokens": 50.0, "longest": 128,
             "gflop_per_sample": 2.0}  # fmt: skip
    case = {
        "case": {**TEXT.__dict__}, "facts": facts, "threads": 1, "flags": "", "seed": 42,
        "roofline": {"matmul_tflops": 1.024, "copy_gb_per_s": 28.0},
        "arms": ["examples", "ours"], "processes": processes, "runs": runs,
    }  # fmt: skip
    machine = {"machine": "m", "python": "3", "versions": {}, "commit": "c", "dirty": True}
    return {"environment": machine, "cases": {"text": case}}


def test_ratios_are_of_the_same_round() -> None:
    # The second round was twice as slow for both.
    runs = [a_run("ours", 1, 2.0), a_run("examples", 1, 6.0),
            a_run("examples", 2, 14.0), a_run("ours", 2, 4.0)]  # fmt: skip
    record = a_record(runs, [1])
    assert list(speed_table.complaints(record["cases"])) == []
    text = speed_table.table(record)
    row = table_row(text, "text, 1 process", "examples")
    assert row[:6] == ["examples", "2", "11.00 (6.60 to 15.40)", "10.00", "1.00", "0.00"]
    assert row[6] == "61 (37 to 85)"  # 512 samples in 14 s and in 6 s
    assert row[7] == row[8] == "3.25 (3.00 to 3.50)"
    # 60.95 samples/s of 2 GFLOP, at a peak of 1024 GFLOP/s
    assert row[9] == "12 %" and row[10:13] == ["3.00", "1.50", "100.0"]
    assert row[14] == "0e+00" and "at that peak 512 samples/s" in text
    # 10 M parameters x 7 numbers of 4 bytes at 28 GB/s
    assert "moves 10 ms of memory an update" in text


def test_scaling_is_of_the_same_round() -> None:
    runs = [a_run("ours", 1, 2.0), a_run("ours", 1, 1.25, processes=2),
            a_run("ours", 2, 4.0), a_run("ours", 2, 2.0, processes=2)]  # fmt: skip
    text = speed_table.table(a_record(runs, [1, 2]))
    assert "| ours | 2 | 0.900 (0.800 to 1.000) |" in text


def test_unequal_work_is_reported() -> None:
    def complaint_about(**more: Any) -> str:
        runs = [a_run("ours", 1, 1.0), a_run("examples", 1, 1.0, **more)]
        record = a_record(runs, [1])
        (complaint,) = speed_table.complaints(record["cases"])
        assert complaint in speed_table.table(record)
        return complaint

    like = a_run("ours", 1, 1.0)
    fewer = [{**epoch, "updates": 31} for epoch in like["epochs"]]
    assert complaint_about(epochs=fewer) == "text, examples on 1: 93 updates, 96 in ours"
    others = like["fed"] | {"labels": 701.0}
    assert complaint_about(fed=others).endswith("was fed other samples than ours (labels)")
    assert complaint_about(fed=like["fed"] | {"pixel_squares": 1.0}).endswith(
        "other pictures than ours"
    )
    half = [row | {"eval_samples": 64} for row in like["quality"]]
    assert complaint_about(quality=half).endswith("was tested on [64, 128] samples, not on 128")
    worse = [row | {"eval_loss": 1.01} for row in like["quality"]]
    assert complaint_about(quality=worse).endswith(
        "test loss differs from that of ours by 1.0e-02 of it"
    )
    assert complaint_about(failed="no memory").endswith("failed: no memory")
    # What is not expected to agree is no complaint.
    record = a_record([a_run("ours", 1, 1.0), a_run("ideal", 1, 1.0, quality=worse)], [1])
    assert list(speed_table.complaints(record["cases"])) == []


def test_which_arms_must_be_exact() -> None:
    assert {arm for arm in ARMS if not is_exact(TEXT, arm, 1)} == {"ideal", "bf16", "compiled"}
    # The stock Trainer multiplies BERT's loss by the number of processes, ViT's it does not.
    assert not is_exact(TEXT, "examples", 2) and is_exact(PICTURES, "examples", 2)
    assert is_exact(TEXT, "loop", 2) and is_exact(TEXT, "ours", 2)


def rows_of_speed(record: dict[str, Any]) -> Iterator[list[str]]:
    for found in record["cases"].values():
        case = Case(**found["case"])
        names = {
            "examples": "transformers' examples", "loop": "a loop by hand",
            "ours": f"{task.SCRIPTS[case.kind]}.py",
            "compiled": f"{task.SCRIPTS[case.kind]}.py, --torch_compile",
        }  # fmt: skip
        for arm, name in names.items():
            own = [run for run in found["runs"] if run["arm"] == arm]
            if own and not any(run["failed"] for run in own):  # the page names the case
                row = speed_table.row(arm, own, found["runs"], found, 1)
                cells = dict(zip(speed_table.HEAD, row, strict=True))
                yield [
                    f"{case.model}, {case.batch}", name, cells["training samples/s"],
                    cells["share of matmul peak"], cells["training alone: ours is faster by"],
                    cells["whole epoch: ours is faster by"],
                    cells["evaluation s"], cells["saving s"],
                ]  # fmt: skip


def test_the_page_has_the_comparison_on_a_gpu(root: Path) -> None:
    part = (root / "docs" / "gpu.md").read_text()
    found = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    assert [row for row in found if len(row) == 8 and "samples/s" not in row] == [
        row
        for name in ("speed", "speed_models", "speed_compiled", "speed_compiled_bert")
        for row in rows_of_speed(json.loads((root / f"records/gpu/{name}.json").read_text()))
    ]
    records = [json.loads(file.read_text()) for file in (root / "records/gpu").glob("speed*.json")]
    failed = {
        name for record in records for name, case in record["cases"].items()
        if any(run["failed"] for run in case["runs"])
    }  # fmt: skip
    assert failed == {"resnet-18-cifar"} and "resnet-18-cifar could not be loaded" in part
    cells = [row for row in found if row[1:2] == ["transformers' examples"]]
    text = (root / "docs" / "measures.md").read_text()
    said = "the examples took {} to {} times as long in\ntraining, and {} to {} times in whole"
    assert said.format(*(f"{end(float(row[n]) for row in cells):.1f}"
                         for n in (4, 5) for end in (min, max))) in text  # fmt: skip
    loop_takes = []
    for found_of in json.loads((root / "records/gpu/speed.json").read_text())["cases"].values():
        spent = {
            run["arm"]: [epoch["train_s"] + epoch["evaluate_s"] for epoch in run["epochs"][1:]]
            for run in found_of["runs"]
        }
        loop_takes.append(sum(spent["loop"]) / sum(spent["ours"]))
    assert "took the loop {:.1f}, {:.2f} and {:.1f} times as long".format(*loop_takes) in part
    cost = json.loads((root / "records/gpu/overhead.json").read_text())["cases"]["bert-nano"]
    (pair,) = cost
    ratios = [pair["ours"]["step_s"] / pair[arm]["step_s"] for arm in ("bare", "loop")]
    said = (
        "a step took {:.2f}\ntimes as long as in the bare Trainer, and {:.2f} times as long as in"
    )
    assert said.format(*ratios) in part


def test_the_page_has_the_profiles_of_a_gpu(root: Path) -> None:
    part = (root / "docs" / "gpu.md").read_text()
    text = " ".join(part.split())
    profiles = json.loads((root / "records/gpu/profiles.json").read_text())
    small, vit, compiled, large = profiles.values()

    def of_update(profile: dict[str, Any]) -> float:
        return float(profile["gpu_ms"] / profile["profiled_updates"])

    count = round(small["kernels_and_copies_an_update"], -1)
    assert f"some {count:,} kernels and copies in {small['update_ms']:.1f} ms" in text
    assert f"of which the GPU computes {of_update(small):.1f} ms" in text
    assert f"during {of_update(vit):.1f} of the {vit['update_ms']:.1f} ms of an update of" in text
    parts = {
        "in matrix products": ("mm", "addmm"),
        "in copies between fp32 and bf16": ("copy_",),
        "in norms": ("native_layer_norm", "native_layer_norm_backward"),
        "in attention": ("_cudnn_attention_forward", "_cudnn_attention_backward"),
    }
    for what, names in parts.items():
        share = sum(vit["longest"][f"aten::{name}"]["gpu_ms"] for name in names) / vit["gpu_ms"]
        assert re.search(rf"{100 * share:.0f} %( of it)? {what}", text), what
    # Six copies a layer between layouts, and zeros for queries, keys and values.
    kinds = {"gpu_kernel_impl_nocast": 6 * 12, "FillFunctor<c10::BFloat16>": 3 * 12}
    of_rows = [
        at["gpu_ms"]
        for name, at in large["longest"].items()
        for kind, calls in kinds.items()
        if kind in name and at["calls"] == calls * large["profiled_updates"]
    ]
    assert len(of_rows) == 2
    copies = sum(of_rows) / large["profiled_updates"]
    assert f"{copies:.0f} of the {large['update_ms']:.0f} ms of an update of BERT-base" in text
    slower = f"an update took {compiled['update_ms']:.0f} ms instead of {vit['update_ms']:.0f}"
    assert slower in text
