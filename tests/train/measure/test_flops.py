"""Operations by closed form, against torch's counter and against numbers worked out by hand."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    ConvNextConfig,
    ConvNextForImageClassification,
    ElectraConfig,
    MixtralConfig,
    MixtralForSequenceClassification,
    ModernBertConfig,
    RobertaConfig,
)

from harness.core.command_line import parse
from harness.core.tasks import TASKS
from harness.core.topology import World
from harness.train.data import models
from harness.train.measure.flops import (
    CLOSED,
    COUNTED,
    PEAKS,
    Uncountable,
    Utilisation,
    Work,
    counted,
    peak_tflops,
    work_of,
)
from tests.support.ranks import ranks


def built(script: str, *argv: str) -> tuple[Any, Any]:
    settings = parse(script, list(argv))
    labels = ["a", "b", "c"]
    with torch.device("meta"):
        return models.build(settings, labels), models.configuration(settings, labels)


def text(length: int = 5) -> dict[str, torch.Tensor]:
    ids = torch.zeros(1, length, dtype=torch.long)
    mask = torch.ones(1, length, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(1, dtype=torch.long)}


def image(side: int) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.zeros(1, 3, side, side),
        "labels": torch.zeros(1, dtype=torch.long),
    }


def never() -> Any:
    raise AssertionError("there is a closed form")


# Layers of ModernBERT look at all of a text or at its neighbourhood: it is counted.
CLOSED_TEXTS = [name for name in TASKS["bert"].architectures if not name.startswith("modernbert")]


@pytest.mark.parametrize("name", CLOSED_TEXTS)
def test_texts_by_closed_form_are_what_is_counted(name: str) -> None:
    model, _ = built("bert", "--model", name)
    work, count = work_of(model, never), counted(model, text)
    assert (work.how, count.how) == (CLOSED, COUNTED)
    for length in (7, 64):
        assert work.of(length) == pytest.approx(count.of(length), rel=0.02)


def test_a_head_of_ones_own_is_counted_whatever_the_configuration_says() -> None:
    """It may compute many times what the classifier of this configuration does."""
    model, _ = built("bert", "--model", "bert-nano")
    plain = work_of(model, never)
    width, classes = model.config.hidden_size, model.config.num_labels
    model.classifier = nn.Sequential(nn.Linear(width, 2048), nn.GELU(), nn.Linear(2048, classes))
    work = work_of(model, lambda: text(7))
    assert (work.how, plain.how) == (COUNTED, CLOSED) and work.of(7) > 1.2 * plain.of(7)


def test_layers_that_were_cut_off_or_frozen_are_not_those_of_the_closed_form() -> None:
    cut, _ = built("bert", "--model", "bert-nano")
    frozen, _ = built("bert", "--model", "bert-nano")
    plain = work_of(cut, never)
    cut.bert.encoder.layer = cut.bert.encoder.layer[:1]
    frozen.bert.requires_grad_(False)
    for model in (cut, frozen):
        work = work_of(model, lambda: text(7))
        assert work.how == COUNTED and work.of(7) < 0.7 * plain.of(7)


VITS = [name for name in TASKS["vit"].architectures if name.startswith("vit")]


@pytest.mark.parametrize("name", VITS)
def test_images_by_closed_form_are_what_is_counted(name: str) -> None:
    model, config = built("vit", "--model", name)
    side = config.image_size
    work, count = work_of(model, never, (side, side)), counted(model, lambda: image(side))
    assert work.how == CLOSED and work.of() == pytest.approx(count.of(), rel=0.02)


def test_published_figures() -> None:
    """BERT-base at 128 tokens 67.0 GF, ViT-B/16 105.4, ViT-B/32 26.3. ResNets: three times the
    forward pass (1.81, 3.66 and 4.09 G multiply-adds), without the gradient of the images.
    """
    bert = work_of(built("bert", "--model", "bert-base")[0], never)
    assert bert.of(128) / 1e9 == pytest.approx(67.0, rel=0.01)
    for name, billions in (("base-patch16", 105.4), ("base-patch32", 26.3)):
        work = work_of(built("vit", "--model", f"vit-{name}")[0], never, (224, 224))
        assert work.of() / 1e9 == pytest.approx(billions, rel=0.01)
    # Also at 32 pixels, and with the stem for such small images.
    figures = [("resnet-18", 224, 10.65), ("resnet-18", 32, 0.218), ("resnet-18-cifar", 32, 3.33),
               ("resnet-34", 224, 21.75), ("resnet-50", 224, 24.30)]  # fmt: skip
    for name, side, billions in figures:
        model, _ = built("vit", "--model", name)
        work = work_of(model, partial(image, side), (side, side))
        assert work.how == COUNTED and work.of() / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_published_figure_of_convolutions_in_groups() -> None:
    """ConvNeXt-T: three times 4.46 G multiply-adds, without the gradient of the images."""
    with torch.device("meta"):
        model = ConvNextForImageClassification(ConvNextConfig(num_labels=1000))
    work = work_of(model, partial(image, 224), (224, 224))
    assert work.how == COUNTED and work.of() / 1e9 == pytest.approx(26.7, rel=0.01)


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


def test_a_model_that_looks_at_content_is_counted_on_content() -> None:
    assert work_of(Linear(looks=True), four) == work_of(Linear(), four)


class Depthwise(nn.Module):
    """A convolution of all channels, one of each channel alone, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1, bias=False)
        self.own = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        logits = self.head(self.own(self.first(pixel_values)).mean((2, 3)))
        return {"loss": nn.functional.cross_entropy(logits, labels)}


