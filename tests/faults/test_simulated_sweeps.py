"""The launch code on a simulated clock, with simulated processes: seeded histories of faults.

What holds, however a history goes:

1. Every run ends as finished once faults have ended and the same command was given again.
2. Its rows are those of its epochs, each once, in order, with their values.
3. After every runner each record is believed by the readers, or the run has no outcome yet.
4. What a runner says of a run, outcome and reason, is what the record says, unless somebody else
   has gone on with the run meanwhile.
5. A checkpoint that was written is where the next attempt goes on.
6. No run is trained by two at once, and no finished one again.
7. No duration is negative, or longer than all that happened, whatever the clock was set to.
8. No lock is left, and no process.
9. Where memory lacks, a run goes on with half the batch until it fits (--auto_batch).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from harness.core.attempts import ends_of, starts_of
from harness.core.records import FINISHED, RunFolder
from harness.launch.outcome import KNOWN
from harness.launch.places import Options
from harness.launch.plan import Job
from harness.read.records.recorded import recorded
from tests.support.mutants import amount
from tests.support.simulated import EPOCHS, ONE_HOUR_S, SimulatedWorld, row_of
from tests.support.sweeps import jobs_of

SWEEP = "script: vit\ngrid: {seed: [1, 2, 3]}\nsettings: {setup: 1_1, auto_batch: true}"
MOST_RUNNERS = 12
# A clock that was set back made a run's own outcome look like an older one.
REGRESSIONS: list[list[int]] = [[689, 1004, 2172, 6660], [], [], []]
PARTS = 4  # beside one another, where there are cores


def check_record(folder: RunFolder, passed_s: float) -> None:
    rows, _ = folder.read_epochs()
    assert [*rows] == [row_of(n + 1) for n in range(len(rows))]
    assert recorded(folder).problem is None, recorded(folder).line
    told = folder.read_attempts()
    for row in starts_of(told):
        for name in ("gap_s", "lost_s"):
            assert 0 <= (row[name] or 0.0) <= passed_s + 1, (name, row)  # type: ignore[literal-required]
    for end in ends_of(told):
        assert 0 <= (end["wall_s"] or 0.0) <= passed_s + 1, end
    summary = folder.read_summary()
    if summary is not None:
        assert 0 <= summary["wall_s"] <= passed_s + 1 < ONE_HOUR_S


def history(seed: int, jobs: list[Job], folder: Path, patch: pytest.MonkeyPatch) -> SimulatedWorld:
    world = SimulatedWorld(seed, jobs, folder)
    world.patch(patch)
    finished: dict[Path, int] = {}
    try:
        for _ in range(MOST_RUNNERS):
            world.log.append(f"{world.passed_s:.1f} s: a runner begins")
            # The same command is given again the next day, or with the clock set back.
            world.set_s += world.draw.choice([24, 0, -1, -24]) * ONE_HOUR_S
            states = world.work(Options(isolation="off", rerun="failed"))
            private = [p for p in folder.glob("logs/*") if b"/home/eve" in p.read_bytes()]
            assert not private, "a log is not redacted"
            for state in states:
                run = state.job.folder
                if run.settings.exists():
                    check_record(run, world.passed_s)
                if state.state in KNOWN and run.path in world.touched:
                    # Somebody else may have gone on with it since, and have lacked memory.
                    assert run.outcome() in (state.state, FINISHED, "oom", None)
                elif state.state in KNOWN:
                    summary = run.read_summary() or {}
                    assert (state.state, state.reason) == (summary["outcome"], summary["reason"])
                if run.outcome() == FINISHED:
                    before = finished.setdefault(run.path, world.begun[run.path])
                    assert world.begun[run.path] == before, "a finished run was trained again"
            if all(s.state == FINISHED for s in states):
                break
            while world.others:
                world.tick(0.1)
        assert {state.state for state in states} == {FINISHED}, [s.reason for s in states]
        for job in jobs:
            assert len(job.folder.read_epochs()[0]) == EPOCHS
            assert starts_of(job.folder.read_attempts())[-1]["per_gpu_batch"] <= world.memory
            assert not (job.folder.path.parent / ".locks").exists()
    except BaseException:
        print("\n".join([f"history {seed}", *world.log]))
        raise
    return world


@pytest.mark.parametrize("part", range(PARTS))
def test_no_history_loses_or_falsifies_a_row(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Path("/dev/shm")  # thousands of small files a second: a disk would be all that counts
    with TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        out = Path(folder, "out")
        jobs = jobs_of(Path(folder), SWEEP, out=out)
        for seed in (*range(part, amount(120, 10_000), PARTS), *REGRESSIONS[part]):
            with monkeypatch.context() as patch:
                history(seed, jobs, out / "sweeps" / "mine", patch)
            shutil.rmtree(out)


def test_rerun_all_measures_finished_runs_again_from_the_batch_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes on with half the batch is this sweep's own record, never the one to be replaced."""
    jobs = jobs_of(tmp_path, SWEEP, out=tmp_path / "out")
    world = SimulatedWorld(0, jobs, tmp_path / "out" / "sweeps" / "mine")
    world.patch(monkeypatch)
    world.plan, world.memory = [], jobs[0].settings.per_gpu_batch // 2
    for rerun in ("failed", "all"):
        world.begun.clear()
        assert {s.state for s in world.work(Options(isolation="off", rerun=rerun))} == {FINISHED}
        for job in jobs:
            assert world.begun[job.folder.path] == 2  # out of memory once, then with half
            asked, half = (row["per_gpu_batch"] for row in starts_of(job.folder.read_attempts()))
            assert (asked, half) == (2 * world.memory, world.memory)
