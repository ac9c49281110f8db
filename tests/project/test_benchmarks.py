"""The benchmarks run, and every command of benchmarks/gpu.sh is one that parses."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import psutil
import pytest

from harness.core.command_line import parse
from harness.core.records import find_runs
from harness.read.records.selection import read_selected
from tests.support.benchmarked import benchmark, cells, run_benchmark, run_warm
from tests.support.ranks import ran

GPU_SH = ["bash", "benchmarks/gpu.sh"]
# What torchrun sets for one process on one node.
LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
TWO_NODES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.process
def test_overhead_compares_equal_work(tmp_path: Path) -> None:
    done = benchmark("overhead", "--quick", "--out", str(tmp_path / "found.json"))
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["threads"] == 1 and record["start_up"] == {}
    assert record["environment"]["machine"] and record["environment"]["versions"]["torch"]
    (pair,) = record["cases"]["vit-nano"]
    assert set(pair) == {"ours", "bare", "stock", "loop"}
    # The same samples in the same order from the same weights: this model has no dropout.
    losses = [arm["eval_loss"] for arm in pair.values()]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    for arm in pair.values():
        assert arm["steps"] == 2 * 20 - 5 - 1  # warm-up, and the first of the second epoch
        assert arm["step_thread_s"] > 0 and 0 < arm["step_s"] < arm["all_steps_s"] < arm["train_s"]
    assert len(pair["ours"]["writing_s"]) == 2 and pair["bare"]["writing_s"] == []
    table = (tmp_path / "found.md").read_text()
    assert table.strip() == done.out.strip()
    rows = [line for line in table.splitlines() if line.startswith("| vit-nano |")]
    assert [line.split(" | ")[1] for line in rows[:3]] == ["bare", "stock", "loop"]
    assert len(rows) == 4  # the last one is of row writing


@pytest.mark.process
def test_update_profile_says_where_the_time_goes() -> None:
    done = benchmark("update_profile", "vit", "--rows=3", "--train_size=512", "--per_gpu_batch=8")
    line = next(t for t in done.out.splitlines() if t.startswith("an update: "))
    whole, *stages = [float(number) for number in re.findall(r"\d+\.\d\d", line)]
    named = dict(zip(re.findall(r"(\w+) \d+\.\d\d", line), stages, strict=True))
    assert 0 < named["compute_loss"] + named["backward"] <= named["training_step"] < whole
    assert cells(done.out, "self_cpu_time_total") == [
        "self_cpu_time_total",
        "share",
        "calls an update",
    ]
    assert len([t for t in done.out.splitlines() if "% |" in t]) == 3
    few = ran(1, run_warm, "update_profile", ["vit", "--per_gpu_batch=64"], "")
    assert few.code == 2 and "error: an epoch has 22 updates, and 26 are looked at" in few.err


@pytest.mark.process
def test_telemetry_is_compared_in_turns(tmp_path: Path) -> None:
    done = benchmark("overhead", "--quick", "--telemetry=3", "--out", str(tmp_path / "found.json"))
    record = json.loads((tmp_path / "found.json").read_text())
    found = record["telemetry"]["vit-nano"]
    assert (len(found["watched_s"]), len(found["unwatched_s"])) == (3, 4)
    assert min(found["watched_s"] + found["unwatched_s"]) > 0
    assert 0 <= found["sampler_core_share"] < 1
    assert cells(done.out, "vit-nano")[1] == "3"


def test_a_turn_is_compared_with_its_neighbours() -> None:
    from benchmarks.telemetry_cost import paired, table

    # A machine that becomes slower by the same amount each turn: there is no difference.
    assert paired([11.0, 13.0, 15.0], [10.0, 12.0, 14.0]) == [1.0, 1.0]
    assert paired([2.2, 2.0], [2.0, 2.0, 2.0]) == pytest.approx([1.1, 1.0])
    case = {"watched_s": [1.0, 1.1, 0.9, 1.0], "unwatched_s": [1.0] * 5, "sampler_core_share": 0.01}
    once = {**case, "watched_s": [1.5], "unwatched_s": [1.0, 2.0]}
    half = 3.1824 * 0.02**0.5 / 3**0.5 / 2  # Student's t of three degrees of freedom
    twice = {**case, "watched_s": [1.0, 2.0], "unwatched_s": [1.0] * 3}
    several, one, two = table({"a": case, "b": once, "c": twice}, threads=1).splitlines()[-3:]
    assert "| 1.5000 (-4.8531 to 7.8531) | 1.000 to 2.000 |" in two  # 12.7062 / 2 to either side
    assert f"| 1.0000 ({1 - half:.4f} to {1 + half:.4f}) | 0.900 to 1.100 |" in several
    assert "| 1.0000 | 1.000 to 1.000 |" in one


def test_one_value_has_no_range() -> None:
    from benchmarks.results import spread

    assert (spread([1.0]), spread([3.0, 1.0, 2.0])) == ("1.00", "2.00 (1.00 to 3.00)")


def test_start_up_is_timed_to_the_end_of_the_first_step() -> None:
    from benchmarks.start_up import FIRST_STEP, table

    compile(FIRST_STEP.format(script="vit"), "first_step", "exec")
    text = table({"vit": {"empty": 3.25, "filled": 1.5}})
    assert cells(text, "vit.py") == ["vit.py", "3.25", "1.50"]


@pytest.mark.process
def test_loading_reads_what_it_made() -> None:
    done = benchmark("loading", "--quick")
    for function, rows in (("load", "100"), ("load_runs", "20")):
        row = cells(done.out, function)
        assert row[1] == rows and 0 < float(row[3]) <= float(row[4])


@pytest.mark.process
@pytest.mark.slow
def test_padding_compares_layouts_of_the_same_texts() -> None:
    done = benchmark("padding", "--quick")
    packed, *others = (cells(done.out, arm) for arm in ("packed", "parts", "batch", "pad500"))
    assert packed[3] == "1.00"
    # Between 12 and 500 columns a text there is no doubt which is faster.
    assert float(others[-1][3]) > 1.5
    assert all(float(row[2]) > 0 for row in (packed, *others))


@pytest.mark.process
def test_report_is_timed_and_weighed() -> None:
    done = benchmark("report", "--quick")
    figures, *numbers = map(float, cells(done.out, "4"))
    best, worst, _, size, target = numbers
    assert figures == 4 and 0 < best <= worst and 0.05 < size < target


@pytest.mark.process
@pytest.mark.slow
def test_sweep_speed_measures_the_same_runs_twice(tmp_path: Path) -> None:
    argv = ["--runs=1", "--processes=1", "--pairs=1", f"--out={tmp_path / 'found.json'}"]
    done = benchmark("sweep_speed", *argv, without="prepare")  # no time is compared here
    (pair,) = json.loads((tmp_path / "found.json").read_text())["pairs"]
    assert pair["equal"] and pair["sweep_s"] > 0 and pair["loop_s"] > 0
    assert len(pair["sweep_samples_per_s"]) == len(pair["loop_samples_per_s"]) == 1
    assert "equal in every digit" in done.out
    assert (tmp_path / "found.md").read_text().strip() == done.out.strip()


@pytest.mark.process
@pytest.mark.slow
def test_long_sweep_looks_at_what_stays(tmp_path: Path) -> None:
    done = benchmark("long_sweep", "--runs=3", f"--out={tmp_path / 'found.json'}")
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["finished"] == 3 and len(record["starts_unix"]) == 3
    assert "3 of 3 runs finished" in done.out
    assert all(float(cell) > 0 for cell in cells(done.out, "their descriptors")[1:])
    assert (tmp_path / "found.md").read_text().strip() == done.out.strip()


@pytest.mark.process
def test_long_sweep_does_not_look_at_a_process_that_has_ended() -> None:
    from benchmarks.long_sweep import look_at

    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # nobody has asked how
    assert look_at(psutil.Process(child.pid)) is None
    child.wait()
    assert (look := look_at(psutil.Process())) is not None and look.descriptors > 0


@pytest.mark.parametrize(("without", "row"), [
    ("link", "the link, on all nodes"), ("delay", "all links of its delay"),
])  # fmt: skip
def test_the_page_says_what_regret_prints(
    without: str, row: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_benchmark("regret", ["--without", without]) == 0
    said = capsys.readouterr().out.splitlines()
    page = (root / "docs" / "prediction.md").read_text().replace(" %", "%")
    _, near, trainings, off, held = cells(page, row)
    half, most, worst = off.split(", ")
    assert said[-1] == (
        f"{near} choices within 10 % of the best; wall times of {trainings} trainings off by "
        f"{half} in the median, {most} in 9 of 10, {worst} at most; {held} intervals hold"
    )
    groups, off, held, known = re.findall(
        r"several nodes, (\d+) groups, .*? says: (off by .*? at most); (\d+) of the (\d+) int",
        " ".join(page.split()),
    )[0]
    off = off.replace("nine of ten", "9 of 10")
    assert said[0].strip() == f"steps of {groups} groups {off}; {held} of {known} intervals hold"


def test_the_page_has_the_table_of_direct_sends(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_benchmark("direct_sends", []) == 0
    said = capsys.readouterr().out
    assert len(said.splitlines()) == 2 + 38
    assert said in (root / "docs" / "prediction.md").read_text()


def test_the_table_of_direct_sends_takes_no_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_benchmark("direct_sends", ["--help"]) == 2
    assert capsys.readouterr().err == "usage: python -m benchmarks.direct_sends\n"


def gpu_sh(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*GPU_SH, *argv],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHON": "a_python"} | env,
        capture_output=True,
        text=True,
    )


@pytest.mark.process
def test_every_command_of_gpu_sh_parses(tmp_path: Path) -> None:
    out = tmp_path / "a folder"
    done = gpu_sh("--dry_run", str(out))
    assert done.returncode == 0, done.stderr
    assert not out.exists()
    seen = set()
    others = []
    for line in done.stdout.splitlines():
        words = shlex.split(line)
        assert words[0] == "a_python"
        named = [i for i, word in enumerate(words) if word in ("bert.py", "vit.py")]
        nodes = words[1:4] == ["-m", "harness", "nodes"]
        if not named:
            others.append(words[1:3])
            continue
        launched = words[1:3] == ["-m", "torch.distributed.run"]
        two = nodes or words[1:3] == ["-m", "benchmarks.two_ranks"]
        settings = parse(
            words[named[0]].removesuffix(".py"),
            words[named[0] + 1 :],
            environ=LAUNCHED if launched else TWO_NODES if two else {},
        )
        # What runs beside others is no measurement.
        folder = Path(settings.output_dir).relative_to(f"{out}.work").name
        measured = folder == "records"
        assert folder in ("records", "checks") and not (measured and (launched or two))
        assert str(settings.dataset).startswith("embedded:")  # no network
        assert dict(settings.trainer)["max_steps"] <= 50
        seen |= {settings.model, settings.precision, settings.strategy, settings.batchnorm}
        seen |= {name for name in ("fsdp_offload",) if getattr(settings, name)}
        seen |= set(dict(settings.trainer))
    harness = ["-m", "harness"]
    overhead = ["-m", "benchmarks.overhead"]
    assert others == [
        harness, ["-m", "pytest"], ["-m", "benchmarks.roofline"], harness, harness,
        overhead, overhead, ["-m", "benchmarks.speed"], harness,
    ]  # fmt: skip
    assert seen >= {
        "fp32",
        "tf32",
        "bf16",
        "fp16",
        "single",
        "dp",
        "ddp",
        "fsdp",
        "fsdp_offload",
        "diloco",
    }
    assert seen >= {"bert-base", "distilbert-base", "vit-base-patch16", "vit-base-patch32"}
    assert seen >= {"resnet-18-cifar", "sync", "torch_compile"}
    (speed,) = gpu_sh("--dry_run", "--only", "speed", str(out)).stdout.splitlines()
    words = shlex.split(speed)
    assert words[1:4] == ["-m", "benchmarks.speed", "--gpu"]
    assert 460 <= int(words[words.index("--limit_s") + 1]) <= 470
    two = gpu_sh("--dry_run", "--only", "formats,overhead", str(out)).stdout.splitlines()
    assert [shlex.split(line)[-1] for line in two] == [
        "fp32", "tf32", "bf16", "fp16", f"{out}.work/overhead.json", f"{out}.work/telemetry.json",
        f"{out}.work/records",
    ]  # fmt: skip


def test_the_page_has_what_was_measured_on_a_gpu(root: Path) -> None:
    shown = []
    for run in read_selected(str(root / "records/gpu/h200.jsonl.gz"), None).runs:
        (row,) = run.epochs
        shown.append([
            run.settings["model"], run.settings["precision"], f"{row['train_samples_per_s']:,.0f}",
            f"{row['step_time_median_s'] * 1e3:.1f}",
            f"{row['gpu']['utilisation_percent']['mean']:.0f} %", f"{100 * row['mfu']:.0f} %",
        ])  # fmt: skip
        assert run.state == "finished" and row["others_cpu_share"] < 0.01
    part = (root / "docs" / "gpu.md").read_text()
    found = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    assert sorted(found[1:6]) == sorted(shown)
    two = {}
    for folder in find_runs(root / "records/gpu/h200_checks.jsonl.gz"):
        settings = folder.read_settings()
        if settings["model"] == "vit-base-patch32" and settings["precision"] == "fp32":
            two[settings["strategy"]] = folder.read_epochs()[0][0]["train_loss"]
    assert set(two) == {"ddp", "fsdp"} and two["ddp"] == two["fsdp"]


@pytest.mark.process
def test_gpu_sh_refuses_a_wrong_call_and_a_machine_without_gpu(tmp_path: Path) -> None:
    for wrong in ([], ["--dryrun", "x"], ["one", "two"], ["--only"], ["--only", "all", "x"],
                  ["--only", "checks speed", "x"]):  # fmt: skip
        done = gpu_sh(*wrong)
        assert done.returncode == 2 and done.stderr.startswith("usage: ")
    # Stands for a Python whose torch sees no GPU.
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho False\n")
    python.chmod(0o755)
    done = gpu_sh(str(tmp_path / "out"), PYTHON=str(python))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "no GPU" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.process
def test_gpu_sh_goes_on_after_a_failure_and_counts_it(tmp_path: Path) -> None:
    """With a Python that answers, but fails for one model as torchrun does, and for one sweep."""
    python, out = tmp_path / "a python", tmp_path / "o u t"
    torchrun = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: footer"
    python.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        "*is_available*) echo True ;;\n"
        "*--batchnorm*) echo 'failed: RuntimeError: out of order; the record is in x' >&2\n"
        f"  echo '{torchrun}' >&2; seq 9 >&2; exit 3 ;;\n"
        "*'harness sweep'*) echo no reason in it; echo W1123 10:53 closing; exit 4 ;;\n"
        "*'harness link'*) exec sleep 60 ;;\n"
        "*'harness table'*) echo the table ;;\nesac\n"
    )
    python.chmod(0o755)
    # Limits of a minute are 5 s then. Eight at a time lose no count and no line of a failure.
    done = gpu_sh(str(out), PYTHON=str(python), LIMIT_S="42", JOBS="8")
    assert done.returncode == 1, done.stderr
    assert (out / "table.txt").read_text() == "the table\n"
    failures = (out / "failures.txt").read_text()
    assert failures.count(": 3  ") == 1 and failures.count("RuntimeError: out of order") == 1
    assert "sweep: 4  " in failures and "    no reason in it" in failures
    assert not any(word in failures for word in ("footer", "    9", "closing"))
    assert "link: 124  " in failures and "    it did not end within 5 s\n" in failures
    assert "    it wrote nothing" in failures
    assert done.stdout.splitlines()[-1].startswith("3 of 27 failed")
    assert sorted(path.name for path in out.iterdir()) == [
        "failures.txt", "gpu.tar.gz", "table.txt",
    ]  # fmt: skip
    with tarfile.open(out / "gpu.tar.gz") as archive:
        assert "logs/overhead.txt" in archive.getnames()


@pytest.mark.process
def test_gpu_sh_names_what_it_had_no_time_for_and_splits_a_large_archive(tmp_path: Path) -> None:
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text('#!/bin/sh\ncase "$*" in *is_available*) echo True ;; esac\n')
    python.chmod(0o755)
    logs = tmp_path / "out.work" / "logs"
    logs.mkdir(parents=True)
    (logs / "large.bin").write_bytes(os.urandom(17_000_000))
    done = gpu_sh("--quick", str(out), PYTHON=str(python), LIMIT_S="0")
    failures = (out / "failures.txt").read_text()
    assert done.returncode == 1 and failures.count(": skipped  ") == 26
    assert {path.name for path in out.iterdir()} == {
        "failures.txt", "gpu.tar.gz.0", "gpu.tar.gz.1", "table.txt",
    }  # fmt: skip
    assert max(path.stat().st_size for path in out.iterdir()) < 2**24


@pytest.mark.process
def test_wheels_for_another_machine_have_the_versions_of_this_one(tmp_path: Path) -> None:
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {shlex.quote(sys.executable)} "$@"\n'
        f'echo "$@" >{shlex.quote(str(asked))}; touch {shlex.quote(str(tmp_path))}/w/a.whl\n'
    )
    python.chmod(0o755)
    command = ["bash", "benchmarks/gpu_wheels.sh"]
    env = os.environ | {"PYTHON": str(python), "PYTHON_VERSION": "3.12"}

    def wheels(*argv: str) -> subprocess.CompletedProcess[str]:
        root = Path(__file__).parents[2]
        return subprocess.run([*command, *argv], cwd=root, env=env, capture_output=True, text=True)

    assert wheels().returncode == 2
    assert wheels(str(tmp_path / "w"), "no-such-package").returncode == 1 and not asked.exists()
    done = wheels(str(tmp_path / "w"))
    assert done.returncode == 0, done.stderr
    words = asked.read_text()
    assert "--no-deps" in words and "--python-version 3.12" in words and " torch==" not in words
    for line in (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines():
        if line.startswith(("transformers", "datasets", "evaluate")):
            assert line.split()[0] in words


@pytest.mark.process
@pytest.mark.root
@pytest.mark.slow
def test_links_are_close_to_what_was_asked_for(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.links", "--quick"]
    subprocess.run([*command, "--out", str(tmp_path / "found.json")], check=True)
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["congestion_control"] and record["cores"] == os.cpu_count()
    rows = {(row["what"], row["link"]): row for row in record["rows"]}
    (fast,) = rows["TCP", "100mbit"]["found"]
    assert 50 < fast < 100 and rows["TCP", "100mbit"]["share"] > 0
    assert 2 <= rows["round trip", "1ms"]["found"][0] < 20
    assert rows["loss", "loss1%"]["found"][0] == pytest.approx(1, abs=1)
    assert (tmp_path / "found.md").read_text().count("\n") == 4 + len(rows)


@pytest.mark.process
@pytest.mark.root
@pytest.mark.slow
def test_overlap_compares_the_same_updates(tmp_path: Path) -> None:
    few = ["--rounds=1", "--epochs=1", "--link=1ms", "--out", str(tmp_path / "found.json")]
    benchmark("overlap", *few)
    seconds = json.loads((tmp_path / "found.json").read_text())["seconds"]
    assert len(seconds) == 7 and all(len(found) == 1 and found[0] > 0 for found in seconds.values())
    assert cells((tmp_path / "found.md").read_text(), "it waits")[2] == "1.00"


@pytest.mark.process
def test_unequal_compares_equal_and_measured_shares(tmp_path: Path) -> None:
    few = ["--rounds=1", "--flags=--tiny --epochs 1", "--out", str(tmp_path / "found.json")]
    benchmark("unequal", *few)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["equal shares"][0] > 0 < found["--balance measured"][0]
    (shares,) = found["shares"]
    assert sum(shares) == 64 and min(shares) > 0  # other tests may keep the first core busy
    assert cells((tmp_path / "found.md").read_text(), "equal shares")[2] == "1.00"


@pytest.mark.process
def test_loader_compares_itself_with_the_model(tmp_path: Path) -> None:
    benchmark("loader", "--quick", "--out", str(tmp_path / "found.json"))
    (of,) = json.loads((tmp_path / "found.json").read_text())["cases"].values()
    assert 0 < of["collate_s"] < of["loader_s"]
    row = cells((tmp_path / "found.md").read_text(), "vit-nano, 8 px")
    assert float(row[4]) == pytest.approx(of["model_s"] / of["loader_s"], abs=0.1)


@pytest.mark.process
@pytest.mark.root
@pytest.mark.slow
def test_collectives_beside_the_updates_of_a_run(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    done = benchmark("collectives", "--link=30ms", f"--out={out}", "--", "--train_size=128")
    rows = [line[2:-2].split(" | ") for line in done.out.splitlines() if line.startswith("| ")]
    by = {(row[0], row[1]): row[2:] for row in rows}
    assert not [key for key in by if key[0] == "elsewhere"]
    for what in ("an earlier record, the devices", "whether weights are equal"):
        exchanges, size, floor, waited, _ = by["start", what]
        assert (exchanges, size, floor) == ("1.0", "4,096", "30") and 25 < int(waited) < 1000
    # Between two nodes what is sent back waits for what was sent.
    assert all(0.5 < float(by["each epoch", what][4]) < 20 for what in ("evaluation", "saving"))
    ranks = json.loads(out.read_text())["ranks"]
    assert len(ranks) == 2 and by["start", "measuring the link"][2] == "-"
