"""Fine-tune a text classifier and record what it cost.

    python bert.py --tiny                                        a laptop, no network, half a minute
    torchrun --standalone --nproc_per_node=4 bert.py --per_gpu_batch=16 --setup 1_4
    python bert.py --help

Default: BERT-base on 8,000 articles of AG News. vit.py does the same for images.
"""

from harness.core.process import install_quit_handlers

if __name__ == "__main__":
    install_quit_handlers()  # from here on, Ctrl-C prints one line

from harness.core.command_line import command_line

# Read before torch is loaded, so that a wrong flag is reported at once.
SETTINGS = command_line("bert") if __name__ == "__main__" else None

from torch import nn

from harness.core.settings import Settings
from harness.train.context import Context
from harness.train.data import models
from harness.train.data.cache import in_turn
from harness.train.data.samples import Data
from harness.train.data.texts import load_texts
from harness.train.loop.progress import Console
from harness.train.loop.trainer import ExactTrainer
from harness.train.measure.metrics import BatchMetrics
from harness.train.run.start import leave, start
from logcallback import LogCallback


def load_data(context: Context) -> Data:
    """The same subset and split on every rank; rank 0 prepares it, the others read the cache."""
    with in_turn(context.world):
        return load_texts(context.settings, context.data_parallel_size)


def build_model(context: Context, labels: list[str]) -> nn.Module:
    """Any sequence classifier of transformers, with a head for these classes."""
    with in_turn(context.world):
        return models.build(context.settings, labels)


def main(settings: Settings) -> int:
    run = start(settings)
    if run is None:
        return 0  # finished before
    with run:
        texts = load_data(run.context)
        context = run.resume(texts.facts)  # from its last checkpoint, if there is one
        model = build_model(context, texts.labels)
        recorder = LogCallback(context)
        trainer = ExactTrainer(
            context=context,
            model=model,
            args=context.args,
            train_dataset=texts.train,
            eval_dataset=texts.validation or texts.test,  # each epoch
            test_dataset=texts.validation and texts.test,  # once, at the end
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
