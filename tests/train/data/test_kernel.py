"""Torch's kernel for packed texts: compared before it is used, with windows and without."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device

from harness.core.command_line import parse
from harness.train.data import text_layout
from harness.train.data.texts import Layout, for_model
from tests.support.padded import by_each_text, lengths, outcome, small
from tests.support.samples import text_batches


def test_the_kernel_is_refused_with_the_reason() -> None:
    for device, dtype, word in (
        ("cpu", torch.bfloat16, "CUDA"),
        ("cuda", torch.float32, "half precision, not float32"),
    ):
        assert word in str(text_layout.why_no_kernel(torch.device(device), dtype, 2, 16))


@pytest.mark.parametrize("wrong", [False, True])
def test_the_kernel_is_compared_before_it_is_used(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(
        rows: Any, bounds: Any, longest: int, dropout: float, scale: Any, window: int | None
    ) -> torch.Tensor:
        bounds = torch.tensor([0, int(bounds[-1])]) if wrong else bounds  # one text of all
        return by_each_text(rows, bounds, int(bounds[-1]), 0.0, scale, window)

    monkeypatch.setattr(text_layout, "kernel_attention", kernel)
    for window in (None, text_layout.TRIED_WINDOW):
        apart = text_layout.kernel_error(torch.device("cpu"), torch.bfloat16, 2, 16, window)
        assert (apart > 0.05) == wrong


@pytest.mark.parametrize(
    ("off_by", "says"), [(None, "is off by"), (1, "is off by"), (-1, "is off by"), (0, None)]
)
def test_a_kernel_is_used_with_windows_if_it_has_the_right_ones(
    off_by: int | None, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """off_by: tokens; None for a kernel that ignores windows."""

    def kernel(
        rows: Any, bounds: Any, longest: int, dropout: float, scale: Any, window: int | None
    ) -> torch.Tensor:
        used = None if window is None or off_by is None else window + off_by
        return by_each_text(rows, bounds, longest, dropout, scale, used)

    monkeypatch.setattr(text_layout, "kernel_attention", kernel)
    monkeypatch.setattr(text_layout, "KERNEL_DEVICE", "cpu")
    of = (torch.device("cpu"), torch.bfloat16, 2, 16)
    assert text_layout.why_no_kernel(*of) is None
    reason = text_layout.why_no_kernel(*of, windows=True)
    assert reason is None if says is None else says in str(reason)


def chosen(name: str, compiled: bool = False) -> tuple[Layout, str | None]:
    settings = parse("bert", ["--tiny", "--precision", "bf16"], environ={})
    args: Any = SimpleNamespace(
        torch_compile=compiled, neftune_noise_alpha=None, device=torch.device("cpu")
    )
    return text_layout._choose(small(name), settings, args)


def test_a_kernel_that_refuses_windows_is_used_for_models_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kernel(*given: Any) -> torch.Tensor:
        if given[-1] is not None:
            raise RuntimeError("this build does not support local attention")
        return by_each_text(*given)

    monkeypatch.setattr(text_layout, "kernel_attention", kernel)
    monkeypatch.setattr(text_layout, "KERNEL_DEVICE", "cpu")
    layout, reason = chosen("bert")
    assert (layout.attention, reason) == ("kernel", None)
    layout, reason = chosen("modernbert")
    assert layout.attention == "runs"
    assert reason == "the kernel does not run here: this build does not support local attention"


def test_a_compiled_model_with_windows_is_packed_for_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_layout, "kernel_attention", by_each_text)
    monkeypatch.setattr(text_layout, "KERNEL_DEVICE", "cpu")
    assert chosen("modernbert", compiled=True) == (
        Layout("packed", "kernel", few_shapes=True), None,
    )  # fmt: skip


def broken(*args: Any) -> torch.Tensor:
    raise RuntimeError("no kernel image\nfor this device")


def test_a_kernel_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_layout, "kernel_attention", broken)
    monkeypatch.setattr(text_layout, "KERNEL_DEVICE", "cpu")
    reason = text_layout.why_no_kernel(torch.device("cpu"), torch.bfloat16, 2, 16)
    assert reason == "the kernel does not run here: no kernel image"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["distilbert", "modernbert", "modernbert-cls"])
def test_the_kernel_reads_rows_like_padding(name: str, tmp_path: Path) -> None:
    device = torch.device("cuda")
    for dtype in text_layout.HALF:
        assert text_layout.why_no_kernel(device, dtype, 2, 64, windows=True) is None
    batches = text_batches(tmp_path, lengths(), pair=False)
    model = small(name).to(device)
    text_layout.accept_packed(model)
    result = []
    for layout in (Layout(), Layout("packed", "kernel"), Layout("packed", "kernel", 0, True)):
        batches.layout = layout
        inputs = send_to_device(for_model(batches(np.arange(16))), device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            result.append(outcome(model, inputs))
    for scores, gradient in result[1:]:
        torch.testing.assert_close(scores.float(), result[0][0].float(), rtol=0.05, atol=0.02)
        assert (gradient - result[0][1]).norm() < 0.05 * result[0][1].norm()
