"""Runs as jobs of a SLURM cluster: generates the scripts for sbatch, as text."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.core.links import Link
from harness.core.provenance import ROOT
from harness.core.records import LOGS, SKIPPED
from harness.core.rules import why_a_gpu
from harness.launch.choices import Slurm, as_typed
from harness.launch.outcome import State
from harness.launch.places import Options, launched, place_facts, threads_variable
from harness.launch.plan import Job, script_of

# How long before the time limit the signal comes: time for ranks to record and to be requeued.
LEAD_S = 60
# sbatch options of a script that follow from its runs or other options rather than from a flag.
OF_ITS_RUNS = re.compile(
    r"--(job-name|chdir|output|open-mode|array|signal|requeue|no-requeue)(=|$)"
)


@dataclass(frozen=True)
class Site:
    """Where a job script is stored and runs."""

    name: str  # of the job; unique
    folder: str  # the folder of the sweep
    cwd: str
    scripts: str  # path prefix of the training script
    root: str  # the folder of the project
    python: str
    environment: Mapping[str, str]


def why_not(job: Job, slurm: Slurm) -> str | None:
    """Why a cluster cannot host a run; None if it can, as far as can be known here."""
    if job.link != Link():
        return f"link {job.link}: the links of a cluster cannot be slowed down"
    if slurm.gres == "none" and (reason := why_a_gpu(job.settings)):
        return reason.removeprefix("--")
    return None


def alike(jobs: Sequence[Job]) -> list[list[Job]]:
    """Groups of runs for one array: same resources, and the same behaviour when a node is lost."""
    groups: dict[tuple[int, int, int, bool], list[Job]] = {}
    for job in jobs:
        kind = (job.nodes, job.devices, job.processes, job.survives_node_loss)
        groups.setdefault(kind, []).append(job)
    return list(groups.values())


def script(
    jobs: Sequence[Job], slurm: Slurm, site: Site, timeout_s: float | None, rerun: bool
) -> str:
    """The script for sbatch: one run, or an array of runs with the same resources."""
    options = [f"#SBATCH {option}" for option in _options(jobs, slurm, site, timeout_s)]
    sections = [
        "\n".join(["#!/bin/bash", *options]),
        NOTE.format(
            note=shlex.quote(f"{site.folder}/jobs/{site.name}"),
            patience=_lead_s(timeout_s) * 2 // 3,
        ),
        _surroundings(slurm, site),
        "\n".join(_choice(jobs, site, rerun)),
        _step(jobs[0], slurm, site),
        END.format(again=slurm.requeue),
    ]
    return "\n\n".join(sections)


def _options(jobs: Sequence[Job], slurm: Slurm, site: Site, timeout_s: float | None) -> list[str]:
    job = jobs[0]
    number = "%a" if len(jobs) > 1 else "0"
    log = f"{site.folder}/{LOGS}/{site.name}_".replace("%", "%%") + f"{number}.txt"
    minutes = math.ceil(timeout_s / 60) if timeout_s is not None else None
    values = {
        "job-name": site.name,
        "chdir": site.cwd,
        "output": log,
        "open-mode": "append",
        "array": f"0-{len(jobs) - 1}" if len(jobs) > 1 else None,
        "partition": slurm.partition,
        "account": slurm.account,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gres": None if slurm.gres == "none" else f"{slurm.gres}:{job.devices}",
        "cpus-per-task": job.devices * slurm.cores,
        "time": minutes,
        "signal": f"B:USR1@{_lead_s(timeout_s)}",
    }
    named = [f"--{k}={shlex.quote(str(v))}" for k, v in values.items() if v is not None]
    return [*named, "--requeue" if slurm.requeue else "--no-requeue", *slurm.sbatch]


def _lead_s(timeout_s: float | None) -> int:
    """How long before the time limit SLURM sends the signal."""
    return LEAD_S if timeout_s is None else min(LEAD_S, math.ceil(timeout_s / 60) * 60 // 4)


# The job's note also works on clusters without accounting.
NOTE = """note={note}_${{SLURM_ARRAY_TASK_ID:-0}}.json
began=$(date +%s)
signal= reminder= ended=
tell() {{
    printf '{{"job": "%s", "began": %s, "ended": %s, "code": %s, "signal": "%s"}}\\n' \\
        "${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}" "$began" "$1" "$2" "$signal" >"$note.new" &&
        mv "$note.new" "$note"
}}
# The ranks save, record and end, or just record. When a job is cancelled, SLURM sends them TERM.
export HARNESS_PREEMPTION="${{note%.json}}.preemption"
rm -f "$HARNESS_PREEMPTION"
announce() {{
    signal=USR1
    touch "$HARNESS_PREEMPTION"
    # Unlike sleep, read is no process of its own that would outlive the reminder. 128: time is up.
    (read -rt {patience} <> <(:); [ $? -gt 128 ] && scancel --signal=TERM "$SLURM_JOB_ID") &
    reminder=$!
}}
trap announce USR1
trap 'signal=${{signal:-TERM}} ended=yes' TERM
tell null null"""


def _surroundings(slurm: Slurm, site: Site) -> str:
    setup = slurm.setup_script and SETUP.format(file=shlex.quote(slurm.setup_script))
    exports = [f"export {k}={shlex.quote(v)}" for k, v in site.environment.items()]
    paths = f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{shlex.quote(site.root)}'
    return "\n".join([*([setup] if setup else []), *exports, paths])


# Without the set-up script, the run would be measured in another environment. It may call exit.
SETUP = """without() {{
    [ -z "$set_up" ] || return 0
    printf 'error: --setup_script %s ended with exit code %s\\n' {file} "$1" >&2
    tell "$(date +%s)" 1
    exit 1
}}
set_up=
trap 'without "$?"' EXIT
. {file}
code=$?
[ "$code" -eq 0 ] || exit "$code"
set_up=yes"""


def _choice(jobs: Sequence[Job], site: Site, rerun: bool) -> list[str]:
    """Shell lines that set the arguments to the training script and its flags."""
    lines = [f"set -- {script_of(job, site.scripts)}" for job in jobs]
    own = shlex.quote(f"{site.folder}/jobs/{site.name}.sh")
    if rerun:
        kept = (shlex.quote(str(job.folder.settings.absolute())) for job in jobs)
        lines = [f"{line}; kept={file}" for line, file in zip(lines, kept, strict=True)]
    if len(jobs) > 1:
        cases = [f"{number}) {line} ;;" for number, line in enumerate(lines)]
        lines = ["case $SLURM_ARRAY_TASK_ID in", *cases, "esac"]
    if rerun:
        # A requeued job continues its own record. One older than this script is not its own.
        lines += [
            'if [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] ||',
            f'    {{ [ -e "$kept" ] && [ "$kept" -ot {own} ]; }}; then',
            """    set -- "$@" --rerun""",
            "fi",
        ]
    return lines


def _step(job: Job, slurm: Slurm, site: Site) -> str:
    """Shell lines that start torchrun on every node; torchrun starts the ranks there."""
    # Without --export, SBATCH_EXPORT=NONE would keep this script's variables from the ranks.
    srun = (
        f"srun --export=ALL --nodes={job.nodes} --ntasks-per-node=1 "
        f"--cpus-per-task={job.devices * slurm.cores} "
        f"--kill-on-bad-exit={int(not job.survives_node_loss)}"
    )
    torchrun = f"{shlex.quote(site.python)} -m harness.train.torchrun"
    if job.nodes == 1:
        meeting = "--standalone"
        where = ""
    else:
        meeting = (
            f'--nnodes={job.nodes} --rdzv_backend=c10d \\\n        --rdzv_endpoint="$first:$port"'
        )
        where = (
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
            "port=$((10000 + $(od -An -N2 -tu2 /dev/urandom) % 20000))\n"
            "# Secret: whoever knows it could write into the rendezvous.\n"
            "export PET_RDZV_ID=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')\n"
        )
    started = f'{srun} \\\n        {torchrun} {meeting} --nproc_per_node={job.processes} "$@"'
    return where + STEP.format(started=started)


# The subshell outlives a signal, which srun obeys: traps do not pass on to commands.
STEP = """step_code="${{note%.json}}.code"
rm -f "$step_code"
(
    trap : TERM USR1
    code=0
    {started} ||
        code=$?
    echo "$code" >"$step_code"
    exit "$code"
) &
step=$!"""

# A signal interrupts wait but not the step.
END = """while :; do
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
again=$(({again} > ${{SLURM_RESTART_COUNT:-0}}))
if [ "$signal" = USR1 ] && [ -z "$ended" ] && [ "$code" -ne 0 ] && [ "$again" -eq 1 ]; then
    # SLURM sends TERM to all of the job as soon as it agrees, before scontrol has the answer.
    (trap '' TERM && exec scontrol requeue "$SLURM_JOB_ID") && exit "$code"
