"""What an exchange takes beside its link, as runs on one machine tell it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.read.predict.facts import Overrides
from harness.read.predict.fitting import fit_records
from tests.support.paired import Verb, planted_s, timed

ASKED = ("--setup=2_1", "--link=20ms/200mbit", "--exchange=backend", "--batch=16")


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """No process slows another, and one of two waits 2 ms for an exchange without a link."""
    for batch in (8, 16, 32):
        timed(tmp_path, batch)
        step_s = planted_s(batch) + 0.002
        timed(tmp_path, batch, 1, 2, step_s=step_s, comm_exposed_share=0.002 / step_s)
    return tmp_path


def hosts(records: Path) -> dict[str, float]:
    return dict(fit_records(str(records), Overrides()).model.hosts)


def test_it_is_told_by_compression_and_by_quiet_runs(records: Path) -> None:
    assert hosts(records) == {}
    timed(records, 16, 1, 2, "--compress", "bf16", step_s=planted_s(16) + 0.004)
    timed(records, 16, 1, 2, "--compress", "int8", step_s=planted_s(16) - 0.001, seed=2)
    timed(records, 16, 1, 4, "--compress", "powersgd", step_s=planted_s(16) + 0.012)
    busy = timed(records, 32, 1, 2, "--compress", "bf16", step_s=9.0) / "environment.json"
    disturbed = {"launch": {"cpu_busy_share": 0.5}}
    busy.write_text(json.dumps(json.loads(busy.read_text()) | disturbed))
    # A ring of four sends 1.5 times what one of two sends.
    expected = {"bf16": 0.004, "int8": 0.0, "powersgd": 0.012 / 1.5}
    assert hosts(records) == pytest.approx(expected, abs=1e-6)


def test_a_prediction_says_where_it_is_not_known(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted = Verb("predict", capsys)
    asked = (records, *ASKED, "--compress=int8")
    unknown = "note: what compressing by int8 takes is in no record, and counts as nothing: measure"
    assert unknown in predicted.in_one_line(*asked)
    before_s = json.loads(predicted(*asked, "--json"))["step_s"]
    timed(records, 16, 1, 2, "--compress", "int8", step_s=planted_s(16) + 0.005)
    assert unknown not in predicted.in_one_line(*asked)
    after_s = json.loads(predicted(*asked, "--json"))["step_s"]
    assert after_s - before_s == pytest.approx(0.005 - 0.002, abs=1e-6)
    assert unknown not in predicted.in_one_line(records, *ASKED)
