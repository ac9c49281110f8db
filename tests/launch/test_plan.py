"""From a sweep to its runs: counted by hand."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from harness.core.command_line import parse
from harness.core.identity import run_id
from harness.core.links import Link
from harness.core.records.archives import SUFFIX, read_archive
from harness.core.settings import UserError
from harness.launch.places import (
    Local,
    Machine,
    Options,
    disturbed_by,
    others,
    this_machine,
    warning_of,
)
from harness.launch.plan import Job, axes_of, commands, plan
from harness.launch.sweepfile import header_of, load
from harness.read.tables.columns import GROUP_FACTS, OPTIONAL
from tests.support.sweeps import ROOT, jobs_of, sweep_file, sweep_options

FILES = sorted((ROOT / "experiments").rglob("*.yaml"))
PUBLISHED = sorted(p.name for p in (ROOT / "outputs" / "published" / "sweeps").glob("*-tiny"))


def labels(jobs: list[Job]) -> list[str]:
    return [str(job) for job in jobs]


def test_cross_product_with_seeds_outermost(tmp_path: Path) -> None:
    jobs = jobs_of(
        tmp_path, "script: vit\ngrid: {setup: [1_1, 1_2], per_gpu_batch: [4, 8]}\nseeds: [2, 4]"
    )
    assert labels(jobs) == [
        "setup=1_1 per_gpu_batch=4 seed=2",
        "setup=1_1 per_gpu_batch=8 seed=2",
        "setup=1_2 per_gpu_batch=4 seed=2",
        "setup=1_2 per_gpu_batch=8 seed=2",
        "setup=1_1 per_gpu_batch=4 seed=4",
        "setup=1_1 per_gpu_batch=8 seed=4",
        "setup=1_2 per_gpu_batch=4 seed=4",
        "setup=1_2 per_gpu_batch=8 seed=4",
    ]


def test_order_is_by_the_file_where_it_says_so(tmp_path: Path) -> None:
    text = "script: vit\ngrid: {setup: [1_1, 1_2], lr: [1]}\nseeds: [2, 4]\norder: [setup, seed]"
    assert [(j.label["setup"], j.label["seed"]) for j in jobs_of(tmp_path, text)] == [
        ("1_1", 2), ("1_1", 4), ("1_2", 2), ("1_2", 4)
    ]  # fmt: skip


def test_runs_are_crossed_with_the_grid_and_points_left_out(tmp_path: Path) -> None:
    text = """
script: [bert, vit]
runs:
  - {strategy: ddp, setup: 1_2}
  - {strategy: fsdp, setup: 1_2, script: bert}
grid: {per_gpu_batch: [4, 8]}
exclude: [{script: vit, per_gpu_batch: 8}]
"""
    jobs = jobs_of(tmp_path, text)
    # 2 runs x 2 batches for bert, 1 x 2 for vit, less vit with 8.
    assert labels(jobs) == [
        "script=bert strategy=ddp setup=1_2 per_gpu_batch=4",
        "script=bert strategy=ddp setup=1_2 per_gpu_batch=8",
        "script=bert strategy=fsdp setup=1_2 per_gpu_batch=4",
        "script=bert strategy=fsdp setup=1_2 per_gpu_batch=8",
        "script=vit strategy=ddp setup=1_2 per_gpu_batch=4",
    ]
    sweep = load(sweep_file(tmp_path, text))
    assert axes_of(sweep) == ["script", "strategy", "setup", "per_gpu_batch"]


def test_repeat_measures_everything_again(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, "script: vit\ngrid: {lr: [1, 2]}", repeat=2)
    assert labels(jobs) == ["lr=1 repeat=1", "lr=2 repeat=1", "lr=1 repeat=2", "lr=2 repeat=2"]
    assert len({job.path for job in jobs}) == 4


def test_hold_effective_batch_divides_the_batch_of_the_baseline(tmp_path: Path) -> None:
    text = """
script: vit
settings: {per_gpu_batch: 48, grad_acc: 2, lr: 0.001}
grid: {setup: [1_1, 1_2, 2_3]}
baseline: {setup: 1_1}
hold: effective_batch
lr_rule: linear
"""
    pairs = [(j.settings.per_gpu_batch, j.settings.lr) for j in jobs_of(tmp_path, text)]
    # 48 x 2 = 96 samples an update: over 2 x 2 and over 6 x 2 passes. The same batch, the same lr.
    assert pairs == [(48, 0.001), (24, 0.001), (8, 0.001)]


def test_a_batch_that_agrees_with_hold_may_be_named(tmp_path: Path) -> None:
    text = """
