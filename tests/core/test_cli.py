"""One command line for all verbs: what is accepted, what is refused, and what is loaded for it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import VERBS, main, parser_of
from harness.core.process import CLEARED
from harness.core.records import find_runs
from harness.core.settings import UserError
from harness.read.report import report
from tests.support.ranks import ran
from tests.support.records import Plan

# A line of each verb that is right.
RIGHT = {
    "sweep": "f.yaml", "table": "outputs", "nodes": "2", "link": "", "figures": "f", "import": "f",
    "compare": "a b", "explain": "a", "batches": "a", "predict": "a --setup 1_1",
    "plan": "a --nodes 4 --link lan --target accuracy=0.9",
    "store": "29400", "report": "", "doctor": "", "env": "",
    "pack": "outputs", "push": "outputs me/mine", "pull": "me/mine outputs", "unpack": "a.jsonl.gz",
    "completion": "bash",
}  # fmt: skip


def at_a_terminal(*words: str, code: int = 0) -> str:
    """What a call of Python writes to stderr if that is a terminal."""
    ours, theirs = os.openpty()
    done = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    assert done.returncode == code and b"\x1b" not in done.stdout
    said = b""
    with contextlib.suppress(OSError):  # of a terminal that nobody writes to any more
        while part := os.read(ours, 2**16):
            said += part
    os.close(ours)
    return said.decode()


@pytest.mark.process
def test_a_terminal_shows_what_is_waited_for(tmp_path: Path) -> None:
    plan = Plan(tmp_path / "outputs")
    plan.run("1_1", train_samples_per_s=10.0)
    plan.run("1_2", devices=2, train_samples_per_s=15.0)
    plan.write()
    to = ("--out", str(tmp_path / "page"))
    said = at_a_terminal("-m", "harness", "report", str(plan.output_dir), *to)
    lines = said.split(CLEARED)
    assert lines[-1] == "" and lines[1] == "loading libraries ..."
    name = json.loads((plan.folder / "sweep.json").read_text())["name"]
    shown = [f"reading 2 records of {name} ...", f"drawing {name} ..."]
    assert [line for line in lines if line in shown] == shown
    drawn = at_a_terminal("-m", "harness", "figures", str(plan.folder), "--out", str(tmp_path))
    assert "drawing" in drawn
    # Elsewhere it is silent.
    command = [sys.executable, "-m", "harness", "figures", str(plan.folder)]
    assert subprocess.run(command, capture_output=True).stderr == b""


@pytest.mark.process
@pytest.mark.slow
def test_a_script_says_at_a_terminal_that_it_loads(tmp_path: Path, root: Path) -> None:
    script = [str(root / "vit.py"), "--tiny", "--epochs", "1", "--save", "none"]
    said = at_a_terminal(*script, "--o", str(tmp_path))
    assert said.split(CLEARED)[:2] == ["", "loading libraries ..."] and said.count(CLEARED) == 2
    refused = at_a_terminal(*script, "--lr", "zero", code=2)
    assert "loading" not in refused and "--lr" in refused


INTERRUPTED = """
import signal
from harness.core.process import install_quit_handlers, say_work, working

signal.signal(signal.SIGINT, signal.SIG_DFL)
install_quit_handlers()
say_work()
with working("loading libraries"):
    signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.process
def test_an_interrupt_stands_in_a_line_of_its_own() -> None:
    said = at_a_terminal("-c", INTERRUPTED, code=130)
    assert said.split(CLEARED) == ["", "loading libraries ...", "stopped by SIGINT\r\n"]


def refusal(verb: str, *words: str) -> str:
    with pytest.raises(UserError) as refused:
        parser_of(verb).read(words)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_read_alike(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    right = RIGHT[verb].split()
    options = parser_of(verb).read(right)
    assert options.argv == right and getattr(options, "json", False) is False
    for word in ("-h", "--help"):
        assert main([verb, *right, "--nonsense", word]) == 0
        printed = capsys.readouterr()
        assert printed.out.startswith(f"usage: python -m harness {verb}") and not printed.err
    assert "unknown flag --zzzzz: there are --" in refusal(verb, *right, "--zzzzz=1")
    if verb != "import":
        assert "unexpected" in refusal(verb, *right, *"wxyz")
    if VERBS[verb].json:
        assert parser_of(verb).read([*right, "--json"]).json is True
        assert "unknown flag --jsno: did you mean --json?" in refusal(verb, *right, "--jsno")
        assert main([verb, *right, "--jsno"]) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"harness {verb}: error: unknown flag") and line.count("\n") == 1
    if verb != "nodes":
        assert "no command is expected" in refusal(verb, *right, "--", "ls")


