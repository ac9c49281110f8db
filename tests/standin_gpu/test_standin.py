"""The code for GPUs, on GPUs that the CPU computes: every way to train, and every way to fail."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.core.records import RunFolder, read_rows
from harness.core.strategies import STRATEGIES
from harness.train.data import embedded
from harness.train.run.warm import free_port
from tests.support.broken_runs import SHORT, assert_same_training, only_run, stop_at
from tests.support.padded import small
from tests.support.ranks import ROOT, Done, ran, run_script, script
from tests.support.stalled import reason_of

pytestmark = [pytest.mark.standin, pytest.mark.process, pytest.mark.timeout(1800)]

ARGV = ["--tiny", "--train_size", "64", "--test_size", "32", "--epochs", "2",
        "--full_determinism"]  # fmt: skip


def vit(folder: Path, *more: str, gpus: int = 1, ranks: int = 1, **env: str) -> Done:
    sizes = [] if "--b" in more else ["--b", "8"]
    return script("vit", *ARGV, *sizes, "--o", str(folder), *more, count=ranks,
                  env={"FAKE_GPUS": str(gpus), **env})  # fmt: skip


def trained(folder: Path, *more: str, gpus: int = 1, ranks: int = 1, **env: str) -> RunFolder:
    done = vit(folder, *more, gpus=gpus, ranks=ranks, **env)
    assert done.code == 0, done.err
    return only_run(folder)


def environment(run: RunFolder) -> dict[str, Any]:
    return run.read_environment() or {}


def losses(run: RunFolder) -> list[float]:
    names = ("train_loss", "eval_loss", "grad_norm")
    return [row[name] for row in run.read_epochs()[0] for name in names]


LOCAL = ["--strategy", "local_sgd", "--sync_every", "2", "--sync_scope", "rank"]
DILOCO = ["--strategy", "diloco", "--sync_every", "4", "--sync_scope", "rank"]
RESNET = ["--model", "resnet-18-cifar", "--image_size", "8", "--optim", "sgd", "--lr", "0.01"]
CODED = ["diloco int8", "ddp int8", "ddp 4 int4", "local_sgd int4", "diloco lora int4"]
# Where a last bit decides to which of two levels a number is rounded, or is made large: BatchNorm.
TOLERANCES = {"ddp bf16 hook": 1e-4, "ddp resnet": 1e-2, "own strategy": 1e-3,
              **dict.fromkeys(CODED, 1e-4)}  # fmt: skip
WAYS: dict[str, tuple[int, list[str]]] = {
    "single": (1, []),
    "ddp 1": (1, ["--strategy", "ddp", "--setup", "1_1"]),
    "ddp 2": (2, []),
    "ddp 2 accumulation": (2, ["--grad_acc", "2"]),
    "ddp 4": (4, []),
    "fsdp 1": (1, ["--strategy", "fsdp"]),
    "fsdp 2": (2, ["--strategy", "fsdp"]),
    "fsdp 4 grads": (4, ["--strategy", "fsdp", "--fsdp_shard", "grads"]),
    "local_sgd 1": (1, LOCAL),
    "local_sgd 2": (2, LOCAL),
    "diloco 2": (2, DILOCO),
    "ddp bf16 hook": (2, ["--compress", "bf16"]),
    "ddp powersgd": (2, ["--compress", "powersgd:2"]),
    "ddp resnet": (2, RESNET),
    "own strategy": (2, ["--strategy", "docs/sign_mean.py:SignMean"]),
    "diloco int8": (2, [*DILOCO, "--compress", "int8", "--fragments", "2", "--overlap", "1"]),
    "ddp int8": (2, ["--compress", "int8", "--grad_acc", "2"]),
    "ddp 4 int4": (4, ["--compress", "int4"]),
    "local_sgd int4": (2, [*LOCAL, "--compress", "int4"]),
    "lora": (1, ["--lora", "4"]),
    "ddp lora": (2, ["--lora", "4"]),
    "diloco lora int4": (2, [*DILOCO, "--lora", "4", "--compress", "int4"]),
    "ddp balance": (2, ["--balance", "3,1"]),
    "fsdp balance": (2, ["--strategy", "fsdp", "--balance", "3,1"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_a_cpu(way: str, tmp_path: Path) -> None:
    ranks, flags = WAYS[way]
    # torchrun with one process is still torchrun.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # fmt: skip
    env = alone if way.endswith(" 1") else {}
    gpu = trained(tmp_path / "gpu", *flags, gpus=ranks, ranks=ranks, **env)
    observed = environment(gpu)["observed"]
    assert observed["device"] == "cuda:0"
    assert environment(gpu)["machine"] == f"h200x{ranks}"
    if ranks > 1:
        assert observed["backend"] == "nccl"
    if way == "fsdp 1":
        return  # a CPU has no fsdp of one process to compare with
    cpu = trained(tmp_path / "cpu", *flags, "--use_cpu", ranks=ranks, **env)
    assert environment(cpu)["observed"]["device"] == "cpu" and environment(cpu)["gpus"] == []
    assert "h200" not in environment(cpu)["machine"]
    assert environment(cpu)["cpu_calibration"] is not None
    assert losses(gpu) == pytest.approx(losses(cpu), rel=TOLERANCES.get(way, 1e-6))


def test_dp_of_two_gpus_is_one_batch_of_both(tmp_path: Path) -> None:
    dp = trained(tmp_path / "dp", "--strategy", "dp", gpus=2)
    assert environment(dp)["observed"]["devices"] == 2
    single = trained(tmp_path / "single", "--b", "16", gpus=2)
    assert len(environment(single)["gpus"]) == 1 and environment(single)["machine"] == "h200x2"
    assert losses(dp) == pytest.approx(losses(single), rel=1e-5)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "fsdp", "local_sgd", "diloco"])
def test_number_formats(strategy: str, precision: str, tmp_path: Path) -> None:
    ranks = 2 if STRATEGIES[strategy].processes == "many" else 1
    flags = {"local_sgd": LOCAL, "diloco": DILOCO}.get(strategy, ["--strategy", strategy])
    flags = [*flags, "--precision", precision]
    run = trained(tmp_path, *flags, gpus=2, ranks=ranks)
    expected = {"tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision]
    assert environment(run)["observed"]["dtype"] == expected


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_packed_texts_in_half_precision(strategy: str, tmp_path: Path) -> None:
    ranks = 2 if STRATEGIES[strategy].processes == "many" else 1
    flags = ["--strategy", strategy, "--precision", "bf16", "--b", "8", "--o", str(tmp_path)]
    done = script("bert", *ARGV, *flags, count=ranks, env={"FAKE_GPUS": "2"})
    assert done.code == 0, done.err
    assert environment(only_run(tmp_path))["observed"]["padding"] == "packed, kernel"


def test_windows_in_half_precision(tmp_path: Path) -> None:
    model, rows = str(tmp_path / "model"), embedded.english()["train"]["text"]
    small("modernbert", vocab_size=500).save_pretrained(model)
    embedded.train_tokenizer(list(rows), tmp_path / "vocabulary", 500).save_pretrained(model)
    found = []
    for more in ([], ["--padding", "batch"]):
        out = tmp_path / str(len(more))
        flags = ["--model", model, "--precision", "bf16", "--b", "8", "--o", str(out), *more]
        done = script("bert", *ARGV, *flags, env={"FAKE_GPUS": "1"})
        assert done.code == 0, done.err
        found.append(only_run(out))
    packed, padded = found
    observed = environment(packed)["observed"]
    assert observed["padding"] == "packed, kernel" and observed["padding_reason"] is None
    assert environment(padded)["observed"]["padding"] == "batch"
    assert losses(packed) == pytest.approx(losses(padded), rel=0.02)


@pytest.mark.parametrize("model", [[], RESNET])  # whose statistics are not offloaded
def test_offloaded_shards_train_as_those_on_the_gpu(model: list[str], tmp_path: Path) -> None:
    flags = [*model, "--strategy", "fsdp", "--max_grad_norm", "0.5"]
    runs = [
        trained(tmp_path / str(len(more)), *flags, *more, gpus=2, ranks=2)
        for more in ([], ["--fsdp_offload"])
    ]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-6)
    assert [environment(run)["observed"]["device"] for run in runs] == ["cuda:0"] * 2


LATE = {
    "ddp lora": ["--lora", "4", "--precision", "bf16"],
    "ddp int8 balance": ["--compress", "int8", "--balance", "measured", "--precision", "bf16"],
    "local_sgd lora": [*LOCAL, "--lora", "4", "--precision", "fp16"],
    "fsdp balance": ["--strategy", "fsdp", "--balance", "measured", "--precision", "fp16"],
}


@pytest.mark.parametrize("way", LATE)
def test_what_cpus_have_first_goes_with_half_precision(way: str, tmp_path: Path) -> None:
    run = trained(tmp_path, *LATE[way], gpus=2, ranks=2)
    observed = environment(run)["observed"]
    assert observed["device"] == "cuda:0" and observed["dtype"] in ("bfloat16", "float16")
    assert sum(observed.get("shares") or [16]) == 16
    assert all(math.isfinite(loss) for loss in losses(run))


BREAKING = {
    "ddp": [],
    "fsdp offload": ["--strategy", "fsdp", "--fsdp_offload"],
    "ddp lora int8": ["--lora", "4", "--compress", "int8", "--balance", "3,1"],
}


@pytest.mark.parametrize("more", BREAKING.values(), ids=BREAKING)
def test_a_broken_run_goes_on(more: list[str], tmp_path: Path) -> None:
    argv, env = [*SHORT, *more, "--o"], {"FAKE_GPUS": "2"}
    broken = [*argv, str(tmp_path / "broken")]
    assert ran(2, stop_at, "vit", broken, ".", 6, "kill", env=env).code != 0
    for folder in ("broken", "whole"):
        done = script("vit", *argv, str(tmp_path / folder), count=2, env=env)
        assert done.code == 0, done.err
    assert_same_training(only_run(tmp_path / "broken"), only_run(tmp_path / "whole"))


def short_of_memory(argv: list[str], mib: int) -> int:
    if os.environ["RANK"] == "1":
        os.environ["FAKE_GPU_MEM"] = str(mib * 2**20)
    return run_script("vit", argv, str(ROOT))


def test_one_rank_out_of_memory_is_the_reason_of_all(tmp_path: Path) -> None:
    argv = [*ARGV, "--o", str(tmp_path)]
    assert ran(2, short_of_memory, argv, 3, env={"FAKE_GPUS": "2"}).code != 0
    summary = only_run(tmp_path).read_summary()
    assert summary is not None and summary["outcome"] == "oom"
    assert "out of memory" in summary["reason"] and "(rank 1)" in summary["reason"]


def test_one_rank_out_of_memory_halves_the_batch_of_all(tmp_path: Path) -> None:
    sizes = ["--tiny", "--train_size", "1024", "--test_size", "32", "--epochs", "2", "--b", "256",
             "--dropout", "0", "--eval_batch", "32", "--full_determinism", "--o"]  # fmt: skip
    env = {"FAKE_GPUS": "2"}
    assert script("vit", *sizes, str(tmp_path / "whole"), count=2, env=env).code == 0
    argv = [*sizes, str(tmp_path / "halved"), "--auto_batch"]
    codes = []
    while 0 not in codes and len(codes) < 5:
        codes.append((done := ran(2, short_of_memory, argv, 40, env=env)).code)
    assert len(codes) > 1 and codes[-1] == 0, done.err
    halved = only_run(tmp_path / "halved")
    attempts, _ = read_rows(halved.attempts)
    batches = [row["per_gpu_batch"] for row in attempts if "per_gpu_batch" in row]
    assert batches[-1] == 256 // 2 ** (len(codes) - 1)
    assert losses(halved) == pytest.approx(losses(only_run(tmp_path / "whole")), rel=1e-6)


REFUSED: dict[str, tuple[dict[str, str], int, list[str], list[str]]] = {
    "old driver": ({"FAKE_OLD_DRIVER": "1"}, 1, [], ["535.104.05 runs up to 12.2", "cu126"]),
    "Volta": ({"FAKE_CC": "7.0"}, 1, [], ["compute capability 7.0", "sm_75", "cu126"]),
    "bf16 on Turing": ({"FAKE_CC": "7.5"}, 1, ["--precision", "bf16"], ["use fp16 or fp32"]),
    "tf32 on Turing": ({"FAKE_CC": "7.5"}, 1, ["--precision", "tf32"], ["Ampere"]),
    "too many": ({"FAKE_GPUS": "1"}, 2, [], ["2 processes", "1 GPU(s)", "--nproc_per_node=1"]),
    "no such": ({"CUDA_VISIBLE_DEVICES": "7"}, 1, [], ["CUDA_VISIBLE_DEVICES=7", "--use_cpu"]),
    "MIG": ({"FAKE_GPUS": "2", "FAKE_GPU_NAME": "A100 MIG 1g.5gb"}, 2, [], ["one MIG slice"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_machine_cannot_do_is_one_line(case: str, tmp_path: Path) -> None:
    env, ranks, flags, words = REFUSED[case]
    done = vit(tmp_path, *flags, ranks=ranks, **{"gpus": 1, **env})  # type: ignore[arg-type]
    (line,) = done.err.strip().splitlines()
    assert done.code == 2 and line.startswith("vit.py: error:"), done.err
    assert all(word in line for word in words), line
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(("capability", "precision"), [("7.5", "fp16"), ("8.0", "bf16")])
def test_older_gpus_train(capability: str, precision: str, tmp_path: Path) -> None:
    trained(tmp_path, "--precision", precision, FAKE_CC=capability)


def test_texts_are_packed_where_the_kernel_does_not_run(tmp_path: Path) -> None:
    flags = ["--precision", "fp16", "--lora", "4", "--b", "8", "--o", str(tmp_path)]
    done = script("bert", *ARGV, *flags, env={"FAKE_CC": "7.5"})
    assert done.code == 0, done.err
    observed = environment(only_run(tmp_path))["observed"]
    assert observed["padding"] == "packed, padded" and "Ampere" in observed["padding_reason"]


@pytest.mark.parametrize(
    "env", [{"FAKE_NO_NVML": "1"}, {"FAKE_NVML_MISSING": "energy,power,processes,util"}]
)
def test_without_nvml_a_process_trains_on_one_gpu(env: dict[str, str], tmp_path: Path) -> None:
    run = trained(tmp_path, gpus=2, **env)
    assert environment(run)["observed"]["strategy"] == "single"
    assert run.read_epochs()[0][-1]["energy_j"] is None


def command(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness", *words], cwd=ROOT, env={**os.environ, **env},
        capture_output=True, text=True, timeout=1700,
    )  # fmt: skip


def test_a_packed_sweep_gives_each_run_gpus_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "script: vit\nseeds: [1, 2]\ngrid: {setup: [1_1, 1_2]}\n"
        "settings: {train_size: 64, test_size: 32, epochs: 1, per_gpu_batch: 8}\n"
    )
    out = str(tmp_path / "out")
    flags = ["--tiny", "--pack", "--isolation", "off", "--output_dir", out]
    env = {"FAKE_GPUS": "2", "FAKE_NVML_MISSING": "processes"}
    done = command("sweep", str(file), *flags, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [RunFolder(path.parent) for path in Path(out).glob("vit/*/*/summary.json")]
    assert len(runs) == 4
    seen = {environment(run)["variables"]["CUDA_VISIBLE_DEVICES"] for run in runs}
    assert {"0", "1", "0,1"} == seen and {environment(r)["machine"] for r in runs} == {"h200x2"}
    table = command("table", out)
    assert table.returncode == 0 and table.stdout.count("h200x2") == 1


def test_each_emulated_node_has_gpus_of_its_own(tmp_path: Path) -> None:
    torchrun = ["--", sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1"]
    run = ["vit.py", *ARGV, "--b", "8", "--setup", "2_1", "--o"]
    refused = command("nodes", "2", *torchrun, *run, str(tmp_path), FAKE_GPUS="1")
    assert refused.returncode == 2 and "2 nodes and 1 GPU(s)" in refused.stderr
    for gpus, flags in (("2", []), ("1", ["--oversubscribe"])):
        folder = str(tmp_path / gpus)
        done = command("nodes", "2", *flags, *torchrun, *run, folder, FAKE_GPUS=gpus)
        if "nodes" in done.stderr and "cannot" in done.stderr:
            pytest.skip(done.stderr)
        assert done.returncode == 0, done.stdout + done.stderr
    shared, own = (only_run(tmp_path / n).read_epochs()[0][-1] for n in ("1", "2"))
    launch = environment(only_run(tmp_path / "1"))["launch"]
    assert launch["processes_per_gpu"] == 2
    for row, gpus in ((shared, 1), (own, 2)):
        assert row["mfu"] == pytest.approx(row["tflops_per_s"] / (gpus * 67))
    facts = environment(only_run(tmp_path / "2"))
    assert "processes_per_gpu" not in facts["launch"]
    assert facts["nodes"] == 2 and facts["observed"]["backend"] == "nccl"


def test_two_ranks_on_one_gpu_exchange_over_a_socket(tmp_path: Path) -> None:
    words = [
        "-m",
        "benchmarks.two_ranks",
        "vit.py",
        *ARGV,
        "--b",
        "8",
        "--setup",
        "2_1",
        "--o",
        str(tmp_path),
    ]
    env = {**os.environ, "FAKE_GPUS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    observed = environment(only_run(tmp_path))["observed"]
    assert (observed["backend"], observed["world"]) == ("nccl", 2)


def test_env_and_doctor_say_what_is_there() -> None:
    facts = json.loads(command("env", FAKE_GPUS="2").stdout)
    assert facts["machine"] == "h200x2" and facts["gpus"] == ["NVIDIA H200"] * 2
    old = command("doctor", FAKE_OLD_DRIVER="1")
    assert "install the cu126 build of torch (make install" in old.stdout
    assert old.returncode == 1


@pytest.mark.parametrize("number", [0, 1])
def test_a_stopped_rank_is_named_where_the_others_wait_for_nccl(
    tmp_path: Path, number: int
) -> None:
    reason, _ = reason_of(tmp_path, number, "stopped", "--hang_after", "3",
                          env={"FAKE_GPUS": "2"})  # fmt: skip
    assert reason == f"rank {number} (node 0) has not answered for 3 s: its process is stopped"
    assert environment(only_run(tmp_path))["observed"]["backend"] == "nccl"
