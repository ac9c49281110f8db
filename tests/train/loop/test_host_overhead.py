"""What is left out of the step changes no number: ours against the Trainer's own, bit for bit."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Trainer

from harness.core.settings import UserError
from harness.train.loop import host_overhead
from harness.train.loop.trainer import ExactTrainer
from tests.support.ranks import ranks
from tests.support.toys import CPU, Net, Points, logged, ours, weights

pytestmark = pytest.mark.process

CASES = [(), ("--grad_acc=2",), ("--max_grad_norm=0",), ("--max_grad_norm=0.01",)]
# What is taken from the Trainer again for the other arm.
METHODS = ("_get_grad_norm", "floating_point_ops", "store_flos")
FUNCTIONS: dict[str, Any] = {
    "clip_gradients": lambda trainer: Trainer._clip_grad_norm(trainer, trainer.model_wrapped),
    "settle": lambda model, inner: [],
    "patch_libraries": lambda: None,
}


def trained(folder: str, more: tuple[str, ...]) -> dict[str, Any]:
    torch.manual_seed(3)  # dropout
    trainer, _ = ours(
        folder, Net(dropout=0.3, batchnorm=True), Points(48), Points(13, draw=1),
        "--epochs=3", "--log_every=2", "--weight_decay=0.1", *more,
    )  # fmt: skip
    trainer.train()
    names = ("loss", "eval_loss", "eval_accuracy", "epoch_train_loss", "epoch_grad_norm")
    return {
        "weights": weights(trainer.model), "masks": trainer.model.masks,
        **{name: logged(trainer, name) for name in names},
    }  # fmt: skip


def both(folder: str, more: tuple[str, ...]) -> list[dict[str, Any]]:
    results = [trained(f"{folder}/ours", more)]
    stock: dict[str, Any] = {name: getattr(Trainer, name) for name in METHODS}
    with (
        mock.patch.multiple(ExactTrainer, **stock),
        mock.patch.multiple(host_overhead, **FUNCTIONS),
    ):
        return [*results, trained(f"{folder}/stock", more)]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("more", CASES)
def test_less_host_work_gives_identical_results(
    count: int, more: tuple[str, ...], tmp_path: Path
) -> None:
    for lean, stock in ranks(count, both, str(tmp_path), more, env=CPU):
        assert (lean.pop("weights") == stock.pop("weights")).all()
        assert lean == stock
        assert len(lean["eval_loss"]) == 3 and lean["masks"]


def walks(folder: str) -> dict[str, Any]:
    """How often modules are put into training mode, and which mode they are in."""
    seen: list[bool] = []

    class Watching(Net):
        def train(self, mode: bool = True) -> nn.Module:
            if self is model:  # and no copy, on which something is tried
                seen.append(mode)
            return super().train(mode)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            assert self.training == self.dropout.training == self.first.training
            if self is model:
                modes.append(self.training)
            return super().forward(*args, **kwargs)

    modes: list[bool] = []
    model = Watching(dropout=0.1)
    trainer, _ = ours(folder, model, Points(32), Points(8), "--epochs=2")
    seen.clear()
    trainer.train()
    gathered = [log for log in trainer.state.log_history if "total_flos" in log]
    return {"seen": seen, "modes": modes, "flos": gathered, "total": trainer.state.total_flos}


@pytest.mark.parametrize("count", [1, 2])
def test_modules_are_walked_when_the_mode_changes(count: int, tmp_path: Path) -> None:
    for results in ranks(count, walks, str(tmp_path), env=CPU):
        steps, evaluated = 32 // 4 // count, 8 // 4 // count
        assert results["modes"] == 2 * (steps * [True] + evaluated * [False])
        # Once for each epoch's training, and once for each evaluation.
        assert results["seen"].count(False) == 2
        assert results["seen"].count(True) <= 3
        assert results["flos"] == [] and results["total"] == 0  # not counted: not logged


def looked_up(folder: str) -> int:
    """How often accelerate looks for a package on the disk in a training of many steps."""
    import accelerate.utils.imports

    trainer, _ = ours(folder, Net(), Points(64), Points(8))
    package = "_is_package_available"
    packages: list[Any] = []
    real = accelerate.utils.imports._is_package_available

    def noted(name: str, *rest: Any) -> Any:
        packages.append(name)
        return real(name, *rest)

    with mock.patch.object(accelerate.utils.imports, package, noted):
        trainer.train()
    return packages.count("lomo_optim")


def test_no_package_is_looked_for_in_the_step(tmp_path: Path) -> None:
    (count,) = ranks(1, looked_up, str(tmp_path), env=CPU)
    assert count <= 3  # in 16 steps


def saved_without_crc32(folder: str) -> bool:
    host_overhead.patch_libraries()
    file, weights = Path(folder, "weights.pt"), {"a": torch.arange(1000.0)}
    torch.save(weights, file)
    assert torch.equal(torch.load(file, weights_only=True)["a"], weights["a"])
    return all(entry.CRC == 0 for entry in zipfile.ZipFile(file).infolist())


def test_a_file_of_weights_has_no_second_checksum(tmp_path: Path) -> None:
    assert ranks(1, saved_without_crc32, str(tmp_path), env=CPU) == [True]


@pytest.mark.parametrize("library", ["transformers", "accelerate"])
def test_a_version_that_was_not_checked_is_refused(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getattr(host_overhead, library), "__version__", "99.0.1")
    with pytest.raises(UserError, match=f"{library} 99.0.1 .* were checked with"):
        host_overhead.patch_libraries()


def clipped(most: float) -> list[tuple[float, list[list[float]]]]:
    """Norm and gradients of sharded weights: by torch, and as for shards in CPU memory."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    results = []
    for offloaded in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        torch.manual_seed(2 + dist.get_rank())
        model(torch.randn(4, 5)).square().sum().backward()
        parameters: Any = list(model.parameters())
        if offloaded:
            norm = host_overhead.clip_offloaded(parameters, most, torch.device("cpu"))
        else:
            norm = nn.utils.clip_grad_norm_(parameters, most).full_tensor()
        results.append((float(norm), [p.grad.to_local().tolist() for p in parameters]))
    return results


@pytest.mark.parametrize("most", [0.5, 1e6])
def test_offloaded_shards_are_clipped_by_the_norm_of_all(most: float) -> None:
    for by_torch, offloaded in ranks(2, clipped, most, env=CPU):
        assert offloaded[0] == pytest.approx(by_torch[0], rel=1e-6)
        for ours_, theirs in zip(offloaded[1], by_torch[1], strict=True):
            torch.testing.assert_close(torch.tensor(ours_), torch.tensor(theirs))


def test_one_process_of_ddp_is_wrapped_on_every_device() -> None:
    assert host_overhead.Distributed.multi_device is True
    assert isinstance(vars(accelerate.Accelerator)["multi_device"], property)