def test_channels_of_unlike_groups_do_not_meet_in_the_backward_pass() -> None:
    first, own, head = 2 * 36 * 3 * 8, 2 * 36 * 9 * 8, 2 * 8 * 3
    images = {"pixel_values": torch.zeros(4, 3, 6, 6), "labels": torch.zeros(4, dtype=torch.long)}
    work = work_of(Depthwise(), lambda: images)
    assert work.how == COUNTED and work.of() == 2 * first + 3 * own + 3 * head


def test_the_experts_of_a_text_model_are_counted() -> None:
    """However they are computed: the default multiplies the matrices of all experts at once."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 50,
             "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip
    text = {"input_ids": torch.ones(1, 16, dtype=torch.long), "labels": torch.zeros(1).long()}
    works = []
    for how in ("grouped_mm", "batched_mm"):
        config = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
        config._experts_implementation = how
        works.append(work_of(MixtralForSequenceClassification(config), lambda: text).of(32))
    experts = 3 * 2 * 32 * 2 * 3 * 32 * 64  # two of them for each token, of three matrices
    assert works[0] == pytest.approx(works[1], rel=0.02) and works[0] > experts


def four() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(4, 3, 2, 2), "labels": torch.zeros(4, dtype=torch.long)}


def test_another_model_is_counted_and_left_as_it_was() -> None:
    model = Linear()
    before = model.layer.weight.clone()
    # One sample: forward, and the gradient of the weights; none of the input.
    assert work_of(model, four) == Work(2 * 2 * 12 * 3, how=COUNTED)
    assert torch.equal(model.layer.weight, before) and model.layer.weight.grad is None


def test_what_cannot_be_counted_is_unknown_and_says_why() -> None:
    with pytest.raises(Uncountable, match="AssertionError: there is a closed form"):
        work_of(Linear(), never)


OTHERS: dict[str, Any] = {
    "roberta": RobertaConfig, "electra": ElectraConfig, "modernbert": ModernBertConfig,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_encoders_are_counted_as_the_parts_they_are_made_of(name: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = OTHERS[name](vocab_size=50, intermediate_size=96, pad_token_id=0, **sizes)
    config.embedding_size = 64
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    work = work_of(model, text)
    matrices = 4 * 64 * 64 + (3 if name == "modernbert" else 2) * 64 * 96
    assert work.how == COUNTED
    assert work.per_token == pytest.approx(6 * 2 * matrices, rel=0.05)
    assert work.per_pair == pytest.approx(12 * 2 * 64)


def ends(length: int) -> dict[str, torch.Tensor]:
    """A text that ends as T5 and BART want it."""
    ids = torch.arange(5, 5 + length)[None] % 50
    ids[0, -1] = 3
    return {"input_ids": ids, "labels": torch.zeros(1, dtype=torch.long)}


LOOKING: dict[str, Any] = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 99},
    "bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32,
             "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
             "max_position_embeddings": 99},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
           "decoder_start_token_id": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKING)
def test_models_that_look_at_texts_are_counted_as_they_are_trained(name: str) -> None:
    special = {"vocab_size": 50, "pad_token_id": 0, "eos_token_id": 3, "sep_token_id": 3}
    config = AutoConfig.for_model(name, **special, bos_token_id=2, **LOOKING[name])
    model = AutoModelForSequenceClassification.from_config(config)
    work = work_of(model, lambda: ends(20), longest=90)
    batch = {k: v.expand(3, *v.shape[1:]) for k, v in ends(40).items()}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    assert work.of(40) * 3 == pytest.approx(counter.get_total_flops(), rel=0.02)


class Looking(nn.Module):
    """Looks at its text, and writes down the samples and tokens of each pass."""

    passes: ClassVar[list[tuple[str, int, int]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        assert input_ids.sum() > 0
        samples, tokens = input_ids.shape
        self.passes.append(("forward", samples, tokens))
        loss = self.layer(input_ids[..., None].float()).sum()
        loss.register_hook(lambda _: self.passes.append(("backward", samples, tokens)))
        return {"loss": loss}


def test_a_long_text_with_content_costs_one_forward_pass() -> None:
    Looking.passes.clear()
    work = work_of(Looking(), lambda: ends(20), longest=1000)
    assert work.per_token == pytest.approx(2 * 2 * 8)  # the input needs no gradient
    assert [p for p in Looking.passes if p[2] > 48] == [("forward", 1, 1000)]


OTHER = SimpleNamespace(device=torch.device("meta"))  # neither CPU nor GPU


def context_of(rank: int, size: int) -> Any:
    world = World(per_node=size, rank=rank)
    settings = parse("bert", ["--tiny"])
    return SimpleNamespace(
        world=world, is_rank0=rank == 0, data_facts={}, settings=settings, args=OTHER
    )


def counted_by_rank0() -> tuple[list[int], Any]:
    dist.init_process_group("gloo")
    context = context_of(dist.get_rank(), 2)
    reasons = []
    Looking.passes.clear()
    for sample in (lambda: ends(20), never):
        measure = Utilisation(context, Looking(), sample, lambda: 2, sample)
        reasons.append((measure.work, measure.missing))
    dist.destroy_process_group()
    return [p[2] for p in Looking.passes], reasons


def test_a_peer_without_process_group_counts_for_itself() -> None:
    peer = Utilisation(context_of(1, 1), Looking(), lambda: ends(20), lambda: 1, dict)
    assert peer.work is not None and peer.missing is None


@pytest.mark.process
def test_rank_0_counts_for_all() -> None:
    (passes, first), (none, second) = ranks(2, counted_by_rank0)
    assert passes and not none
    assert first == second and first[0][0].how == COUNTED
    assert first[1] == (None, "counting failed: AssertionError: there is a closed form")


def test_work_that_is_shared_by_a_batch_is_unknown() -> None:
    config = AutoConfig.for_model(
        "deberta-v2", vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, relative_attention=True, pos_att_type=["p2c", "c2p"],
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(Uncountable, match="a part of its work is done once for all texts"):
        work_of(model, lambda: ends(20))


class Cubic(nn.Module):
    """Its work grows with the third power of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        square = input_ids[:, :, None] * self.weight * input_ids[:, None, :]
        return {"loss": (square @ square).sum()}


