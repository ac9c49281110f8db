"""Which device can do what, by the names that drivers give them."""

from __future__ import annotations

import pytest

from harness.train.measure.flops import PEAKS, peak_tflops


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
