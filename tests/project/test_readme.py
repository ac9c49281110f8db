"""What README.md and docs/ state is true: their links, commands, examples and contents lists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from PIL import Image
from safetensors.torch import load_file

from harness.cli import Incomplete, main, parser_of
from harness.core.command_line import command_line, parse
from harness.core.settings import Settings
from harness.core.strategies import STRATEGIES
from harness.launch.plan import plan
from harness.launch.sweepfile import KEYS, load
from harness.train.run.warm import free_port
from tests.support.pages import commands, texts
from tests.support.ranks import script


def world_of(words: list[str]) -> dict[str, str]:
    """The variables that this torchrun would set for rank 0."""
    flags = dict(word[2:].split("=", 1) for word in words if "=" in word and word.startswith("--"))
    nodes, per_node = int(flags.get("nnodes", "1").split(":")[-1]), int(flags["nproc_per_node"])
    return {
        "RANK": "0",
        "WORLD_SIZE": str(nodes * per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "TORCHELASTIC_MAX_RESTARTS": flags.get("max_restarts", "0"),
    }


def settings_of(command: str, folder: Path) -> Settings | None:
    words = shlex.split(command)
    at = next((i for i, word in enumerate(words) if word.endswith(("bert.py", "vit.py"))), None)
    if at is None:
        return None
    argv = [word for word in words[at + 1 :] if word not in ("--print_settings", "--list_models")]
    argv = [w for w in argv if w != "--help"]
    if argv and argv[0] == "settings.yaml":
        argv[0] = str(folder / "settings.yaml")
        (folder / "settings.yaml").write_text("epochs: 2\n")
    launched = words[0] == "torchrun" or "harness.train.torchrun" in words
    environ = world_of(words[:at]) if launched else {}
    return parse(Path(words[at]).stem, argv, environ)


def headings(page: Path, level: str = "#+") -> list[str]:
    """The headings outside code blocks, without their marks."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return re.findall(rf"^{level} (.*)$", prose, re.MULTILINE)


def anchor(heading: str) -> str:
    """What GitHub makes of a heading in a link."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_links_lead_somewhere(root: Path) -> None:
    links = [
        (path, link)
        for path in texts(root)
        for link in re.findall(r"(?:\]\(|src=\"|srcset=\")([^)\"]+)[)\"]", path.read_text())
        if "://" not in link
    ]
    assert len(links) > 100 and any("#" in link for _, link in links)
    for path, link in links:
        file, _, part = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), f"{path.name}: {link}"
        assert not part or part in map(anchor, headings(target)), f"{path.name}: {link}"


def test_every_test_that_a_page_names_exists(root: Path) -> None:
    named = [
        (path.name, file, name)
        for path in texts(root)
        for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", path.read_text())
    ]
    assert len(named) >= 12
    for page, file, name in named:
        assert f"def {name}(" in (root / file).read_text(), f"{page}: {file}::{name}"


def test_the_readme_is_short_and_leads_to_every_page(root: Path) -> None:
    text = (root / "README.md").read_text()
    assert len(text.split()) <= 1500
    for page in root.glob("docs/*.md"):
        assert f"](docs/{page.name})" in text


def test_every_page_begins_with_its_contents(root: Path) -> None:
    for page in root.glob("docs/*.md"):
        parts = headings(page, "##")
        listed = re.findall(
            r"^- \[.*\]\((#.*)\)$", page.read_text().split("\n## ")[0], re.MULTILINE
        )
        assert parts and listed == [f"#{anchor(part)}" for part in parts], page.name


def test_every_make_target_exists(root: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (root / "Makefile").read_text(), re.MULTILINE)
    named = [
        name
        for path in texts(root)
        for name in re.findall(r"(?:^|`)make ([\w-]+)(?:$|[ `])", path.read_text(), re.MULTILINE)
    ]
    assert {"demo", "test", "figures", "notebook"} <= set(named) <= set(targets)


def test_every_strategy_that_exchanges_names_its_paper(root: Path) -> None:
    overview = (root / "docs" / "strategies.md").read_text().split("## ")[1]
    papers = overview.split("Papers:")[1].lower()
    named = [name for name in STRATEGIES if name not in ("single", "dp")]
    assert [name for name in named if name not in papers] == []
    assert len(re.findall(r"\(https://arxiv\.org/abs/\d{4}\.\d{5}\)", papers)) > len(named)


def test_every_command_parses(root: Path, tmp_path: Path) -> None:
    found = [settings_of(command, tmp_path) for command in commands(root)]
    assert len([settings for settings in found if settings]) >= 12
    verbs = [re.split(r" -m harness (?=[a-z])", command, maxsplit=1) for command in commands(root)]
    calls = [shlex.split(words[1]) for words in verbs if len(words) == 2]
    assert len({verb for verb, *_ in calls}) >= 10
    for verb, *words in calls:
        if "..." in words:
            continue
        with suppress(Incomplete):  # the text may only name a verb
            parser_of(verb).read(words)


def test_every_sweep_is_planned(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those of the Makefile and of the headers of the sweep files (launch/test_plan.py)."""
    found = [c for c in commands(root) if "-m harness sweep experiments" in c]
    demo = re.findall(r"-m harness (sweep .*)", (root / "Makefile").read_text())
    assert len(found) >= 5 and len(demo) == 1
    for command in [*found, f"python -m harness {demo[0]}"]:
        words = shlex.split(command.replace("$(DEMO)", "outputs/demo"))
        assert main([*words[words.index("sweep") :], "--dry_run"]) == 0, command
        assert re.search(r"torchrun|torch\.distributed\.run", capsys.readouterr().out)


