"""What devices can do at most, dense, in 10^12 operations a second; from their makers' data sheets.

Sparsity doubles some of the figures that are advertised; training does not use it.
"""

from __future__ import annotations

import re

# What a device's name has in it, the most particular first -> number format -> peak.
# bf16 and fp16 add up in fp32, as training does.
PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    # NVIDIA B200 data sheet (2024); H200 and H100 data sheets (2023, 2024)
    ("b200", {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75}),
    ("h200 nvl", {"bf16": 835, "fp16": 835, "tf32": 418, "fp32": 60}),
    ("h200", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    ("gh200", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    ("h100 nvl", {"bf16": 835, "fp16": 835, "tf32": 418, "fp32": 60}),
    ("h100 pcie", {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}),
    ("h100", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    ("h800", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    ("h20", {"bf16": 148, "fp16": 148, "tf32": 74, "fp32": 44}),
    # NVIDIA A100, A30, A40, A10 data sheets (2020, 2021)
    ("a100", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    ("a800", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    ("a30", {"bf16": 165, "fp16": 165, "tf32": 82, "fp32": 10.3}),
    ("a40", {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    ("a10g", {"bf16": 70, "fp16": 70, "tf32": 35, "fp32": 35}),
    ("a10", {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}),
    # NVIDIA L40S, L40, L4 data sheets (2022, 2023)
    ("l40s", {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}),
    ("l40", {"bf16": 181, "fp16": 181, "tf32": 90.5, "fp32": 90.5}),
    ("l4", {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    # NVIDIA V100 (2018), T4 (2019), P100 (2016) data sheets: no bf16, no tf32
    ("v100", {"fp16": 125, "fp32": 15.7}),
    ("t4", {"fp16": 65, "fp32": 8.1}),
    ("p100", {"fp16": 18.7, "fp32": 9.3}),
    # NVIDIA Ada and Ampere architecture white papers: GeForce halves sums in fp32
    ("rtx 4090", {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6}),
    ("rtx 4080", {"bf16": 97.5, "fp16": 97.5, "tf32": 48.7, "fp32": 48.7}),
    ("rtx 3090", {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6}),
    ("rtx 3080", {"bf16": 59.5, "fp16": 59.5, "tf32": 29.8, "fp32": 29.8}),
)

# What makes another device of a name.
OTHER_MODELS = ("ti ", "super ", "laptop ", "d ", "mobile ", "max ")


def peak_tflops(device: str, precision: str) -> float | None:
    """Of a device by its name; None where it is not in the table, or has no such format."""
    name = f" {re.sub(r'[^a-z0-9]+', ' ', device.lower())} "
    for part, by_format in PEAKS:
        _, found, after = name.partition(f" {part} ")
        if found and not after.startswith(OTHER_MODELS):
            return by_format.get(precision)
    return None
