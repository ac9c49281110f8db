"""Which GPUs a run takes, and what it says of those that it cannot use: one line, at the start."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState
from transformers import TrainingArguments, training_args

from harness.core.command_line import parse
from harness.core.provenance import Driver
from harness.core.settings import Settings, UserError
from harness.core.topology import World
from harness.train import devices, session
from harness.train.loop import evaluation
from harness.train.measure.environment import machine_label
from harness.train.measure.flops import peak_tflops
from harness.train.run import start
from harness.train.run.start import arguments_of
from harness.train.session import Session

FOUR = Driver(4, "580.1", (13, 0), (9, 0))
ALONE = Settings(script="vit", strategy="single")
RANKS = Settings(script="vit", strategy="ddp")


class FakeCuda:
    """torch.cuda with the GPUs that CUDA_VISIBLE_DEVICES leaves visible."""

    gpus, capability, name, available = 4, (9, 0), "NVIDIA H200", True

    def visible(self) -> int:
        names = os.environ.get("CUDA_VISIBLE_DEVICES")
        return self.gpus if names is None else len([n for n in names.split(",") if n])

    def is_available(self) -> bool:
        return self.available and self.visible() > 0

    device_count = visible

    def get_device_name(self, number: int = 0) -> str:
        return self.name

    def get_device_capability(self, number: int = 0) -> tuple[int, int]:
        return self.capability

    def get_arch_list(self) -> list[str]:
        return ["sm_75", "sm_80", "sm_90", "sm_100", "compute_120"]

    def init(self) -> None:
        raise RuntimeError("No CUDA GPUs are available\nmore")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    version = SimpleNamespace(cuda="13.0", hip=None)
    monkeypatch.setattr(devices, "torch", SimpleNamespace(cuda=fake, version=version))
    monkeypatch.setattr(devices, "nvidia_driver", lambda: FOUR)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return fake


def refused(settings: Settings = ALONE, world: World = World()) -> str:  # noqa: B008
    with pytest.raises(UserError) as error:
        devices.choose_gpus(settings, world)
    assert "\n" not in str(error.value) and "--use_cpu" in str(error.value)
    return str(error.value)


def test_a_process_alone_sees_one_gpu(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.choose_gpus(ALONE, World()) == 1
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5a")
    peers = Settings(script="vit", strategy="hivemind")
    for visible, found in (("1,0,2", "1"), ("3,7,1", "3,7,1"), ("0, -1, 1", "0, -1, 1"),
                           ("1,1", "1,1")):  # fmt: skip
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        devices.choose_gpus(ALONE, World())  # CUDA shows one where the second entry names none
        assert os.environ["CUDA_VISIBLE_DEVICES"] == found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5a")
    assert devices.choose_gpus(peers, World(per_node=2, local_rank=1)) == 1
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-5a"


def test_dp_and_ranks_see_all(cuda: FakeCuda) -> None:
    assert devices.choose_gpus(Settings(script="vit", strategy="dp"), World()) == 4
    assert devices.choose_gpus(RANKS, World(per_node=4)) == 4
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_the_cpu_on_purpose_hides_the_gpus_from_all_that_asks(cuda: FakeCuda) -> None:
    on_cpu = Settings(script="vit", strategy="ddp", trainer=(("use_cpu", True),))
    assert devices.choose_gpus(on_cpu, World(per_node=8)) == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not cuda.is_available()


def test_a_mac_trains_on_its_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_args, "is_torch_mps_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    PartialState._reset_state()
    try:
        assert TrainingArguments(str(tmp_path)).device.type == "mps"
        settings = parse("vit", ["--tiny"], {})
        assert arguments_of(settings, tmp_path, Session(World())).device.type == "cpu"
        mps = parse("vit", ["--tiny", "--use_cpu", "false"], {})
        with pytest.raises(UserError, match="on CUDA or the CPU, not on mps: use --use_cpu"):
            arguments_of(mps, tmp_path, Session(World()))
    finally:
        PartialState._reset_state()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_matmuls_of_fp32_are_tf32_where_that_is_asked_for(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--torch_compile alone would set it with bf16."""

    class Seen:
        def __init__(self, kind: type) -> None: ...

        def parse_args_into_dataclasses(self, argv: list[str]) -> Any:
            raise ValueError(" ".join(argv))  # a CPU's torch would refuse tf32

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(start, "_Parser", Seen)
    settings = parse("vit", ["--tiny", "--precision", precision], {})
    with pytest.raises(UserError, match=f"--tf32 {precision == 'tf32'}"):
        start.training_arguments(settings, tmp_path, 1)


def test_nccl_is_told_the_device_of_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    group = SimpleNamespace(
        is_initialized=lambda: True, get_backend=lambda: "nccl",
        barrier=lambda **more: asked.append(more),
    )  # fmt: skip
    monkeypatch.setattr(session, "dist", group)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    session.barrier()
    assert asked == [{"device_ids": [3]}]