script: vit
runs: [{setup: 1_1, per_gpu_batch: 32}, {setup: 1_2, per_gpu_batch: 16}]
baseline: {setup: 1_1, per_gpu_batch: 32}
hold: effective_batch
"""
    assert [job.settings.per_gpu_batch for job in jobs_of(tmp_path, text)] == [32, 16]


@pytest.mark.parametrize(
    ("rule", "rates"), [("none", [0.001] * 3), ("linear", [0.001, 0.002, 0.004]),
                        ("sqrt", [0.001, 0.001 * 2**0.5, 0.002])]
)  # fmt: skip
def test_learning_rate_follows_the_effective_batch(
    rule: str, rates: list[float], tmp_path: Path
) -> None:
    text = f"""
script: vit
settings: {{per_gpu_batch: 16, lr: 0.001}}
grid: {{setup: [1_1, 1_2, 2_2]}}
baseline: {{setup: 1_1}}
lr_rule: {rule}
"""
    jobs = jobs_of(tmp_path, text)
    assert [job.settings.lr for job in jobs] == pytest.approx(rates, rel=1e-12)
    assert {job.settings.per_gpu_batch for job in jobs} == {16}


def test_rules_start_from_the_defaults_of_the_script_and_of_tiny(tmp_path: Path) -> None:
    text = "script: bert\ngrid: {setup: [1_1, 1_2]}\nbaseline: {setup: 1_1}\nhold: effective_batch"
    assert [j.settings.per_gpu_batch for j in jobs_of(tmp_path, text)] == [16, 8]
    assert [j.settings.per_gpu_batch for j in jobs_of(tmp_path, text, tiny=True)] == [32, 16]


def test_the_batch_is_compared_along_its_own_axis_too(tmp_path: Path) -> None:
    text = """
