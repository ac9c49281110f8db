"""Jobs of a cluster as far as they go without one: scripts, flags, memory, and stand-ins."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.core.records import append_row, write_json
from harness.core.settings import UserError
from harness.launch.choices import Slurm
from harness.launch.outcome import State
from harness.launch.plan import Job
from harness.launch.screen import Screen
from harness.launch.slurm.cluster import Note, Submitted, exit_of
from harness.launch.slurm.scripts import Site, alike, job_name, script, why_not
from tests.support.slurm_cluster import TORCHRUN
from tests.support.sweeps import harness_sweep as main
from tests.support.sweeps import jobs_of, sweep_file, sweep_options

SITE = Site(
    name="mine.ab12", folder="/home/me/my project/outputs/sweeps/mine", cwd="/home/me/my project",
    scripts="", root="/home/me/my project", python="/opt/venv/bin/python",
    environment={"OMP_NUM_THREADS": "4", "HARNESS_LAUNCH": '{"sweep": "mine"}'},
)  # fmt: skip


def planned(folder: Path, text: str) -> list[Job]:
    return jobs_of(folder, text, folder / "out", tiny=True)


ONE = r"""#!/bin/bash
#SBATCH --job-name=mine.ab12
#SBATCH --chdir='/home/me/my project'
#SBATCH --output='/home/me/my project/outputs/sweeps/mine/logs/mine.ab12_0.txt'
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=8
#SBATCH --signal=B:USR1@60
#SBATCH --no-requeue

note='/home/me/my project/outputs/sweeps/mine/jobs/mine.ab12'_${SLURM_ARRAY_TASK_ID:-0}.json
began=$(date +%s)
signal= reminder= ended=
tell() {
    printf '{"job": "%s", "began": %s, "ended": %s, "code": %s, "signal": "%s"}\n' \
        "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}" "$began" "$1" "$2" "$signal" >"$note.new" &&
        mv "$note.new" "$note"
}
# The ranks save, record and end, or just record. When a job is cancelled, SLURM sends them TERM.
export HARNESS_PREEMPTION="${note%.json}.preemption"
rm -f "$HARNESS_PREEMPTION"
announce() {
    signal=USR1
    touch "$HARNESS_PREEMPTION"
    # Unlike sleep, read is no process of its own that would outlive the reminder. 128: time is up.
    (read -rt 40 <> <(:); [ $? -gt 128 ] && scancel --signal=TERM "$SLURM_JOB_ID") &
    reminder=$!
}
trap announce USR1
trap 'signal=${signal:-TERM} ended=yes' TERM
tell null null

export OMP_NUM_THREADS=4
export HARNESS_LAUNCH='{"sweep": "mine"}'
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}"'/home/me/my project'

set -- vit.py --tiny --setup 1_2 --output_dir OUT

step_code="${note%.json}.code"
rm -f "$step_code"
(
    trap : TERM USR1
    code=0
    srun --export=ALL --nodes=1 --ntasks-per-node=1 --cpus-per-task=8 --kill-on-bad-exit=1 \
        /opt/venv/bin/python -m harness.train.torchrun --standalone --nproc_per_node=2 "$@" ||
        code=$?
    echo "$code" >"$step_code"
    exit "$code"
) &
step=$!

while :; do
    wait "$step"
    code=$?
    kill -0 "$step" 2>/dev/null || break
done
# Where a signal comes as the step ends, bash loses its exit code.
[ ! -s "$step_code" ] || read -r code <"$step_code"
rm -f "$step_code"
trap '' USR1
# Otherwise it would kill the job after it was requeued.
[ -z "$reminder" ] || kill "$reminder" 2>/dev/null
again=$((0 > ${SLURM_RESTART_COUNT:-0}))
if [ "$signal" = USR1 ] && [ -z "$ended" ] && [ "$code" -ne 0 ] && [ "$again" -eq 1 ]; then
    # SLURM sends TERM to all of the job as soon as it agrees, before scontrol has the answer.
    (trap '' TERM && exec scontrol requeue "$SLURM_JOB_ID") && exit "$code"