@pytest.mark.parametrize("verb", ["sweep", "figures", "import", "report"])
def test_a_folder_to_write_to_has_one_manner_of_flags(verb: str) -> None:
    right = RIGHT[verb].split()
    for words in ("--out a/b", "--out=a/b", "-o a/b", "-o=a/b", "--o a/b", "--output_dir=a/b",
                  "--output-dir a/b"):  # fmt: skip
        options = parser_of(verb).read([*right, *words.split()])
        found = options.output_dir if verb == "sweep" else options.out
        assert Path(found) == Path("a/b")
    assert refusal(verb, *right, "--out") == "--out needs a value"


def test_flags_and_names_go_in_any_order() -> None:
    options = parser_of("explain").read(["a", "--json", "b"])
    assert (options.run, options.baseline, options.json) == ("a", "b", True)
    options = parser_of("import").read(["a", "--lr", "1e-3", "b", "--b", "4"])
    assert (len(options.files), options.lr, options.per_gpu_batch) == (2, 1e-3, 4)
    options = parser_of("nodes").read(["2", "--link", "lan", "--", "torchrun", "--my-flag", "--"])
    assert (options.nodes, options.link) == (2, "lan")
    assert options.command == ["torchrun", "--my-flag", "--"]
    assert parser_of("sweep").read(["f", "--limit=-2:"]).limit == slice(-2, None)
    assert parser_of("sweep").read(["f", "--launcher", "ssh", "--ssh", "-F c d"]).ssh == "-F c d"


REFUSED = {
    "table --wrte": "unknown flag --wrte: did you mean --write?",
    "table --json=1": "--json takes no value",
    "compare a": "missing B; usage: python -m harness compare A B",
    "compare a b --target": "--target needs a value",
    "figures": "missing FOLDER",
    "import f --lr 0": "--lr 0: must be above 0",
    "import f --lr fast": "--lr fast: expected a number",
    "import f --strategy dpp": "--strategy dpp: expected one of single, dp, ddp",
    "import f --source ..": "--source ..: expected letters, digits",
    "predict a": "missing --setup",
    "plan a --nodes 4 --link lan": "missing --target",
    "plan a --nodes 4 --link lan --target f1=1 --deadline inf": "--deadline inf: must be above 0",
    "predict a --setup 1_1 --batch 0": "--batch 0: must be at least 1",
    "predict a --setup 1_1 --overlap -1": "--overlap -1: must be at least 0",
    "predict a --setup 1_1 --overlap 1_0": "--overlap 1_0: expected a whole number",
    "predict a --setup 1_1 --sharing 2": "--sharing 2: expected a share, 0 to 1",
    "predict a --setup 1_1 --plot a.txt": "--plot a.txt: expected a file that ends in png",
    "predict a --setup 1_1 --sync_scope nodes": "expected one of node, rank; did you mean node?",
    "predict a --setup 1_1 --backend mpi": "--backend mpi: expected one of gloo, nccl",
    "sweep": "missing FILE; usage: python -m harness sweep FILE [...], or --help",
    "store 65536": "PORT 65536: must be at most 65535",
    "nodes 0": "N 0: must be at least 1",
    "link --mb 5000": "--mb 5000: expected MB, 4000 at most",
    "sweep f --max_restarts x": "--max_restarts x: expected a whole number",
    "sweep f --launcher slrum": "slrum: expected one of local, netns, ssh, slurm; did you mean",
}


@pytest.mark.parametrize("line", REFUSED)
def test_mistakes_name_the_flag_the_value_and_the_fix(line: str) -> None:
    assert REFUSED[line] in refusal(*line.split())


def test_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert main(argv) == 0
        printed = capsys.readouterr().out
        assert all(f"\n  {verb:<10} {VERBS[verb].summary}\n" in printed for verb in VERBS)
    for argv, hint in ((["tabel"], "did you mean table?"), (["qqqq"], "there are sweep, table")):
        assert main(argv) == 2
        assert capsys.readouterr().err.startswith(f"harness: error: unknown verb {argv[0]}: {hint}")


