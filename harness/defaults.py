"""What a script takes where no flag says otherwise."""

from __future__ import annotations

from typing import Any

# The data and sizes are those of the published experiments that the sweeps in experiments/ repeat;
# --tiny replaces them by laptop sizes.
DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": {
        "model": "google-bert/bert-base-uncased", "dataset": "fancyzhx/ag_news",
        "train_size": 8000, "test_size": 2000, "per_gpu_batch": 16, "epochs": 3, "lr": 2e-5,
        "max_length": 512, "padding": "auto",
    },
    "vit": {
        "model": "google/vit-base-patch16-224-in21k", "dataset": "ethz/food101",
        "train_size": 8000, "test_size": 2000, "per_gpu_batch": 16, "epochs": 3, "lr": 2e-5,
    },
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "bert": {
        "model": "bert-nano", "dataset": "embedded:english", "train_size": "all",
        "test_size": "all", "per_gpu_batch": 32, "epochs": 4, "lr": 3e-3, "max_length": 48,
        "padding": "auto",
    },
    "vit": {
        "model": "vit-nano", "dataset": "embedded:digits", "train_size": "all",
        "test_size": "all", "per_gpu_batch": 32, "epochs": 12, "lr": 1.5e-3,
    },
}  # fmt: skip