fi
tell "$(date +%s)" "$code"
exit "$code"
"""
ARRAY = r"""#!/bin/bash
#SBATCH --job-name=mine.ab12
#SBATCH --chdir='/home/me/my project'
#SBATCH --output='/home/me/my project/outputs/sweeps/mine/logs/mine.ab12_%a.txt'
#SBATCH --open-mode=append
#SBATCH --array=0-1
#SBATCH --partition=long
#SBATCH --account=lab
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:a100:2
#SBATCH --cpus-per-task=12
#SBATCH --time=120
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH --mem=64G
#SBATCH --exclusive
"""
ARRAY_BODY = r"""
. /home/me/setup.sh
code=$?
[ "$code" -eq 0 ] || exit "$code"
set_up=yes
export OMP_NUM_THREADS=4
export HARNESS_LAUNCH='{"sweep": "mine"}'
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}"'/home/me/my project'

case $SLURM_ARRAY_TASK_ID in
0) set -- vit.py --dataset 'a b.csv' --tiny --seed 1 --setup 4_2 --output_dir OUT; kept=FILE ;;
1) set -- vit.py --dataset 'a b.csv' --tiny --seed 2 --setup 4_2 --output_dir OUT; kept=FILE ;;
esac
if [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] ||
    { [ -e "$kept" ] && [ "$kept" -ot SCRIPT ]; }; then
    set -- "$@" --rerun
