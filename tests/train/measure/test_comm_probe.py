"""What exchanging adds to a step, measured so that the training goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from harness.core.records import RunFolder, read_json, read_rows, write_json
from harness.train.measure import communication
from harness.train.measure.communication import NOT_YET, CommProbe, why_not
from tests.support.ranks import ranks
from tests.support.sweeps import untimed_rows
from tests.support.toys import Net, Points, head, logged, ours

# Flags of runs on two ranks, each with dropout or BatchNorm, and what of its exchange has a state.
CASES = {
    "ddp": ["--log_every=1"],
    "ddp, accumulation": ["--grad_acc=2", "--precision=bf16"],
    "powersgd": ["--compress=powersgd", "--max_grad_norm=0"],
    "powersgd, accumulation": ["--compress=powersgd:2", "--grad_acc=2"],
    "fsdp": ["--strategy=fsdp"],
    "fsdp, accumulation": ["--strategy=fsdp", "--grad_acc=2", "--precision=bf16"],
    "fsdp, gradients": ["--strategy=fsdp", "--fsdp_shard=grads"],
    "resnet": ["--log_every=1"],
}


class Pictures(Points):
    """Points as pictures of 8 x 8, each another one."""

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        image = torch.outer(self.x[i], self.x[i]).expand(3, -1, -1)
        return {"pixel_values": image, "labels": self.labels[i]}


def whole(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().double().numpy().copy()


def of_a_run(folder: str, name: str, *more: str) -> dict[str, Any]:
    kind, net = Points, Net(dropout=0.3, batchnorm="fsdp" not in name)
    if name == "resnet":
        kind, net = Pictures, head("resnet")
    torch.manual_seed(7)
    trainer, run = ours(folder, net, kind(96), kind(9, 1), *CASES[name], *more)
    run.train(trainer)
    outcome = {
        "losses": logged(trainer, "loss"),
        "content": {n: whole(v) for n, v in trainer.model.state_dict().items()},
        "drawn": torch.rand(4).tolist(),
    }
    if run.context.is_rank0:
        environment = read_json(run.context.folder.environment) or {}
        outcome |= {
            "rows": untimed_rows(run.context.folder),
            "timed": read_rows(run.context.folder.epochs)[0][0]["timed_steps"],
            "measuring_s": read_rows(run.context.folder.epochs)[0][0]["measuring_s"],
            "probe": environment["comm_probe"],
            "missing": environment["comm_probe_missing"],
        }
    return outcome


def with_it_and_without(folder: str) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [of_a_run(f"{folder}/{name}/{how}", name, f"--comm_probe={how}") for how in HOWS]
        for name in CASES
    }


HOWS = ("auto", "off")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, Any]]]]:
    return ranks(2, with_it_and_without, str(tmp_path_factory.mktemp("both")))


@pytest.mark.process
@pytest.mark.parametrize("name", CASES)
def test_the_training_is_the_same_to_the_bit(both: list[Any], name: str) -> None:
    for rank, outcome in enumerate(both):
        probed, plain = outcome[name]
        assert probed["losses"] == plain["losses"]
        assert probed["content"].keys() == plain["content"].keys()
        for tensor, value in plain["content"].items():
            assert np.array_equal(probed["content"][tensor], value), (rank, tensor)
        assert probed["drawn"] == plain["drawn"]
    probed, plain = both[0][name]
    assert probed["rows"] == plain["rows"]  # with the bytes that were handed over
    assert probed["timed"] == plain["timed"] > 0
    # It can only be told from none because it was there.
    assert plain["probe"] is None and plain["missing"] == "--comm_probe off"
    probe = probed["probe"]
    assert probed["missing"] is None and probe["took_s"] > sum(probe["with_s"])
    assert probed["measuring_s"] >= probe["took_s"] and plain["measuring_s"] >= 0
    assert 1 <= len(probe["with_s"]) == len(probe["without_s"]) <= communication.PAIRS
    differences = np.subtract(probe["with_s"], probe["without_s"])
    share = np.median(differences) / probe["step_s"]
    assert probe["comm_share"] == (pytest.approx(share) if share < 1 else None)


def of_its_bounds(folder: str) -> dict[str, Any]:
    """No time for a second pair; no memory for a pass without exchange; too few updates."""
    outcome: dict[str, Any] = {}
    communication.LIMIT_S = 1e-9
    auto = "--comm_probe=auto"
    outcome["late"] = of_a_run(f"{folder}/late", "ddp", auto)
    communication.psutil.virtual_memory = lambda: SimpleNamespace(available=2000, total=2**30)
    outcome["full"] = of_a_run(f"{folder}/full", "fsdp", auto)
    outcome["short"] = of_a_run(f"{folder}/short", "ddp", auto, "--max_steps=3")
    return outcome


@pytest.mark.process
def test_the_probe_is_bounded_in_time_and_memory(tmp_path: Path) -> None:
    outcome = ranks(2, of_its_bounds, str(tmp_path))[0]
    assert len(outcome["late"]["probe"]["with_s"]) == 1
    assert outcome["full"]["probe"] is None
    # 16 x 8 + 16 + 3 x 16 + 3 weights of 4 bytes, and their gradients; half of 2,000 bytes each.
    for part in (f"{2 * 4 * 195 / 2**30:.3g} GiB more", f"one has {1000 / 2**30:.3g} GiB"):
        assert part in outcome["full"]["missing"]
    assert (outcome["short"]["probe"], outcome["short"]["missing"]) == (None, NOT_YET)


def run_of(folder: Path, **more: Any) -> Any:
    settings = {"strategy": "ddp", "comm_probe": "auto", "fsdp_offload": False, "grad_acc": 1}
    args = {"torch_compile": False, "ddp_static_graph": None}
    values: dict[str, Any] = {"size": 2, **settings, **args, **more}
    return SimpleNamespace(
        world=SimpleNamespace(size=values["size"]),
        settings=SimpleNamespace(**{name: values[name] for name in settings}),
        args=SimpleNamespace(**{name: values[name] for name in args}),
        folder=RunFolder(folder),
    )


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, None),
        ({"strategy": "fsdp"}, None),
        ({"strategy": "diloco"}, "only ddp and fsdp"),
        ({"strategy": "hivemind", "size": 1}, "only ddp and fsdp"),
        ({"size": 1}, "one process"),
        ({"comm_probe": "off"}, "--comm_probe off"),
        ({"torch_compile": True}, "--torch_compile"),
        ({"ddp_static_graph": True}, "--ddp_static_graph"),
        ({"strategy": "fsdp", "fsdp_offload": True}, "--fsdp_offload"),
    ],
)
def test_where_it_cannot_be_the_reason_is_said(
    values: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    message = why_not(run_of(tmp_path, **values))
    assert message is None if reason is None else message is not None and message.startswith(reason)


def test_what_an_earlier_start_of_the_run_has_found_stays(tmp_path: Path) -> None:
    probe = CommProbe(SimpleNamespace(context=run_of(tmp_path)))
    probe.use(torch.nn.Linear(1, 1))
    assert probe.facts() == {"comm_probe": None, "comm_probe_missing": NOT_YET}
    write_json(RunFolder(tmp_path).environment, {"comm_probe": {"comm_share": 0.25}})
    assert probe.facts() == {"comm_probe": {"comm_share": 0.25}, "comm_probe_missing": None}
    # Off is off, whatever another start has found; and what is found anew counts.
    off = CommProbe(SimpleNamespace(context=run_of(tmp_path, comm_probe="off")))
    assert off.facts() == {"comm_probe": None, "comm_probe_missing": "--comm_probe off"}
    probe.result, probe.missing = {"comm_share": 0.5}, None
    assert probe.facts()["comm_probe"] == {"comm_share": 0.5}


def test_a_model_that_skips_layers_is_not_probed(tmp_path: Path) -> None:
    probe = CommProbe(SimpleNamespace(context=run_of(tmp_path)))
    probe.use(torch.nn.Linear(1, 1), skips_layers=True)
    assert str(probe.facts()["comm_probe_missing"]).startswith("layers are skipped at random")
    probe.use(torch.nn.Linear(1, 1))  # a second training of the same model
    assert not probe.due and str(probe.missing).startswith("layers are skipped at random")


@pytest.mark.parametrize(("strategy", "passes"), [("ddp", 1), ("fsdp", 3)])
def test_all_passes_of_an_update_that_exchange_are_measured(
    strategy: str, passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With accumulation, shards gather the weights in each pass."""
    state, made = {"exchanges": True, "reduces": True}, []

    @contextmanager
    def off(name: str) -> Iterator[None]:
        state[name] = False
        yield
        state[name] = True

    trainer = SimpleNamespace(
        context=run_of(tmp_path, strategy=strategy, grad_acc=3),
        training_step=lambda model, batch: made.append((state["exchanges"], state["reduces"])),
        _defer_fsdp_gradient_reduction=lambda: off("reduces"),
    )
    probe = CommProbe(trainer)
    monkeypatch.setattr(probe, "_synchronise", lambda: None)
    monkeypatch.setattr(communication, "without_exchange", lambda *of: off("exchanges"))
    monkeypatch.setattr(communication, "PAIRS", 1)
    assert len(probe._pairs(strategy == "fsdp")) == 1
    restoring = [(True, True)]
    with_it = [(True, False)] * (passes - 1) + [(True, True)]
    ends = restoring if strategy == "fsdp" else []
    assert made == restoring + with_it + [(False, True)] * passes + ends
