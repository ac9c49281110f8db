"""A terminal that goes away ends a run that trains like any other signal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.broken_runs import SHORT, attempts_of, broken_off, only_run
from tests.support.ranks import script


@pytest.mark.process
def test_a_hangup_is_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    argv = [*SHORT, "--save_steps", "3", "--o", str(tmp_path)]
    done = broken_off(1, argv, 5, "hup", "vit")
    assert done.code == 129 and done.err.count("\n") == 1, done.err
    assert done.err.endswith("; the same command resumes it\n")
    folder = only_run(tmp_path)
    assert (folder.read_summary() or {})["outcome"] == "interrupted"
    assert attempts_of(folder)[1][0]["reason"] == "SIGHUP"
    done = script("vit", *argv)
    assert done.code == 0 and "resumes from update 3" in done.out, done.err
