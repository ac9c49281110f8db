"""Libraries are patched in the versions with which the patches were checked."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
import transformers

from harness.core.command_line import parse
from harness.core.settings import UserError
from harness.core.topology import World
from harness.train.agent import ending_stopped_ranks
from harness.train.loop.host_overhead import OVERRIDDEN, patch_libraries
from harness.train.loop.trainer import ExactTrainer
from harness.train.patches import CHECKED, check_patched
from harness.train.rendezvous import harden
from harness.train.run import start


def library(name: str, version: str) -> ModuleType:
    made = ModuleType(name)
    made.__version__ = version  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("torch", ["2.13.0+cpu", "2.14.1", "2.15.0.dev20261101"], ["1.13.0", "3.0.0"]),
        ("transformers", ["5.23.0", "5.23.4"], ["5.24.0", "5.2.3", "6.0.0"]),
        ("accelerate", ["1.15.0", "1.15.1.dev0"], ["1.16.0", "2.15.0"]),
        ("hivemind", ["1.1.12"], ["1.1.11", "1.1.1", "1.2.12"]),
    ],
)
def test_other_versions_are_refused_with_the_checked_one(
    name: str, accepted: list[str], refused: list[str]
) -> None:
    for version in accepted:
        check_patched(library(name, version), "for a test")
    checked = CHECKED[name].version
    pin = f"hivemind=={checked}" if name == "hivemind" else f"'{name}=={checked}.*'"
    for version in refused:
        with pytest.raises(UserError) as error:
            check_patched(library(name, version), "for a test")
        assert str(error.value) == (
            f"{name} {version} is installed, but the parts of it that must be replaced for a test "
            f"were checked with {checked}: pip install {pin}"
        )


def test_a_part_that_is_not_there_is_named() -> None:
    owner = SimpleNamespace(__name__="torch.of", there=1)
    check_patched(library("torch", "2.14.0"), "for a test", [(owner, "there")])
    with pytest.raises(UserError) as error:
        check_patched(library("torch", "2.14.0"), "for a test", [(owner, "gone")])
    assert str(error.value) == (
        "torch 2.14.0: torch.of has no gone, which must be replaced for a test, as checked with "
        "2.13: pip install 'torch==2.13.*'"
    )


def test_a_part_of_an_object_is_named_by_its_class() -> None:
    with pytest.raises(UserError, match=r"^torch 2.14.0: SimpleNamespace has no gone, which must"):
        check_patched(library("torch", "2.14.0"), "for a test", [(SimpleNamespace(), "gone")])


def test_every_method_that_overrides_one_of_the_trainer_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {name for name in vars(ExactTrainer) if not name.startswith("__")}
    overridden = {name for name in own if name in dir(transformers.Trainer)}
    assert sorted(OVERRIDDEN) == sorted(overridden)
    patch_libraries()
    monkeypatch.delattr(transformers.Trainer, "store_flos")
    with pytest.raises(UserError, match="Trainer has no store_flos, which must be replaced for"):
        patch_libraries()


def test_a_patched_part_of_accelerate_that_is_gone_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(accelerate.Accelerator, "multi_device")
    with pytest.raises(UserError, match="Accelerator has no multi_device, which must be replaced"):
        patch_libraries()


def test_one_gpu_of_several_is_chosen_with_a_checked_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = SimpleNamespace(device=torch.device("cuda"), n_gpu=2, _n_gpu=2)
    session: Any = SimpleNamespace(
        own_settings=lambda settings: settings, world=World(), restrict=lambda args: None
    )
    monkeypatch.setattr(start, "training_arguments", lambda *_: args)
    settings = parse("vit", ["--tiny"], {})
    assert start.arguments_of(settings, Path("out"), session)._n_gpu == 1
    monkeypatch.setattr(start.transformers, "__version__", "6.0.0")
    with pytest.raises(UserError, match=r"^transformers 6.0.0 .* so that one GPU trains were"):
        start.arguments_of(settings, Path("out"), session)


def test_another_major_version_of_torch_is_refused_before_anything_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "3.0.1")
    with pytest.raises(UserError, match=r"torch 3.0.1 .* nobody else reaches the run were checked"):
        harden()
    with (
        pytest.raises(UserError, match=r"torch 3.0.1 .* stopped ranks are ended were checked"),
        ending_stopped_ranks(1.0),
    ):
        raise AssertionError("not reached")