def test_gpus_hidden_by_the_user_are_no_mistake(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        monkeypatch.setattr(cuda, "available", False)
        assert devices.choose_gpus(RANKS, World(per_node=8)) == 0


def test_more_processes_than_gpus(cuda: FakeCuda) -> None:
    assert "5 processes on this machine and 4 GPU(s)" in refused(RANKS, World(per_node=5))
    cuda.name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    assert "CUDA shows a process only one MIG slice" in refused(RANKS, World(per_node=2))
    assert devices.choose_gpus(RANKS, World(nodes=2)) == 1


def test_a_build_without_cuda_names_the_one_to_take(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.available = False
    monkeypatch.setattr(devices.torch.version, "cuda", None)
    assert "it is built without CUDA; install the cu130 build of torch" in refused()
    monkeypatch.setattr(devices, "nvidia_driver", lambda: None)
    assert devices.choose_gpus(ALONE, World()) == 0  # a machine without GPUs


def test_a_driver_too_old_names_the_build_that_it_runs(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.available = False
    monkeypatch.setattr(devices, "nvidia_driver", lambda: Driver(1, "535.1", (12, 2), (8, 0)))
    message = refused()
    assert "built for CUDA 13.0, and the driver 535.1 runs up to 12.2" in message
    assert "install the cu126 build of torch" in message


def test_gpus_that_the_driver_counts_and_cuda_cannot_use(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sweep torch counts them without CUDA, so that only what is asked next fails."""

    def too_old(self: FakeCuda, number: int = 0) -> tuple[int, int]:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(FakeCuda, "get_device_capability", too_old)
    monkeypatch.setattr(devices, "nvidia_driver", lambda: Driver(1, "535.1", (12, 2), (8, 0)))
    assert "built for CUDA 13.0, and the driver 535.1 runs up to 12.2" in refused()


def test_a_driver_that_does_not_answer_is_no_machine_without_gpus(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.available = False
    broken = Driver(0, "", (0, 0), (0, 0), "Driver/library version mismatch")
    monkeypatch.setattr(devices, "nvidia_driver", lambda: broken)
    assert "does not answer (Driver/library version mismatch): fix that" in refused()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.choose_gpus(ALONE, World()) == 0


def test_all_ranks_evaluate_the_batch_of_the_smallest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 24 samples a GiB; with unlike batches samples would be evaluated twice or not at all."""
    sizes = {0: 80, 1: 40, "cuda:1": 80}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties",
        lambda gpu: SimpleNamespace(total_memory=sizes[gpu if gpu in sizes else str(gpu)] * 2**30),
    )  # fmt: skip
    monkeypatch.setattr(evaluation, "gather", lambda own: [own, 12 * 2**30])
    args: Any = SimpleNamespace(device=torch.device("cuda:1"), n_gpu=1, world_size=2)
    assert evaluation.eval_batch_of(args, 10_000) == 24 * 12
    monkeypatch.setattr(evaluation, "gather", lambda own: [own])
    assert evaluation.eval_batch_of(args, 10_000) == 512
    args.n_gpu, sizes[1] = 2, 10
    assert evaluation.eval_batch_of(args, 10_000) == 24 * 10


def test_whatever_else_keeps_torch_from_the_gpus(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.available = False
    assert "No CUDA GPUs are available; fix that" in refused()
    monkeypatch.setattr(FakeCuda, "init", lambda self: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    assert "it gives no reason (CUDA_VISIBLE_DEVICES=9); fix that" in refused()


def test_a_card_that_is_not_in_this_build(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, build in (((7, 0), "cu126"), ((6, 1), "cu126"), ((11, 0), "cu130")):
        cuda.capability, cuda.name = capability, "Some card"
        words = f"Some card has compute capability {capability[0]}.{capability[1]}"
        assert words in refused() and f"install the {build} build" in refused()
    for capability in ((7, 5), (8, 6), (10, 3), (12, 1)):
        cuda.capability = capability
        assert devices.choose_gpus(ALONE, World()) == 1
    cuda.capability = (7, 0)  # a name of AMD's, whose builds have no CUDA version
    monkeypatch.setattr(devices.torch.version, "cuda", None)
    assert devices.choose_gpus(ALONE, World()) == 1


def test_one_machine_has_one_label_however_many_of_its_gpus_a_run_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA H200")
    assert machine_label(4) == "h200x4"
    assert "h200" not in machine_label(0)


def test_a_slice_has_not_the_peak_of_the_whole() -> None:
    whole = "NVIDIA A100-SXM4-40GB"
    assert peak_tflops(whole, "bf16") and peak_tflops(f"{whole} MIG 1g.5gb", "bf16") is None


def test_autocast_of_a_new_thread_has_the_format_that_is_set_in_it() -> None:
    # What nn.DataParallel does for each GPU: a thread that enters autocast without a format.
    seen: list[Any] = []

    def replica(dtype: torch.dtype | None) -> None:
        with torch.autocast("cpu"):
            if dtype is not None:
                torch.set_autocast_dtype("cpu", dtype)
            seen.append(torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype)

    for dtype in (None, torch.float16):
        thread = threading.Thread(target=replica, args=(dtype,))
        thread.start()
        thread.join()
    assert seen == [torch.bfloat16, torch.float16]  # a CPU's own default is bfloat16