@pytest.mark.process
def test_a_mistake_is_answered_before_anything_is_loaded() -> None:
    code = (
        "import sys; from harness.cli import VERBS, main\n"
        "assert not [v for v in VERBS if main([v, '--help']) or main([v, '--zzzz']) != 2]\n"
        "heavy = {'torch', 'pandas', 'matplotlib', 'numpy', 'transformers', 'rich', 'psutil'}\n"
        "heavy &= {*sys.modules}\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stderr.splitlines()) == len(VERBS), done.stderr


SMALL = "--tiny --setup 1_1 --epochs 1 --train_size 64 --test_size 32 --telemetry_hz 0"


@pytest.mark.process
def test_a_run_does_not_end_with_its_output(root: Path, tmp_path: Path) -> None:
    """Its record counts, and not what it prints."""
    command = f"{sys.executable} vit.py {SMALL} --o {tmp_path} >&-"
    done = subprocess.run(["bash", "-c", command], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [run.outcome() for run in find_runs(tmp_path)] == ["finished"]


def printing_in_vain(to: str, argv: list[str], root: str) -> None:
    """vit.py as `python vit.py` runs it, but for its libraries, which are loaded already."""
    if to == "no reader":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(to, os.O_WRONLY)
    os.dup2(writer, 1)
    os.close(writer)
    os.chdir(root)
    sys.argv[1:] = argv
    runpy.run_path("vit.py", run_name="__main__")


@pytest.mark.process
@pytest.mark.parametrize("to", ["/dev/full", "no reader"])
def test_nor_does_it_where_its_output_is_not_taken(to: str, root: Path, tmp_path: Path) -> None:
    done = ran(1, printing_in_vain, to, [*SMALL.split(), "--o", str(tmp_path)], str(root))
    assert (done.code, done.out, done.err) == (0, "", "")
    assert [run.outcome() for run in find_runs(tmp_path)] == ["finished"]


@pytest.mark.process
def test_a_verb_whose_output_is_closed(root: Path) -> None:
    """What it opens next must not take the number of its output."""
    command = f"{sys.executable} -m harness table {root}/outputs/published/demo-tiny.jsonl.gz >&-"
    done = subprocess.run(["bash", "-c", command], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.process
@pytest.mark.parametrize("command", [
    "-m harness", "-m harness predict --help", "bert.py --help",
    "-m harness table outputs/published/demo-tiny.jsonl.gz",
])  # fmt: skip
def test_a_closed_pipe_is_no_failure(command: str, root: Path) -> None:
    """As of `| head`: the reader has gone before anything is printed."""
    words = [sys.executable, *command.split()]
    started = subprocess.Popen(words, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert started.stdout is not None and started.stderr is not None
    started.stdout.close()
    assert started.stderr.read() == b"" and started.wait(60) == 0


@pytest.mark.parametrize("arguments", ["table outputs", "sweep demo.yaml", "sweep --help"])
def test_a_verb_without_its_packages(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the flags of the verb stand in a module that needs a package."""

    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name}", name="pandas")

    monkeypatch.setattr("harness.cli.importlib.import_module", missing)
    assert main(arguments.split()) == 2
    line = capsys.readouterr().err
    assert (
        line.startswith(f"harness {arguments.split()[0]}: error: ")
        and "has no package pandas" in line
    )
    assert line.count("\n") == 1


@pytest.mark.process
def test_the_folder_is_a_program_too(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(root / "harness"), "tabel"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == "harness: error: unknown verb tabel: did you mean table?\n"
    assert done.returncode == 2


@pytest.mark.parametrize(("number", "file", "words"), [
    (errno.ENOSPC, "out/sweeps/mine/logs/a.txt", "no space on out/sweeps/mine/logs"),
    (errno.EROFS, None, "nothing can be written to the read-only disk that is written to"),
    (errno.EACCES, "out/report/report.html", "no permission to write to out/report"),
])  # fmt: skip
def test_what_a_disk_refuses_any_verb_is_one_line(
    number: int, file: str | None, words: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def refuse(_: object) -> int:
        raise OSError(number, os.strerror(number), *filter(None, [file]))

    monkeypatch.setattr(report, "run", refuse)
    assert main(["report"]) == 2
    assert capsys.readouterr().err == f"harness report: error: {words}\n"
    number = errno.ECHILD  # a mistake of ours
    with pytest.raises(ChildProcessError):
        main(["report"])
