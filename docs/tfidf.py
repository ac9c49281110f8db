"""What words alone say: logistic regression on TF-IDF, on the same samples as bert.py.

    python docs/tfidf.py --dataset FILE --model MODEL --per_gpu_batch 32 --lr 0.03

The data of bert.py and a model of its own; --model only gives the tokenizer.
"""

from harness.core.command_line import command_line

SETTINGS = command_line("bert") if __name__ == "__main__" else None

import numpy as np
import torch
from torch import nn

from bert import load_data
from harness.core.settings import Settings
from harness.train.data.samples import Data
from harness.train.loop.progress import Console
from harness.train.loop.trainer import ExactTrainer
from harness.train.measure.metrics import BatchMetrics
from harness.train.run.start import leave, start
from logcallback import LogCallback


class TfIdf(nn.Module):
    """Tokens of a text, counted as 1 + log(count), weighted by how few training texts have them,
    with length 1; then one linear layer.
    """

    def __init__(self, texts: Data) -> None:
        super().__init__()
        each = (texts.collate([texts.train[number]]) for number in range(len(texts.train)))
        ids = [np.unique(text["input_ids"]) for text in each]
        seen = np.bincount(np.concatenate(ids), minlength=len(texts.processing))
        rarity = np.log((1 + len(ids)) / (1 + seen)) + 1
        self.register_buffer("rarity", torch.tensor(rarity, dtype=torch.float32))
        self.head = nn.Linear(len(rarity), len(texts.labels))
        nn.init.zeros_(self.head.weight)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        counts = self.rarity.new_zeros(len(input_ids), len(self.rarity))
        counts.scatter_add_(1, input_ids, attention_mask.to(counts.dtype))
        weights = torch.where(counts > 0, 1 + counts.clamp(min=1).log(), 0) * self.rarity
        logits = self.head(nn.functional.normalize(weights))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main(settings: Settings) -> int:
    run = start(settings)
    if run is None:
        return 0
    with run:
        texts = load_data(run.context)
        context = run.resume(texts.facts)
        recorder = LogCallback(context)
        trainer = ExactTrainer(
            context=context,
            model=TfIdf(texts),
            args=context.args,
            train_dataset=texts.train,
            eval_dataset=texts.validation or texts.test,
            test_dataset=texts.validation and texts.test,
            data_collator=texts.collate,
            to_device=texts.to_device,
            processing_class=texts.processing,
            compute_metrics=BatchMetrics(len(texts.labels)),
            callbacks=[recorder, Console(recorder, context)],
        )
        run.train(trainer)
    return 0


if __name__ == "__main__":
    assert SETTINGS is not None
    leave(main(SETTINGS))
