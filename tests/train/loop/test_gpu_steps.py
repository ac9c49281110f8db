"""On a GPU no step of ours makes the host wait for the device."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tests.support.ranks import ranks
from tests.support.toys import Net, Points, ours

pytestmark = pytest.mark.process

# These wait by themselves here and there; what is ours is to add nothing to it.
THEIRS = re.compile(r"/site-packages/(transformers|accelerate)/")


class Watched(TrainerCallback):
    """From the third update on, from fetched batches to the end of the step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= 2:
            torch.cuda.set_sync_debug_mode("warn")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


class Quiet(Net):
    """Without the diary, which waits for every loss."""

    def forward(self, x: Any, labels: Any, index: Any) -> Any:
        logits = self.head(self.dropout(torch.relu(self.first(self.norm(x)))))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def waited(folder: str, *more: str) -> list[str]:
    data = Points(4 * 80)  # more passes than the sums of an epoch keep
    net = Quiet(dropout=0.1, batchnorm=True)
    trainer, run = ours(folder, net, data, data, "--log_every=1000", *more, callbacks=[Watched()])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run.train(trainer)
    waits = [w for w in seen if "called a synchronizing" in str(w.message)]
    return [f"{w.filename}:{w.lineno}" for w in waits if not THEIRS.search(w.filename)]


@pytest.mark.gpu
@pytest.mark.parametrize("flag", ["--grad_acc=2", "--precision=bf16"])
def test_no_step_waits_for_the_gpu(tmp_path: Path, flag: str) -> None:
    assert ranks(1, waited, str(tmp_path), flag) == [[]]