def test_the_example_of_a_sweep_file_is_one(root: Path, tmp_path: Path) -> None:
    page = (root / "docs" / "sweeps.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "example.yaml").write_text(example)
    # 2 scripts x (3 x 3 - 1) points x 3 seeds; tiny: 2 x (2 x 2) x 3.
    assert len(plan(load(tmp_path / "example.yaml"))) == 48
    assert len(plan(load(tmp_path / "example.yaml", tiny=True))) == 24
    explained = (root / "harness" / "launch" / "sweepfile.py").read_text().split('"""')[1]
    for key in KEYS:
        assert re.search(rf"^    {key}\b", explained, re.MULTILINE), key


def test_the_files_of_the_map_exist(root: Path) -> None:
    block = (root / "README.md").read_text().split("## Map")[1].split("```")[1]
    names = re.findall(r"\b[\w/]+(?:\.(?:py|md|sh)\b|/)", block)
    assert len(names) > 15
    everywhere = {path.name for path in root.rglob("*") if ".venv" not in path.parts}
    assert [name for name in names if Path(name).name not in everywhere] == []


# The commands that need neither GPU nor Hub, with fewer samples where they would take long.
SHORT = ["--train_size", "128", "--test_size", "32", "--epochs", "1", "--b", "16"]
RUN = [
    (1, "bert", ["--tiny", *SHORT, "--warmup_steps", "2", "--lr_scheduler_type", "cosine",
                 "--report_to", "tensorboard"]),
    (1, "bert", ["--tiny", *SHORT, "--lr", "1e-3", "--seed", "2"]),
    (1, "vit", ["--model", "resnet-18-cifar", "--dataset", "embedded:digits", "--image_size", "32",
                "--train_size", "32", "--test_size", "16", "--epochs", "1", "--b", "16"]),
    (2, "vit", ["--tiny", *SHORT, "--strategy", "fsdp"]),
    (2, "bert", ["--tiny", *SHORT, "--setup", "1_2"]),
    (1, "vit", ["--tiny", *SHORT, "--precision", "bf16"]),
    (1, "vit", ["--tiny", *SHORT, "--label_smoothing_factor", "0.1", "--num_workers", "2"]),
    (1, "vit", ["--tiny", *SHORT, "--save", "best", "--best_metric", "loss"]),
    (1, "bert", ["--model", "distilbert-base", "--dataset", "embedded:english", "--max_steps", "2",
                 "--train_size", "16", "--test_size", "8", "--b", "4", "--max_length", "16"]),
]  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize(("count", "name", "argv"), RUN)
def test_commands_run(count: int, name: str, argv: list[str], tmp_path: Path) -> None:
    done = script(name, *argv, "--o", str(tmp_path), count=count)
    assert done.code == 0, done.err
    assert "recorded in" in done.out
    shared = {1: "1 process, cpu with 1 thread", 2: "2 processes, cpu with 1 thread each"}
    assert f" on {shared[count]}, " in done.out
    assert done.out.endswith(f"\n  next: python -m harness table {tmp_path}\n")
    (model,) = re.findall(r"\n  the trained model is in (.*)\n", done.out)
    saved = load_file(Path(model, "model.safetensors"))
    if "resnet-18-cifar" in argv:  # with a first layer of this project
        built = done.loaded()["model"]
    else:
        ready = done.loaded()["classify"]
        built = ready.model
        given = Image.new("RGB", (8, 8)) if name == "vit" else "some words " * 99  # are cut
        assert ready(given)[0]["label"] in built.config.label2id
    loaded = built.state_dict()
    assert loaded.keys() == saved.keys() and all(loaded[k].equal(w) for k, w in saved.items())
    assert done.err == ""
    (summary,) = tmp_path.glob(f"{name}/*/*/summary.json")
    assert '"finished"' in summary.read_text()


@pytest.mark.process
def test_git_sees_what_is_published_and_not_what_users_measure(root: Path) -> None:
    own = [
        "outputs/vit/1_1/run/summary.json",
        "outputs/sweeps/mine/table.md",
        "outputs/new.jsonl.gz",
    ]
    ours = [
        "outputs/README.md",
        "outputs/schema.json",
        "outputs/published/new.jsonl.gz",
        "records/gallery/new.jsonl.gz",
    ]
    command = ["git", "check-ignore", "--no-index", *own, *ours]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.stdout.split() == own, done.stderr


def test_the_citation_is_that_of_the_readme_and_the_package(root: Path) -> None:
    cited = yaml.safe_load((root / "CITATION.cff").read_text())
    assert f"# {cited['title']}\n" in (root / "README.md").read_text()
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])