fi

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((10000 + $(od -An -N2 -tu2 /dev/urandom) % 20000))
# Secret: whoever knows it could write into the rendezvous.
export PET_RDZV_ID=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
step_code="${note%.json}.code"
rm -f "$step_code"
(
    trap : TERM USR1
    code=0
    srun --export=ALL --nodes=4 --ntasks-per-node=1 --cpus-per-task=12 --kill-on-bad-exit=1 \
        /opt/venv/bin/python -m harness.train.torchrun --nnodes=4 --rdzv_backend=c10d \
        --rdzv_endpoint="$first:$port" --nproc_per_node=2 "$@" ||
        code=$?
    echo "$code" >"$step_code"
    exit "$code"
) &
step=$!
"""


def test_the_script_of_one_run(tmp_path: Path) -> None:
    jobs = planned(tmp_path, "script: vit\ngrid: {setup: [1_2]}")
    text = script(jobs, Slurm(), SITE, None, rerun=False)
    assert text.replace(str(tmp_path / "out"), "OUT") == ONE


def test_the_script_of_an_array_with_everything(tmp_path: Path) -> None:
    file = "script: vit\nsettings: {setup: 4_2, dataset: a b.csv}\nseeds: [1, 2]"
    slurm = Slurm(
        partition="long", account="lab", gres="gpu:a100", cpus_per_gpu=6, requeue=3,
        setup_script="/home/me/setup.sh", sbatch=("--mem=64G", "--exclusive"),
    )  # fmt: skip
    jobs = planned(tmp_path, file)
    text = script(jobs, slurm, SITE, 7199.0, rerun=True)
    kept = re.findall(r"kept=(\S+)", text)
    assert kept == [str(tmp_path / "out" / job.path / "settings.json") for job in jobs]
    text = text.replace(f"'{SITE.folder}/jobs/mine.ab12.sh'", "SCRIPT")
    text = re.sub(r"kept=\S+", "kept=FILE", text).replace(str(tmp_path / "out"), "OUT")
    assert text.startswith(ARRAY + "\n") and ARRAY_BODY in text
    assert "again=$((3 > ${SLURM_RESTART_COUNT:-0}))" in text


@pytest.mark.process
@pytest.mark.parametrize(
    ("restarts", "before_s", "again"),
    [("0", 60, True), ("0", None, True), ("1", 60, True), ("1", -60, False), ("1", None, False)],
)
def test_a_job_that_comes_back_measures_again_what_it_has_not_begun(
    restarts: str, before_s: float | None, again: bool, tmp_path: Path
) -> None:
    """Where a node was lost before the old record was set aside, that record was taken as new."""
    (job,) = planned(tmp_path, "script: vit")
    site = replace(SITE, folder=str(tmp_path / "the sweep"))
    text = script([job], Slurm(), site, None, rerun=True)
    file = Submitted(Path(site.folder)).script(site.name)
    file.parent.mkdir(parents=True)
    file.write_text(text)
    if before_s is not None:
        job.folder.write_settings({})  # whatever became of that run
        then = file.stat().st_mtime - before_s
        os.utime(job.folder.settings, (then, then))
    chosen = text[text.index("set -- vit.py") : text.index("step_code=")]
    done = subprocess.run(
        ["bash", "-c", chosen + '\nprintf "%s\\n" "$@"'], capture_output=True, text=True,
        env={"PATH": os.environ["PATH"], "SLURM_RESTART_COUNT": restarts}, check=True,
    )  # fmt: skip
    assert ("--rerun" in done.stdout.split()) == again and "vit.py" in done.stdout


@pytest.mark.parametrize(("timeout_s", "time_limit", "lead"), [(90.0, 2, 30), (60.0, 1, 15)])
def test_short_limits_leave_time_to_train(
    timeout_s: float, time_limit: int, lead: int, tmp_path: Path
) -> None:
    jobs = planned(tmp_path, "script: vit")
    text = script(jobs, Slurm(gres="none"), SITE, timeout_s, rerun=False)
    assert f"--time={time_limit}\n" in text and f"--signal=B:USR1@{lead}\n" in text
    assert "--gres" not in text and "--cpus-per-task=1\n" in text


def test_runs_that_want_the_same_make_one_array(tmp_path: Path) -> None:
    jobs = planned(tmp_path, "script: [vit, bert]\ngrid: {setup: [1_1, 1_2, 2_1]}\nseeds: [1, 2]")
    assert [len(group) for group in alike(jobs)] == [4, 4, 4]
    assert [job for group in alike(jobs) for job in group] != jobs
    # A lost node ends the job of one that does not survive it, and no other.
    text = "script: vit\nsettings: {setup: 2_1}\ngrid: {strategy: [ddp, hivemind]}"
    assert [len(group) for group in alike(planned(tmp_path, text))] == [1, 1]


@pytest.mark.process
@pytest.mark.parametrize(
    ("last", "code"), [("false", 1), ("set -e\nfalse\ntrue", 1), ("exit 3", 3), ("exit 0", 0)]
)
def test_a_set_up_that_fails_ends_the_job(last: str, code: int, tmp_path: Path) -> None:
    setup = tmp_path / "set up.sh"
    setup.write_text(f"{last}\n")
    (tmp_path / "jobs").mkdir()
    site = replace(SITE, folder=str(tmp_path), cwd=str(tmp_path))
    jobs = planned(tmp_path, "script: vit")

    def done() -> subprocess.CompletedProcess[str]:
        text = script(jobs, Slurm(setup_script=str(setup)), site, None, rerun=False)
        text = text.replace("srun ", f"touch {tmp_path}/began #")
        return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)

    failed = done()
    said = f"error: --setup_script {setup} ended with exit code {code}\n"
    assert failed.returncode == 1 and failed.stderr == said
    (file,) = (tmp_path / "jobs").glob("*_0.json")
    note = json.loads(file.read_text())
    assert note["code"] == 1 and note["ended"] and not (tmp_path / "began").exists()
    # With a trap of its own.
    setup.write_text(f"trap 'touch {tmp_path}/cleaned' EXIT\n")
    done()
    assert (tmp_path / "began").exists() and (tmp_path / "cleaned").exists()


def test_what_no_cluster_can_host(tmp_path: Path) -> None:
    (far,) = planned(tmp_path, "script: vit\nsettings: {setup: 2_1, link: 20ms}")
    assert why_not(far, Slurm()) == "link 20ms: the links of a cluster cannot be slowed down"
    (half,) = planned(tmp_path, "script: vit\nsettings: {precision: fp16}")
    assert why_not(half, Slurm()) is None
    assert "needs a GPU" in str(why_not(half, Slurm(gres="none")))


def test_dry_run_prints_the_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = sweep_file(tmp_path, "script: vit\ngrid: {setup: [1_1, 2_1], link: [none]}")
    flags = ["--launcher", "slurm", "--sbatch", "mem=2G", "--sbatch=--comment=it's two words"]
    assert main([str(file), "--tiny", "--dry_run", *flags]) == 0
    printed = capsys.readouterr().out
    assert printed.count("#!/bin/bash") == 2 and printed.count("#SBATCH --mem=2G") == 2
    assert "#SBATCH --comment='it'\"'\"'s two words'" in printed
    assert printed.endswith("\n# 2 job array(s) with 2 run(s): 1 of 1_1, 1 of 2_1\n")
    assert not (Path("outputs") / "sweeps" / "mine-tiny").exists()


S = ["--launcher", "slurm"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--partition", "p"], "--partition needs --launcher slurm"),
        (
            [*S, "--partition", "p\n#SBATCH --wrap=x"],
            "--partition 'p\\n#SBATCH --wrap=x': expected a name",
        ),
        ([*S, "--account", "a\n"], "--account 'a\\n': expected a name"),
        ([*S, "--gres", "gpu\n"], "expected a name such as gpu"),
        ([*S, "--sbatch", "exclusive\n"], "expected an option of sbatch"),
        (["--detach"], "--detach needs --launcher slurm"),
        (["--requeue", "2", "--launcher", "local"], "--requeue needs --launcher slurm"),
        ([*S, "--pack"], "--pack has no meaning with --launcher slurm: jobs run side by side"),
        ([*S, "--cold"], "--cold has no meaning with --launcher slurm"),
        ([*S, "--isolation", "warn"], "--isolation has no meaning with --launcher slurm"),
        ([*S, "--gres", "gpu:4"], "--gres gpu:4: expected a name such as gpu or gpu:a100"),
        ([*S, "--cpus_per_gpu", "0"], "--cpus_per_gpu 0: must be at least 1"),
        ([*S, "--requeue", "-1"], "--requeue"),
        ([*S, "--requeue", "often"], "--requeue often: expected a whole number"),
        (
            [*S, "--timeout", "1:30:00"],
            "--timeout 1:30:00: expected a time such as 90 (seconds), 30m or 2h",
        ),
        ([*S, "--setup_script", "no.sh"], "--setup_script no.sh: there is no such file"),
        ([*S, "--sbatch", "time=3"], "--sbatch time=3: use --timeout"),
        ([*S, "--sbatch", "array=0-9"], "--sbatch array=0-9: the sweep sets it"),
        ([*S, "--sbatch", "clusters=b"], "--sbatch clusters=b: use a login node of that cluster"),
        ([*S, "--sbatch", "mem="], "--sbatch mem=: expected an option of sbatch"),
        ([*S, "--sbatch", "p gpu"], "--sbatch p gpu: expected an option of sbatch"),
        ([*S, "--sbatch", "mem=2G\nrm -rf /"], "expected an option of sbatch"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        sweep_options(["file.yaml", *flags])
    assert message in str(error.value)


def test_valid_slurm_flags_are_parsed(tmp_path: Path) -> None:
    setup = tmp_path / "setup.sh"
    setup.touch()
    flags = [*S, "--gres", "none", "--cpus-per-gpu", "2", "--setup-script", str(setup)]
    options = sweep_options(["f", *flags])
    assert options.slurm == Slurm(gres="none", cpus_per_gpu=2, setup_script=str(setup))
    assert (Slurm().cores, Slurm(gres="none").cores, options.slurm.cores) == (4, 1, 2)
    assert sweep_options(["f"]).isolation == "warn"


def test_flags_of_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "slurm.flags"
    monkeypatch.setenv("HARNESS_SLURM", str(file))
    with pytest.raises(UserError, match=r"HARNESS_SLURM=.*slurm.flags: there is no such file"):
        sweep_options(["f", *S])
    file.write_text("# of all users\n--partition gpu --account 'p 1'\n--sbatch mem=64G\n")
    options = sweep_options(["f", *S, "--account", "mine", "--sbatch", "exclusive"])
    expected = Slurm(partition="gpu", account="mine", sbatch=("--mem=64G", "--exclusive"))
    assert options.slurm == expected
    assert sweep_options(["f"]).slurm == Slurm()  # of another launcher it says nothing
    file.write_text("--requeue 5")
    assert sweep_options(["f", *S]).slurm.requeue == 5
    assert sweep_options(["f", *S, "--requeue", "0"]).slurm.requeue == 0
    for text, message in (
        ("--partitoin gpu", "unrecognized arguments: --partitoin gpu"),
        ("--cpus_per_gpu 0", "must be at least 1"),
        ("--account 'p", "No closing quotation"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=f"slurm.flags: .*{message}"):
            sweep_options(["f", *S])
    monkeypatch.delenv("HARNESS_SLURM")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sweep_options(["f", *S]).slurm == Slurm()
    own = tmp_path / ".config" / "harness" / "slurm.flags"
    own.parent.mkdir(parents=True)
    own.write_text("--gres gpu:a100")
    assert sweep_options(["f", *S]).slurm == Slurm(gres="gpu:a100")


PREEMPTED = "the job had to make room for another (PREEMPTED)"
NO_WORD = "job 7 ended without a trace: cancelled, or lost with its node"


@pytest.mark.parametrize(
    ("word", "signal", "code", "verdict"),
    [
        ("TIMEOUT", "", None, ("timeout", "the job reached its time limit")),
        ("FAILED", "USR1", 1, ("timeout", "the job reached its time limit")),
        ("COMPLETED", "USR1", 0, None),  # it was done before it was to be stopped
        ("OUT_OF_MEMORY", "", 1, ("oom", "the job took more memory than it was given")),
        ("CANCELLED", "TERM", 1, ("interrupted", "the job was cancelled")),
        (None, "TERM", 1, ("interrupted", "the job was cancelled")),
        ("NODE_FAIL", "", None, ("interrupted", "a node of the job failed (NODE_FAIL)")),
        ("NODE_FAIL", "", 0, ("interrupted", "a node of the job failed (NODE_FAIL)")),
        ("PREEMPTED", "TERM", 1, ("interrupted", PREEMPTED)),
        ("FAILED", "", 1, None),
        (None, "", 1, None),
        (None, "", None, ("interrupted", NO_WORD)),
    ],
)  # fmt: skip
def test_what_a_state_of_slurm_means(
    word: str | None, signal: str, code: int | None, verdict: Any, tmp_path: Path
) -> None:
    ended = None if code is None else 130.0
    run_exit = exit_of(
        "job 7", word, Note("7", 100.0, ended, code, signal), tmp_path / "log", tmp_path
    )
    assert (run_exit.code == 0) == (word == "COMPLETED")
    assert run_exit.verdict == verdict and run_exit.wall_s == (0.0 if ended is None else 30.0)


def test_ranks_that_failed_are_found_in_what_torchrun_prints(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    now = time.strftime("%Y-%m-%d_%H:%M:%S", time.gmtime())
    log.write_text(TORCHRUN.format(now="2020-01-01_00:00:00") + TORCHRUN.format(now=now))
    note = Note("7", time.time() - 60, None, None, "")
    (failure,) = exit_of("job 7", "FAILED", note, log, tmp_path).failures
    assert (failure["rank"], failure["exit_code"]) == (1, -9)
    assert 59 <= exit_of("job 7", "NODE_FAIL", note, log, tmp_path).wall_s <= 61


def test_memory_of_what_was_submitted(tmp_path: Path) -> None:
    submitted = Submitted(tmp_path)
    assert submitted.open() == {}
    submitted.intend("one", ["a", "b"], "a sweep")
    assert submitted.open()["b"].id is None
    submitted.confirm("one", "12")
    first, second = submitted.open().values()
    assert (first.id, second.id) == ("12_0", "12_1")
    assert not submitted.settled(first)
    submitted.settle(first, "finished")
    assert submitted.settled(first) and list(submitted.open()) == ["b"]
    submitted.intend("two", ["a"], "a sweep")
    submitted.confirm("two", "13")
    assert submitted.open()["a"].id == "13" and submitted.settled(first)
    submitted.withdraw("two")
    assert list(submitted.open()) == ["b"]
    assert job_name("my sweep,1", "ab") == "my-sweep-1.ab"


STRANGE: list[dict[str, Any]] = [
    {"event": "submitted"},
    {"event": "submitting", "name": "two"},
    {"event": "submitting", "name": "two", "runs": 3, "unix": 1},
]


@pytest.mark.parametrize("row", STRANGE)
def test_a_line_that_no_sweep_wrote_is_named(row: dict[str, Any], tmp_path: Path) -> None:
    submitted = Submitted(tmp_path)
    submitted.intend("one", ["a"], "a sweep")
    append_row(submitted.file, row)
    with pytest.raises(UserError, match=r"jobs\.jsonl: not a line of a sweep: .* remove it"):
        submitted.open()


def test_a_damaged_note_is_none(tmp_path: Path) -> None:
    submitted = Submitted(tmp_path)
    submitted.intend("one", ["a"], "a sweep")
    (entry,) = submitted.open().values()
    write_json(submitted.folder / "one_0.json", {"job": "12", "finished": True})
    assert submitted.note(entry) is None


def test_without_sbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    file = sweep_file(tmp_path, "script: vit")
    out = str(tmp_path / "out")
    assert main([str(file), "--tiny", "--output_dir", out, "--launcher", "slurm"]) == 2
    assert "there is no sbatch here" in capsys.readouterr().err


def test_no_time_is_foretold_where_runs_are_side_by_side(tmp_path: Path) -> None:
    states = [State(job) for job in planned(tmp_path, "script: vit\nseeds: [1, 2]")]
    states[0].took_s = 10.0
    assert "left" in Screen("title", states)._footer()
    assert "left" not in Screen("title", states, in_turn=False)._footer()
