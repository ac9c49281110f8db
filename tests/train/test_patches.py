"""Libraries are patched in the versions with which the patches were checked."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch

from harness.core.settings import UserError
from harness.train.agent import ending_stopped_ranks
from harness.train.patches import CHECKED, check_patched
from harness.train.rendezvous import harden


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