@pytest.mark.process
def test_own_data_are_read_as_the_readme_shows(root: Path, tmp_path: Path) -> None:
    """A file of 600 rows with the columns review and sentiment."""
    (command,) = (c for c in commands(root) if c.startswith("python bert.py --dataset reviews.csv"))
    rows = [f"{word} film number {i},{word}" for i in range(300) for word in ("good", "bad")]
    (tmp_path / "reviews.csv").write_text("\n".join(["review,sentiment", *rows]))
    argv = command.replace("reviews.csv", str(tmp_path / "reviews.csv")).split()[2:]
    done = script("bert", *argv, "--model", "bert-nano", "--epochs", "1", "--o", str(tmp_path))
    assert done.code == 0, done.err
    (shown,) = (
        line for line in (root / "README.md").read_text().splitlines() if "test samples, " in line
    )
    assert shown in done.out.splitlines()
    assert "  input from review, classes from sentiment" in done.out.splitlines()


@pytest.mark.process
def test_from_a_shell(root: Path, tmp_path: Path) -> None:
    """True command lines, once each: plain python, accelerate.

    torchrun with two processes is started, and its rows compared, in tests/launch/test_sweep.py.
    """
    starts = {
        "1_1": [sys.executable],
        "1_1_launched": [
            sys.executable, "-m", "accelerate.commands.launch", "--num_processes=1", "--cpu",
        ],
    }  # fmt: skip
    for setup, words in starts.items():
        argv = ["--tiny", *SHORT, "--setup", setup, "--o", str(tmp_path)]
        done = subprocess.run(
            [*words, "vit.py", *argv], cwd=root, capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 0, done.stderr
        assert list(tmp_path.glob(f"vit/{setup}/*/summary.json")), setup


@pytest.mark.process
def test_one_process_of_torchrun(tmp_path: Path) -> None:
    """With the variables that it sets: a group of one."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
           "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}  # fmt: skip
    argv = ["--tiny", *SHORT, "--setup", "1_1_one", "--o", str(tmp_path)]
    done = script("vit", *argv, env=env)
    assert done.code == 0, done.err
    assert list(tmp_path.glob("vit/1_1_one/*/summary.json"))


def test_help_and_lists_are_printed_and_stop(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, word in (("--help", "--per_gpu_batch"), ("--list_models", "vit-base-patch16"),
                       ("--print_settings", '"epochs"')):  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            command_line("vit", [argv])
        assert stopped.value.code == 0
        assert word in capsys.readouterr().out