fi
tell "$(date +%s)" "$code"
exit "$code"
"""


def flags_in(text: str) -> list[str]:
    """The options in a script that came from flags of the call that wrote it, whatever its runs."""
    setup = re.findall(r"^\. (.+)$", text, re.M)
    requeue = re.findall(r"^again=\$\(\((\d+) > ", text, re.M)
    options = [o for o in re.findall(r"^#SBATCH (.*)$", text, re.M) if not OF_ITS_RUNS.match(o)]
    return [
        *(re.sub(r"^--time=(\d+)$", _timeout, option) for option in options),
        *(f"--setup_script {file}" for file in setup),
        *(f"--requeue {times}" for times in requeue),
    ]


def _timeout(minutes: re.Match[str]) -> str:
    return f"--timeout {as_typed(60 * int(minutes[1]))}"


def job_name(sweep: str, unlike: str) -> str:
    """A name by which to find a job whose number was lost."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', sweep)}.{unlike}"


def text_of(jobs: Sequence[Job], options: Options, folder: Path, name: str) -> str:
    """The job script of these runs, which request the same resources."""
    launch = launched(folder.name, options, {}, place_facts("slurm")) | {"start": "slurm"}
    site = Site(
        name=name,
        folder=str(folder.absolute()),
        cwd=os.getcwd(),
        scripts=f"{ROOT}/",
        root=str(ROOT),
        python="python" if options.slurm.setup_script else sys.executable,
        environment={
            **threads_variable(options.slurm.cores),
            "HARNESS_LAUNCH": json.dumps(launch),
        },
    )
    rerun = options.rerun == "all"
    return script(jobs, options.slurm, site, options.timeout_s, rerun)


def dry_run(states: Sequence[State], options: Options, folder: Path) -> list[str]:
    """All scripts; as comments, runs that no cluster can host, and a summary."""
    lines = [f"# skipped: {s.job}: {s.reason}" for s in states if s.state == SKIPPED]
    jobs = [state.job for state in states if state.state != SKIPPED]
    arrays = alike(jobs)
    for number, group in enumerate(arrays, start=1):
        name = job_name(folder.name, f"dry-run-{number}")
        lines.append(text_of(group, options, folder, name))
    parts = ", ".join(f"{len(of)} of {of[0].nodes}_{of[0].processes}" for of in arrays)
    return [*lines, f"# {len(arrays)} job array(s) with {len(jobs)} run(s): {parts}"]
