"""Every architecture that can be built small trains to the same numbers however it is fed."""

from __future__ import annotations

import os
from typing import Any

import pytest

from harness.core.tasks import TASKS
from tests.support import architectures, matrix

pytestmark = pytest.mark.process
# One of each kind: how it reads padding, positions and pairs, skips layers, uses parameters.
SAMPLE = {"bert": ["fnet", "gpt2", "opt", "roberta", "xlnet"], "vit": ["dinov2", "resnet", "swin"]}


def check(results: dict[str, dict[str, Any]]) -> None:
    lines = matrix.PAGE.read_text().splitlines()
    for script, of in results.items():
        for name, arms in of.items():
            expected, _ = matrix.EXCEPTIONS.get((script, name), ((), ""))
            if script == "bert" and isinstance(arms.get("padded"), dict):
                tokens = arms["padded"]["tokens"]  # otherwise nothing is padded
                assert len(tokens) > 8 and tokens[-1] >= 3 * tokens[0]
            if "failed" not in arms:
                assert matrix.wrong(arms) == expected, (name, arms)
            assert matrix.line(script, name, arms) in lines, "make models"


@pytest.mark.timeout(600)
def test_a_sample_of_architectures() -> None:
    check(matrix.measure(SAMPLE))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_architectures() -> None:
    """Every sixth and all that are exceptions, beside the sample; all of them by `make models`."""
    names = {script: architectures.names(script) for script in TASKS}
    if os.environ.get("HARNESS_MODELS") == "whole":
        results = matrix.measure(names)
        matrix.PAGE.write_text(matrix.page(results))
        check(results)
        return
    few = {s: {*of[::6], *(n for t, n in matrix.EXCEPTIONS if t == s)} for s, of in names.items()}
    check(matrix.measure({script: sorted(of - {*SAMPLE[script]}) for script, of in few.items()}))
