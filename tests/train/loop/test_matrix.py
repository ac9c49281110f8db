"""Every architecture that can be built small trains to the same numbers however it is fed."""

from __future__ import annotations

from typing import Any

import pytest

from harness.core.tasks import TASKS
from tests.support import architectures, matrix

pytestmark = pytest.mark.process
# One of each kind: how it reads padding, positions and pairs, skips layers, uses parameters.
SAMPLE = {"bert": ["gpt2", "opt", "roberta", "xlnet"], "vit": ["dinov2", "resnet", "swin"]}


def check(results: dict[str, dict[str, Any]]) -> None:
    lines = matrix.PAGE.read_text().splitlines()
    for script, of in results.items():
        for name, arms in of.items():
            expected, _ = matrix.EXCEPTIONS.get((script, name), ((), ""))
            if "failed" not in arms:
                assert matrix.wrong(arms) == expected, (name, arms)
            assert matrix.line(script, name, arms) in lines, "python -m tests.support.matrix"


@pytest.mark.timeout(600)
def test_a_sample_of_architectures() -> None:
    check(matrix.measure(SAMPLE))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_architecture() -> None:
    every = {script: architectures.names(script) for script in TASKS}
    results = matrix.measure(every)
    check(results)
    assert matrix.PAGE.read_text() == matrix.page(results)
