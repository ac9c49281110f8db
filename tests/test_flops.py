"""Operations by closed form, against torch's counter and against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from harness.architectures import ARCHITECTURES
from harness.flags import parse
from harness.train import models
from harness.train.flops import CLOSED, COUNTED, Work, counted, work_of


def built(script: str, *argv: str) -> tuple[Any, Any]:
    settings = parse(script, list(argv))
    labels = ["a", "b", "c"]
    with torch.device("meta"):
        return models.build(settings, labels), models.configuration(settings, labels)


def text(length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(1, length, dtype=torch.long)
    return {"input_ids": ids, "labels": torch.zeros(1, dtype=torch.long)}


def image(config: Any) -> dict[str, torch.Tensor]:
    side = config.image_size
    return {
        "pixel_values": torch.zeros(1, 3, side, side),
        "labels": torch.zeros(1, dtype=torch.long),
    }


@pytest.mark.parametrize("name", ARCHITECTURES["bert"])
@pytest.mark.parametrize("length", [7, 64])
def test_texts_by_closed_form_are_what_is_counted(name: str, length: int) -> None:
    model, _ = built("bert", "--model", name)
    work = work_of(model)
    count = counted(model, text(length))
    assert work is not None and work.how == CLOSED and count is not None and count.how == COUNTED
    assert work.of(length) == pytest.approx(count.of(length), rel=0.02)


@pytest.mark.parametrize("name", ARCHITECTURES["vit"])
def test_images_by_closed_form_are_what_is_counted(name: str) -> None:
    model, config = built("vit", "--model", name)
    work, count = work_of(model), counted(model, image(config))
    assert work is not None and count is not None
    assert work.of() == pytest.approx(count.of(), rel=0.02)


def test_published_figures() -> None:
    """BERT-base at 128 tokens 67.0 GF, ViT-B/16 105.4, ViT-B/32 26.3, ResNet-18 10.65."""
    bert = work_of(built("bert", "--model", "bert-base")[0])
    assert bert is not None and bert.of(128) / 1e9 == pytest.approx(67.0, rel=0.01)
    for name, billions in (("base-patch16", 105.4), ("base-patch32", 26.3)):
        work = work_of(built("vit", "--model", f"vit-{name}")[0])
        assert work is not None and work.of() / 1e9 == pytest.approx(billions, rel=0.01)
    resnet = work_of(built("vit", "--model", "resnet-18")[0])
    assert resnet is not None and resnet.of() / 1e9 == pytest.approx(10.65, rel=0.02)
    small = work_of(built("vit", "--model", "resnet-18-cifar")[0])
    assert small is not None and small.of() / 1e9 == pytest.approx(3.33, rel=0.02)


def test_a_batch_of_unequal_lengths_is_the_sum_of_its_samples() -> None:
    work = Work(fixed=5, per_token=3, per_pair=2)
    lengths = [4, 7, 11]
    together = work.of(sum(lengths), sum(n * n for n in lengths), samples=3)
    assert together == sum(work.of(n) for n in lengths) == 15 + 66 + 2 * (16 + 49 + 121)


class Linear(nn.Module):
    """Without a closed form."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)
        self.looks = looks

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        if self.looks and pixel_values.sum() > 0:
            pixel_values = -pixel_values
        return {"loss": nn.functional.cross_entropy(self.layer(pixel_values.flatten(1)), labels)}


def test_another_model_is_counted_and_left_as_it_was() -> None:
    model = Linear()
    before = model.layer.weight.clone()
    batch = {"pixel_values": torch.zeros(4, 3, 2, 2), "labels": torch.zeros(4, dtype=torch.long)}
    work = work_of(model, batch)
    # One sample: forward, and the gradient of the weights; none of the input.
    assert work == Work(2 * 2 * 12 * 3, how=COUNTED)
    assert torch.equal(model.layer.weight, before) and model.layer.weight.grad is None
    assert work_of(model) is None


def test_what_cannot_be_counted_is_unknown() -> None:
    batch = {"pixel_values": torch.zeros(4, 3, 2, 2), "labels": torch.zeros(4, dtype=torch.long)}
    assert work_of(Linear(looks=True), batch) is None
