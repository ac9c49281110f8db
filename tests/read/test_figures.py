"""Figures show what the records hold: looked at from the inside, drawn from published records."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import statistics
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from PIL import Image

from harness.cli import main
from harness.read import load_sweep, load_sweep_runs
from harness.read.drawing import PNG_DPI
from harness.read.figures.catalogue import FIGURES as ALL
from harness.read.figures.catalogue import draw
from harness.read.records.sweeps import read_results
from tests.support.paired import Verb

DRAWN = (
    "outputs/published",
    "records/gallery",
    "records/limits",
    "records/rates",
    "records/xeon",
    "records/xeon_far",
    "records/xeon_nodes",
    "records/xeon_predicted",
    "records/xeon_seeds",
    "records/epochs",
    "records/four",
    "records/four_next",
    "records/predicted_lossy",
    "records/muon",
    "records/muon_two",
    "records/xeon_steps",
)
PUBLISHED = "records/xeon/sweeps/propagation-tiny"
FIGURES = {
    "agnews_food101_topologies-tiny": "epoch_time.png",
    "batch_size-tiny": "epoch_time.png",
    "cifar100_resnet18_seeds-tiny": "throughput.png",
    "cifar10_vit_four_nodes-tiny": "throughput.png",
    "dataparallel_or_ddp-tiny": "throughput.png",
    "imagenet_resnet_two_nodes-tiny": "throughput.png",
    "limits-tiny": "epoch_time.png",
    "demo-tiny": "throughput.png",
    "fsdp": "frontier.png",
    "learning_rate-tiny": "learning_rate.png",
    "lora-tiny": "frontier.png",
    "near_and_far-tiny": "throughput.png",
    "news": "epoch_time.png",
    "news_learning_rate": "learning_rate.png",
    "news_updates": "epoch_time.png",
    "pictures": "epoch_time.png",
    "precision-tiny": "frontier.png",
    "prediction-tiny": "prediction.png",
    "prediction_four-tiny": "prediction.png",
    "prediction_four_next-tiny": "prediction.png",
    "prediction_lossy-tiny": "prediction.png",
    "prediction_same_hour-tiny": "prediction.png",
    "prediction_next-tiny": "prediction.png",
    "prediction_seeds-tiny": "prediction.png",
    "propagation-tiny": "propagation.png",
    "slow_link_epochs-tiny": "time_to_accuracy.png",
    "slow_link_exchange-tiny": "time_to_accuracy.png",
    "slow_link_muon-tiny": "time_to_accuracy.png",
    "slow_link_muon_two-tiny": "time_to_accuracy.png",
    "slow_link_nodes-tiny": "time_to_accuracy.png",
    "slow_link_pretrained": "time_to_accuracy.png",
    "slow_link_ways-tiny": "time_to_accuracy.png",
    "start_together-tiny": "time_to_accuracy.png",
    "slow_link_rates-tiny": "learning_rate.png",
    "slow_links-tiny": "strategies.png",
    "weak_scaling-tiny": "throughput.png",
}


def test_every_run_is_a_point_and_every_mean_on_a_line(root: Path) -> None:
    runs, groups = load_sweep_runs(root / PUBLISHED), load_sweep(root / PUBLISHED)
    assert len(runs) == 66 and set(runs["state"]) == {"finished"}
    figure = draw("propagation", read_results(root / PUBLISHED)).figure
    assert [axes.get_title() for axes in figure.axes] == ["bert", "vit"]
    for axes in figure.axes:
        linked = runs[runs["link"].notna() & (runs["script"] == axes.get_title())]
        points = [y for drawn in axes.collections for _, y in drawn.get_offsets().tolist()]
        assert sorted(points) == sorted(linked["train_samples_per_s"])
        slow, fast = (line for line in axes.lines if len(line.get_xdata()) == 5)
        if "Mbit" not in str(slow.get_label()):
            slow, fast = fast, slow
        assert (slow.get_label(), fast.get_label()) == ("100 Mbit/s", "rate not limited")
        assert list(slow.get_xdata()) == [0, 1, 5, 20, 80] == list(fast.get_xdata())
        rates = linked[linked["link"] == "20ms/100mbit"]["train_samples_per_s"]
        assert slow.get_ydata()[3] == pytest.approx(statistics.harmonic_mean(rates))
        base = groups[groups["baseline"] & (groups["script"] == axes.get_title())]
        *_, baseline, bound = axes.lines
        assert baseline.get_ydata()[0] == pytest.approx(base["train_samples_per_s"].item())
        delays, rates = map(np.asarray, (bound.get_xdata(), bound.get_ydata()))
        assert delays * rates == pytest.approx(1000 * base["effective_batch"].item())
        assert max(rates) > axes.get_ylim()[1]  # it stretches no axis


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), dtype=float)


def same_picture(one: bytes, other: bytes) -> bool:
    """But for what another machine's fonts may do to single dots."""
    first, second = pixels(one), pixels(other)
    return first.shape == second.shape and float(np.abs(first - second).mean()) < 1.0


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published records, where each test may draw its own sweep again."""
    root, copy = Path(__file__).resolve().parents[2], tmp_path_factory.mktemp("copy")
    for place in DRAWN:
        shutil.copytree(root / place, copy / Path(place).name)
    return copy


@pytest.mark.parametrize("name", FIGURES)
def test_what_is_published_is_that_of_the_records(name: str, copy: Path) -> None:
    drawn = [FIGURES[name], FIGURES[name].replace(".png", "-dark.png")]
    for sweep in copy.glob(f"**/sweeps/{name}"):
        assert_drawn(sweep, drawn)


def assert_drawn(sweep: Path, drawn: list[str]) -> None:
    assert sorted(file.name for file in sweep.glob("*.png")) == sorted(drawn)
    pictures = [(sweep / file).read_bytes() for file in drawn]
    assert not same_picture(*pictures)
    for file in drawn:
        (sweep / file).unlink()
    before = {file: (sweep / file).read_text() for file in ("table.csv", "runs.csv", "table.md")}
    assert main(["table", str(sweep), "--write"]) == 0
    assert {file: (sweep / file).read_text() for file in before} == before
    assert main(["figures", str(sweep)]) == 0
    for file, picture in zip(drawn, pictures, strict=True):
        assert same_picture((sweep / file).read_bytes(), picture), f"make figures: {file} is old"


@pytest.mark.process
def test_the_notebook_is_that_of_the_records(root: Path) -> None:
    notebook = nbformat.read(root / "plot_values.ipynb", as_version=4)
    shown = outputs(notebook)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    drawn = [name for name in ALL if name != "own_metrics"]  # which no published record has
    asked = [
        re.fullmatch(r'show\("(\w+)", "((?:outputs/published|records)/[\w/-]+)"\)', cell)
        for cell in code[3:]
    ]
    assert [found and found[1] for found in asked] == drawn  # a figure a cell, no number
    assert sum(isinstance(output, bytes) for output in shown) == len(drawn)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(root)}}).execute()
    now = outputs(notebook)
    assert len(now) == len(shown)
    for one, other in zip(now, shown, strict=True):
        if isinstance(one, bytes) and isinstance(other, bytes):
            assert same_picture(one, other), "make figures: the notebook is old"
        else:
            assert one == other, "make figures: the notebook is old"
    assert (root / "plot_values.ipynb").stat().st_size < 1_000_000


def outputs(notebook: nbformat.NotebookNode) -> list[str | bytes]:
    """What the cells show, texts and pictures; what is a picture is also said in words.

    What a cell prints comes in one part or in several, as it happens.
    """
    found: list[str | bytes] = []
    for cell in notebook.cells:
        printed = [o for o in cell.get("outputs", []) if o.output_type == "stream"]
        assert {output.name for output in printed} <= {"stdout"}
        found.append("".join(output.text for output in printed))
        for output in cell.get("outputs", []):
            if output.output_type != "stream":
                found.append(output.data["text/plain"])
            if output.output_type != "stream" and "image/png" in output.data:
                found.append(base64.b64decode(output.data["image/png"]))
    return found


def test_all_published_sweeps_have_their_figure(root: Path) -> None:
    drawn = {p.name for place in DRAWN for p in (root / place).glob("**/sweeps/*")}
    assert drawn == {*FIGURES}


def test_mistakes(
    root: Path, tmp_path: Path, figures: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["figures"]) == 2 and main(["figures", "--help"]) == 0
    capsys.readouterr()
    for wrong, told in ((["a", "b"], "unexpected b"), (["--out"], "--out needs a value"),
                        (["--every", "a"], "unknown flag --every")):  # fmt: skip
        assert told in figures.refused(*wrong)
    assert "no records below" in figures.refused(tmp_path)
    shutil.copytree(root / PUBLISHED, tmp_path / "sweeps" / "mine")
    file = tmp_path / "sweeps" / "mine" / "sweep.json"
    # Its runs are not here.
    assert "no finished run has a link" in (said := figures.refused(file.parent))
    all_runs = (
        "; --all draws every figure for which they have something"  # of a folder that is no sweep
    )
    assert all_runs not in said and all_runs in figures.refused(tmp_path)
    plan = json.loads(file.read_text())
    for run in plan["runs"]:
        run["label"].pop("link", None)
    file.write_text(json.dumps(plan | {"axes": ["script", "setup"]}))
    assert figures.refused(file.parent).startswith("harness figures: error: ")


def test_a_figure_for_a_column_of_a_paper(root: Path, tmp_path: Path, figures: Verb) -> None:
    """As wide as asked for with letters of the usual size: panels stand below each other."""
    folder = root / "records/xeon/sweeps/propagation-tiny"
    figures(folder, "--format", "png", "--width", "84mm", "-o", tmp_path)
    picture = Image.open(tmp_path / "propagation.png")
    assert abs(picture.width / PNG_DPI - 84 / 25.4) < 0.02 and picture.height > picture.width
    figures(folder, "--format=pdf", "--width=3.3in", "-o", tmp_path)
    assert [p.name for p in tmp_path.glob("*.pdf")] == ["propagation.pdf"]  # light alone
    (box,) = re.findall(
        rb"/MediaBox \[ ?0 0 ([\d.]+) ", (tmp_path / "propagation.pdf").read_bytes()
    )
    assert float(box) == pytest.approx(3.3 * 72, abs=0.1)
    figures(folder, "--format", "svg", "-o", tmp_path)
    assert {p.name for p in tmp_path.glob("*.svg")} == {"propagation.svg", "propagation-dark.svg"}
    wide = root / "outputs/published/sweeps/slow_links-tiny"
    said = figures(wide, "--all", "--format=pdf", "--width=3.3in", "-o", tmp_path / "all")
    left_out = dict(re.findall(r"^not drawn: (.*?): (.*)$", said, re.MULTILINE))
    written = {file.stem for file in (tmp_path / "all").iterdir()}
    assert {"strategies", "time_to_accuracy", "where_time_went", "frontier"} <= written
    assert {ALL[name][1] for name in ALL.keys() - written} == {*left_out}
    for text in ("3.3", "1in", "21in", "widein"):
        assert "expected 2in to 20in" in figures.refused(folder, "--width", text)
    assert "--format" in figures.refused(folder, "--format", "jpg")
