"""A third modality: one file with an entry in TASKS, data of its own and a model of the library."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.core.command_line import command_line
from harness.core.tasks import TASKS, Task

CHOSEN = {
    "model": "wav2vec2-nano", "dataset": "made:tones", "train_size": "all", "test_size": "all",
    "per_gpu_batch": 8, "epochs": 1, "lr": 1e-3,
}  # fmt: skip
NANO = {
    "model_type": "wav2vec2", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "conv_dim": [16, 16], "conv_kernel": [10, 8], "conv_stride": [8, 8],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "classifier_proj_size": 16,
}  # fmt: skip
TASKS["tones"] = Task(
    script="tones",
    input="audio",
    model_input="input_values",
    summary="Tell high tones from low ones.",
    auto_model="AutoModelForAudioClassification",
    defaults=CHOSEN,
    tiny=CHOSEN,
    architectures={"wav2vec2-nano": NANO},
)
SETTINGS = command_line("tones") if __name__ == "__main__" else None

import torch

from harness.core.settings import Settings
from harness.train.data import models
from harness.train.data.samples import Indices
from harness.train.loop.progress import Console
from harness.train.loop.trainer import ExactTrainer
from harness.train.measure.metrics import BatchMetrics
from harness.train.run.start import leave, start
from logcallback import LogCallback

LABELS = ["low", "high"]
CLASSES = np.arange(96) % 2
WAVES = np.sin(np.arange(800) * (0.05 + 0.2 * CLASSES[:, None])).astype(np.float32)
FACTS = {
    "dataset": "made:tones", "classes": 2, "train_samples": 64, "left_out_samples": 0,
    "test_samples": 32,
}  # fmt: skip


def collate(numbers: Any) -> dict[str, torch.Tensor]:
    waves, classes = torch.from_numpy(WAVES[numbers]), torch.from_numpy(CLASSES[numbers])
    return {"input_values": waves, "labels": classes}


def main(settings: Settings) -> int:
    run = start(settings)
    assert run is not None
    with run:
        context = run.resume(FACTS)
        recorder = LogCallback(context)
        trainer = ExactTrainer(
            context=context,
            model=models.build(settings, LABELS),
            args=context.args,
            train_dataset=Indices(64),
            eval_dataset=Indices(32, first=64),
            data_collator=collate,
            to_device=lambda batch: batch,
            compute_metrics=BatchMetrics(len(LABELS)),
            callbacks=[recorder, Console(recorder, context)],
        )
        run.train(trainer)
    return 0


if __name__ == "__main__":
    assert SETTINGS is not None
    leave(main(SETTINGS))