script: vit
settings: {lr: 0.001}
grid: {setup: [1_1, 1_2], per_gpu_batch: [16, 64]}
baseline: {setup: 1_1, per_gpu_batch: 16}
lr_rule: linear
"""
    assert [job.settings.lr for job in jobs_of(tmp_path, text)] == [0.001, 0.004, 0.002, 0.008]


def test_dp_is_one_process_on_several_devices(tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path, "script: vit\nsettings: {strategy: dp, setup: 1_4}")
    assert (job.nodes, job.devices, job.processes) == (1, 4, 1)
    assert commands(job)[0].startswith("torchrun --standalone --nproc_per_node=1 vit.py")


def test_a_link_makes_another_run(tmp_path: Path) -> None:
    text = "script: vit\ngrid: {setup: [2_1], link: [none, 20ms/200mbit]}"
    one, other = jobs_of(tmp_path, text)
    assert one.settings.setup == "2_1" and other.settings.setup == "2_1_20ms-200mbit"
    assert one.label["setup"] == other.label["setup"] == "2_1"
    assert one.path != other.path


WRONG = {
    "single on two": (
        "script: vit\ngrid: {setup: [1_2]}\nsettings: {strategy: single}",
        "setup=1_2: --strategy single runs in one process",
    ),
    "a batch shared unequally": (
        "script: vit\nsettings: {strategy: dp, setup: 1_4, tail: pad}",
        "--tail pad does not go with --strategy dp: of a last batch that its GPUs share",
    ),
    "not divisible": (
        "script: vit\nsettings: {per_gpu_batch: 16}\ngrid: {setup: [1_1, 1_3]}\n"
        "baseline: {setup: 1_1}\nhold: effective_batch",
        "setup=1_3: hold effective_batch: 16 samples cannot be split over 3 devices",
    ),
    "one run twice": (
        "script: vit\nruns: [{lr: 1}, {lr: 1, epochs: 3}]",
        "lr=1 epochs=3 and lr=1 are the same run",
    ),
    "exclude": (
        "script: vit\ngrid: {lr: [1, 2]}\nexclude: [{lr: 3}]",
        "exclude lr=3 matches no run",
    ),
    "nothing left": ("script: vit\ngrid: {lr: [1]}\nexclude: [{lr: 1}]", "no run is left"),
    "baseline": (
        "script: vit\ngrid: {lr: [1, 2]}\nbaseline: {lr: 3}",
        "no run is the baseline lr=3",
    ),
    "link on one node": (
        "script: vit\ngrid: {setup: [1_2], link: [1ms]}",
        "link 1ms needs at least two nodes, and setup 1_2 has one: name each set-up with its link "
        "under runs",
    ),
    "link and tag": (
        "script: vit\ngrid: {setup: [2_1_far], link: [1ms]}",
        "setup 2_1_far: leave out the tag, the link 1ms sets it",
    ),
    "hold without baseline": (
        "script: vit\ngrid: {setup: [1_1, 1_2]}\nhold: effective_batch",
        "hold effective_batch and lr_rule none start from a baseline, and there is none",
    ),
    "rule without baseline": (
        "script: vit\ngrid: {setup: [1_1, 1_2]}\nlr_rule: linear",
        "lr_rule linear start from a baseline",
    ),
    "batch beside hold": (
        "script: vit\nruns: [{setup: 1_1, per_gpu_batch: 32}, {setup: 1_2, per_gpu_batch: 16}]\n"
        "baseline: {setup: 1_1}\nhold: effective_batch",
        "setup=1_2 per_gpu_batch=16: hold effective_batch gives per_gpu_batch 8: name "
        "per_gpu_batch under settings, as that of the baseline, and not under grid or runs",
    ),
    "lr beside its rule": (
        "script: vit\ngrid: {setup: [1_1, 1_2], lr: [0.001]}\nbaseline: {setup: 1_1}\n"
        "lr_rule: linear",
        "setup=1_2 lr=0.001: lr_rule linear gives lr 0.002: name lr under settings",
    ),
    "uploads": (
        "script: vit\nsettings: {push_to_hub: true, hub_model_id: me/one}\ngrid: {lr: [1, 2]}",
        "lr=1: push_to_hub does not go with a sweep",
    ),
    "one column for both": (
        "script: bert\nsettings: {label_column: message, text_column: message}",
        "--label_column message and --text_column message both name the column message",
    ),
    "contradiction": (
        "script: vit\nsettings: {fsdp_shard: grads}",
        "--fsdp_shard grads needs --strategy fsdp",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_plan_that_cannot_be(name: str, tmp_path: Path) -> None:
    text, message = WRONG[name]
    with pytest.raises(UserError) as error:
        jobs_of(tmp_path, text)
    assert message in str(error.value) and "mine.yaml" in str(error.value)
    assert ": :" not in str(error.value)


def test_what_a_machine_cannot_host(tmp_path: Path) -> None:
    cpu, gpus = Machine((), (0, 1)), Machine(("0", "1"), tuple(range(16)))
    assert (cpu.devices, cpu.threads, gpus.devices, gpus.threads) == (2, 1, 2, 8)

    def reason(settings: str, machine: Machine) -> str | None:
        (job,) = jobs_of(tmp_path, f"script: vit\nsettings: {settings}")
        return Local(Options(), machine).why_not(job)

    assert reason("{setup: 1_2}", cpu) is None and reason("{setup: 1_2}", gpus) is None
    assert "needs 4 devices: this machine has 2 cores" in str(reason("{setup: 1_4}", cpu))
    assert "needs 4 devices: this machine has 2 GPU(s)" in str(reason("{setup: 1_4}", gpus))
    assert "needs 2 nodes" in str(reason("{setup: 2_1}", gpus))
    assert "strategy dp needs a GPU" in str(reason("{setup: 1_2, strategy: dp}", cpu))
    assert reason("{setup: 1_2, strategy: dp}", gpus) is None
    assert "precision fp16 needs a GPU" in str(reason("{precision: fp16}", cpu))
    (linked,) = jobs_of(tmp_path, "script: vit\nsettings: {setup: 2_1}\ngrid: {link: [1ms]}")
    assert "needs 2 nodes" in str(Local(Options(), cpu).why_not(linked))
    (wide,) = jobs_of(tmp_path, "script: vit\nsettings: {setup: 1_4}")
    assert Local(Options(oversubscribe=True), cpu).why_not(wide) is None
    assert Local(Options(oversubscribe=True), gpus).why_not(wide) is not None  # cores only


def test_who_else_is_at_work() -> None:
    here = this_machine()
    assert here.cores and here.devices >= 1
    use = others(here, interval_s=0.05)
    assert 0 <= use["cpu_busy_share"] <= 1 and use["gpu_processes"] == 0
    assert disturbed_by({"cpu_busy_share": 0.2, "gpu_processes": 0}) is None
    busy = disturbed_by({"cpu_busy_share": 0.5, "gpu_processes": 2})
    assert busy == "2 other process(es) use the GPUs and others use 50% of the cores"
    assert warning_of({"cpu_busy_share": 0.2, "gpu_processes": 0}) is None
    warning = warning_of({"cpu_busy_share": 0.5, "gpu_processes": 0})
    assert warning == "others use 50% of the cores: this disturbs what is measured now"


def test_what_a_command_leaves_that_has_just_ended_is_no_other_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = iter([80.0, 60.0, 3.0])
    monkeypatch.setattr("psutil.cpu_percent", lambda _: next(looks))
    here = Machine((), (0, 1))
    assert others(here)["cpu_busy_share"] == 0.03 and next(looks, None) is None
    monkeypatch.setattr("psutil.cpu_percent", lambda _: 90.0)  # a program that goes on
    assert others(here)["cpu_busy_share"] == 0.9


@pytest.mark.parametrize("tiny", [False, True], ids=["full", "tiny"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_files(file: Path, tiny: bool) -> None:
    """Header complete and true; every command parses to exactly the run that is planned."""
    sweep = load(file, tiny)
    jobs = plan(sweep)
    header = header_of(file)
    assert sorted(header) == ["command", "hypothesis", "needs", "question", "runs", "time"]
    assert header["question"].endswith("?") and all(header.values())
    assert header["hypothesis"].endswith(".")  # a whole sentence: its lines are indented
    where = file.relative_to(ROOT)
    said = shlex.split(header["command"].removeprefix("python -m harness sweep "))
    assert said[0] == str(where)
    # Only emulated nodes have links.
    links = any(job.link != Link() for job in jobs)
    assert (sweep_options(said).launcher == "netns") == links
    counted = re.fullmatch(r"(\d+), --tiny (\d+)", header["runs"])
    assert set(sweep.columns or []) <= {*OPTIONAL, *GROUP_FACTS}
    assert counted is not None and len(jobs) == int(counted[2 if tiny else 1])
    for job in jobs:
        for rank, command in enumerate(commands(job)):
            words = shlex.split(command)
            at = words.index(f"{job.settings.script}.py")
            size, per_node = job.nodes * job.processes, job.processes
            environ = {"RANK": str(rank * per_node), "WORLD_SIZE": str(size),
                       "LOCAL_WORLD_SIZE": str(per_node)}  # fmt: skip
            again = parse(job.settings.script, words[at + 1 :], environ)
            assert again == job.settings
            assert run_id(again) == job.path.split("/")[-1]
            assert words[0] == "torchrun" and f"--nproc_per_node={per_node}" in words


# They compare speed and memory, show the path, or choose one setting for a sweep with seeds.
ONE_SEED = {"demo", "strategies", "news_learning_rate", "prediction_next", "prediction_same_hour"}
# A run of this way takes 18 and 8 minutes: its time alone is asked for, and has two seeds.
TIME_ALONE = {name: ("exchange", "backend") for name in ("slow_link_pretrained", "slow_link_muon")}


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize(
    "file", [f for f in FILES if f.parent.name != "gallery"], ids=lambda file: file.stem
)
def test_shipped_sweeps_compare_quality_over_three_seeds(file: Path, tiny: bool) -> None:
    seeds = Counter(
        tuple((key, str(value)) for key, value in job.label.items() if key != "seed")
        for job in plan(load(file, tiny=tiny))
        if TIME_ALONE.get(file.stem) not in job.label.items()
    )
    assert file.stem in ONE_SEED or min(seeds.values()) >= 3


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sweeps_plan_the_runs_that_were_published(name: str) -> None:
    """Another default must not change what the command of a published sweep measures."""
    archive = ROOT / "outputs" / "published" / f"{name}{SUFFIX}"
    published = {folder.relative_to(archive.parent).as_posix() for folder in read_archive(archive)}
    (file,) = (file for file in FILES if file.stem == name.removesuffix("-tiny"))
    planned = [job.path for job in plan(load(file, tiny=True))]
    assert planned and not set(planned) - published


def test_the_three_experiments_have_the_published_values() -> None:
    """github.com/ubahl/Distributed-Training: its commands, for both scripts."""

    def values(name: str, *names: str) -> set[tuple[object, ...]]:
        jobs = plan(load(ROOT / "experiments" / f"{name}.yaml"))
        return {tuple(getattr(job.settings, n) for n in names) for job in jobs}

    both = ("bert", "vit")
    setups = ("1_1", "1_4", "2_2")
    assert values("batch_size", "script", "setup", "per_gpu_batch") == {
        (script, setup, batch) for script in both for setup in setups for batch in (1, 4, 16)
    }
    names = ("script", "setup", "per_gpu_batch", "epochs", "lr")
    assert values("learning_rate", *names) == {
        (script, setup, 16, 5, lr) for script in both for setup in setups for lr in (2e-4, 2e-5)
    }
    propagation = values("propagation", "script", "setup", "per_gpu_batch")
    assert {("bert", "2_1", 16), ("vit", "2_1", 16)} <= propagation


def test_more_runs_than_anybody_measures_are_counted_and_refused(tmp_path: Path) -> None:
    axes = "".join(
        f"  {name}: {list(range(1, 201))}\n" for name in ("b", "epochs", "grad_acc", "seed")
    )
    with pytest.raises(UserError, match=r"1,600,000,000 runs, of which 100,000 is the most"):
        jobs_of(tmp_path, f"script: vit\ngrid:\n{axes}")
