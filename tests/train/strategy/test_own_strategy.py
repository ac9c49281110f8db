"""--strategy FILE.py:CLASS: loaded from that file alone, or refused clearly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.core.command_line import parse
from harness.core.identity import run_id
from harness.core.provenance import changed_inputs, inputs
from harness.core.records import find_runs
from harness.core.records.redact import settings_of
from harness.core.settings import UserError
from harness.launch.plan import plan
from harness.launch.sweepfile import load
from harness.read.labels import strategy_text
from harness.read.records.selection import read_group
from harness.train.strategy import own_exchange
from tests.support.broken_runs import own_node
from tests.support.ranks import ROOT, ran, run_script, script
from tests.support.sweeps import sweep_file

EXAMPLE = "docs/sign_mean.py:SignMean"
SMALL = ["--tiny", "--epochs", "1", "--train_size", "128", "--test_size", "32"]
BASE = "from harness.train.strategy.base import Exchange\n"
TWO = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return tmp_path / "mine.py"


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (None, "mine.py:Mine", "there is no file"),
        ("class Other: ...", "mine.py:Mine", "has no class Mine; there is Other"),
        ("class Mine(:", "mine.py:Mine", "mine.py is not readable as Python"),
        ("", "mine.py", "expected one of single, dp, .*, FILE.py:CLASS"),
        (BASE + "class Mine(Exchange): ...", "mine.py:Mine --compress bf16", "does not go with"),
        (BASE + "class Mine(Exchange): ...", "mine.py:Mine --sync_every 5", "it belongs to local"),
    ],
)
def test_what_the_command_line_refuses(mine: Path, text: str | None, name: str, said: str) -> None:
    if text is not None:
        mine.write_text(text)
    strategy, *more = name.split(" ")
    with pytest.raises(UserError, match=said):
        parse("vit", [*SMALL, "--strategy", f"{mine.parent}/{strategy}", *more], TWO)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_module\nclass Mine: ...", "cannot be loaded: ModuleNotFoundError"),
        ("class Mine: ...", "Mine is no Exchange: derive it from"),
        (
            "from harness.train.strategy.local_sgd import LocalSgd\nclass Mine(LocalSgd): ...",
            "write apart = True into class Mine",
        ),
    ],
)
def test_what_is_no_strategy_is_refused_before_training(mine: Path, text: str, said: str) -> None:
    mine.write_text(text)
    with pytest.raises(UserError, match=said):
        own_exchange(f"{mine}:Mine")


def test_a_finished_run_answers_for_its_code_alone(mine: Path) -> None:
    mine.write_text(BASE + "class Mine(Exchange): ...\n")
    settings = parse("vit", [*SMALL, "--strategy", f"{mine.parent}/./mine.py:Mine"], TWO)
    assert settings.strategy == f"{mine}:Mine" and "_Mine_" in run_id(settings)
    before = inputs(settings)
    mine.write_text(mine.read_text() + "# a comment\n")
    assert changed_inputs(before, inputs(settings)) == ""
    mine.write_text(mine.read_text() + "SIZE = 2\n")
    assert "the file of --strategy has changed" in changed_inputs(before, inputs(settings))


def test_names_in_records_and_tables(monkeypatch: pytest.MonkeyPatch, mine: Path) -> None:
    monkeypatch.setenv("HOME", str(mine.parent))
    mine.write_text(BASE + "class Mine(Exchange): ...\n")
    recorded = settings_of(parse("vit", [*SMALL, "--strategy", f"{mine}:Mine"], TWO))
    assert recorded["strategy"] == "~/mine.py:Mine"
    assert strategy_text(recorded | {"sync_every": None}) == "mine.py:Mine"


def test_a_sweep_has_it_beside_ours(mine: Path) -> None:
    mine.write_text(BASE + "class Mine(Exchange):\n    apart = True\n")
    text = f'script: vit\nsettings: {{setup: "1_2"}}\ngrid: {{strategy: [ddp, "{mine}:Mine"]}}\n'
    ours, own = plan(load(sweep_file(mine.parent, text, "s"), tiny=True))
    assert ours.settings.strategy == "ddp" and own.settings.strategy == f"{mine}:Mine"
    assert ("--strategy", f"{mine}:Mine") in zip(own.argv, own.argv[1:], strict=False)


@pytest.mark.process
def test_the_example_trains_on_two_processes(tmp_path: Path) -> None:
    argv = [*SMALL, "--strategy", EXAMPLE, "--o", str(tmp_path)]
    done = script("vit", *argv, count=2)
    assert done.code == 0, done.err
    (folder,) = find_runs(tmp_path)
    assert folder.path.name.startswith("vit-nano_SignMean_b32")
    environment = json.loads((folder.path / "environment.json").read_text())
    assert environment["observed"]["strategy"] == EXAMPLE
    assert environment["observed"]["exchanges"] > 0
    assert environment["inputs"]["strategy"]["files"] == 1
    assert "SignMean.average" in environment["observed"]["gradient_hook"]
    group = read_group("own", f"{tmp_path}:strategy={EXAMPLE}", None)
    assert group.finished and strategy_text(group.identity) == "sign_mean.py:SignMean"
    assert script("vit", *argv, count=2).out.startswith("already finished")


def train_from_own_disk(folder: str, argv: list[str]) -> int:
    own_node(folder)
    return run_script("vit", argv, ".")


@pytest.mark.process
@pytest.mark.parametrize("other", [None, "SIZE = 2\n"])
def test_a_node_without_the_same_file_is_named_before_training(
    other: str | None, tmp_path: Path
) -> None:
    for rank, more in enumerate(["# with a comment\n", other]):
        disk = tmp_path / str(rank)
        disk.mkdir()
        if more is not None:
            (disk / "mine.py").write_text(f"{BASE}class Mine(Exchange): ...\n{more}")
    argv = [*SMALL, "--setup", "2_1", "--strategy", "mine.py:Mine", "--o", "out"]
    done = ran(2, train_from_own_disk, str(tmp_path), argv)
    said = "there is no file mine.py\n" if other is None else (
        "the file on rank 1 (node 1) is not that of rank 0: copy it to every node\n"
    )  # fmt: skip
    assert done.code == 2 and done.err == f"vit.py: error: --strategy mine.py:Mine: {said}"
    assert not list(tmp_path.rglob("settings.json"))


@pytest.mark.process
def test_ranks_that_end_with_other_weights_are_no_result(mine: Path) -> None:
    """Its hook exchanges nothing."""
    mine.write_text(
        f"{BASE}import torch\n\n\ndef hook(state, bucket):\n"
        "    done = torch.futures.Future()\n    done.set_result(bucket.buffer())\n    return done\n"
        "\n\nclass Mine(Exchange):\n    def attach(self, model, optimizer):\n"
        "        model.register_comm_hook(None, hook)\n"
    )
    argv = [*SMALL, "--strategy", f"{mine}:Mine", "--o", str(mine.parent / "out")]
    done = script("vit", *argv, count=2)
    assert done.code == 1 and "1 rank(s) have other weights than rank 0" in done.err
    (folder,) = find_runs(mine.parent / "out")
    assert folder.outcome() == "failed"


@pytest.mark.process
def test_what_a_strategy_records_under_a_name_that_is_not_declared_ends_the_run(
    mine: Path,
) -> None:
    mine.write_text(
        f"{BASE}\n\nclass Mine(Exchange):\n    def attach(self, model, optimizer):\n"
        "        self.observed['exhanges'] = 1\n"
    )
    argv = [*SMALL, "--strategy", f"{mine}:Mine", "--o", str(mine.parent / "out")]
    done = script("vit", *argv, count=2)
    said = "environment.json: observed.exhanges is not declared in harness/core/schema"
    assert done.code != 0 and said in done.err
    (folder,) = find_runs(mine.parent / "out")
    assert folder.outcome() == "failed"
    environment = folder.read_environment()
    assert environment is not None and "exhanges" not in environment["observed"]


@pytest.mark.process
def test_what_a_strategy_records_too_late_loses_nothing(mine: Path) -> None:
    mine.write_text(
        f"{BASE}\n\nclass Mine(Exchange):\n    def end(self):\n"
        "        self.observed['exhanges'] = 1\n"
    )
    argv = [*SMALL, "--strategy", f"{mine}:Mine", "--o", str(mine.parent / "out")]
    done = script("vit", *argv, count=2)
    said = (
        "warning: environment.json: observed.exhanges is not declared in harness/core/schema: not "
        "recorded: environment.json stays as it was"
    )
    assert done.code == 0 and said in done.err
    (folder,) = find_runs(mine.parent / "out")
    assert folder.outcome() == "finished"


def test_the_page_names_the_example() -> None:
    assert EXAMPLE in (ROOT / "docs" / "own-work.md").read_text()