def test_work_that_is_no_polynomial_of_second_degree_is_unknown() -> None:
    with pytest.raises(Uncountable, match="no polynomial of the length"):
        work_of(Cubic(), text)


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H200 NVL", "bf16", 835),
        ("NVIDIA H100 80GB HBM3", "fp32", 67),
        ("NVIDIA H100 PCIe", "fp16", 756),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA A100-SXM4-40GB", "tf32", 156),
        ("NVIDIA A100 80GB PCIe", "bf16", 312),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA L4", "fp32", 30.3),
        ("NVIDIA L40S", "bf16", 362),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("Tesla P100-SXM2-16GB", "fp32", 10.6),
        ("Tesla P100-PCIE-16GB", "fp32", 9.3),
        ("NVIDIA H800 PCIe", "bf16", 756),
        ("GRID A100-10C", "bf16", None),
        ("NVIDIA A100-1-5CME", "bf16", None),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 4080 SUPER", "fp32", None),
        ("AMD EPYC 7763 64-Core Processor", "fp32", None),
    ],
)
def test_peaks_by_name(device: str, precision: str, peak: float | None) -> None:
    assert peak_tflops(device, precision) == peak


def test_formats_are_in_order() -> None:
    """A smaller number format is never slower, and 16 bits are equally fast in both kinds."""
    for device, peaks in PEAKS:
        assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"], device
        assert peaks["fp16"] >= peaks.get("tf32", 0) >= 0 and peaks["fp16"] >= peaks["fp32"], device
