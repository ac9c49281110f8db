"""python -m harness predict: what it reads from records, what it says, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.core.command_line import parse
from harness.core.links import Link
from harness.core.records import SCHEMA
from harness.core.settings import as_mapping
from harness.read.predict.exchange import GLOO, Shape, allreduce, wire_of
from harness.read.predict.fitting import Overrides, fit_records
from tests.read.test_importing import TEXT, text_file

GRADIENT = 4_000_000
FAR = ["--link", "20ms,200mbit"]


def planted_s(batch: int, per_node: int = 1) -> float:
    """10 ms and 1 ms a sample; two processes slow each other by a tenth."""
    return (0.010 + 0.001 * batch) * (1 + 0.1 * (per_node - 1))


def record(
    root: Path, batch: int, nodes: int = 1, per_node: int = 1, *flags: str,
    step_s: float | None = None, machine: str = "a-cpux2", link: dict[str, Any] | None = None,
    seed: int = 1, backend: str | None = GLOO, **summary: Any,
) -> Path:  # fmt: skip
    """A finished run, whose step takes what is planted."""
    ranks = nodes * per_node
    path = root / "vit" / f"{nodes}_{per_node}" / f"b{batch}_s{seed}_{machine}_{len(flags)}"
    path.mkdir(parents=True)
    world = {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(per_node)}
    words = ["--tiny", "--per_gpu_batch", str(batch), "--seed", str(seed), *flags]
    settings = as_mapping(parse("vit", words, world))
    (path / "settings.json").write_text(json.dumps({"schema": SCHEMA, **settings}))
    facts = {
        "machine": machine, "nodes": nodes, "processes_per_node": per_node,
        "effective_batch": batch * ranks, "command": f"vit.py --tiny --per_gpu_batch {batch}",
        "observed": {"backend": backend, "device": "cpu" if backend else None,
                     "parameter_bytes": GRADIENT},
        "data": {"train_samples": 1408, "left_out_samples": 29}, "link": link,
    }  # fmt: skip
    (path / "environment.json").write_text(json.dumps(facts))
    took_s = step_s or planted_s(batch, per_node)
    content = {
        "schema": SCHEMA, "outcome": "finished", "reason": None, "epochs_done": 2,
        "train_samples_per_s": batch * ranks / took_s, "train_time_s": 4.0, "eval_time_s": 0.8,
        **summary,
    }  # fmt: skip
    (path / "summary.json").write_text(json.dumps(content))
    return path


def measured(delay_ms: float, rate_mbit: float, factor: float, nodes: int = 2) -> dict[str, Any]:
    """A link as a run records it, whose all-reduce takes so much of the closed form."""
    asked = {"delay_ms": delay_ms, "rate_mbit": rate_mbit, "jitter_ms": 0.0, "loss": 0.0}
    cost = allreduce(GLOO, GRADIENT, Shape(nodes), wire_of(Link(delay_ms, rate_mbit)))
    return {"asked": asked, "gradient_bytes": GRADIENT, "allreduce_bytes": GRADIENT,
            "allreduce_s": factor * cost.alone_s}  # fmt: skip


@pytest.fixture
def records(tmp_path: Path) -> Path:
    root = tmp_path / "outputs"
    for batch in (8, 16, 32):
        for seed in (1, 2):
            noise = 1.01 if seed == 1 else 0.99
            record(root, batch, seed=seed, step_s=noise * planted_s(batch))
    record(root, 16, 1, 2)
    record(root, 32, 1, 2)
    return root


def said(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(["predict", *argv]) == code
    out, err = capsys.readouterr()
    if code == 2:
        assert not out and err.startswith("harness predict: error: ") and err.count("\n") == 1
    return err if code == 2 else out


# ---- records ----


def test_planted_parameters_are_found(records: Path) -> None:
    fitted = fit_records(str(records), Overrides())
    line = fitted.model.line
    assert (line.fixed_s, line.per_sample_s) == pytest.approx((0.010, 0.001), rel=1e-3)
    assert line.spread == pytest.approx(0.01 * (6 / 4) ** 0.5, rel=1e-2)
    assert fitted.model.sharing == pytest.approx(0.1, rel=1e-2)
    assert (fitted.model.gradient_bytes, fitted.model.backend) == (GRADIENT, GLOO)
    assert (fitted.runs, fitted.train_samples, fitted.eval_s) == (8, 1437, 0.4)
    assert fitted.power_w is None and fitted.assumed == ()


def test_an_exchange_inside_a_machine_is_not_its_sharing(tmp_path: Path) -> None:
    record(tmp_path, 16)
    record(tmp_path, 16, 1, 2, step_s=0.0352, comm_exposed_share=0.25)
    model = fit_records(str(tmp_path), Overrides()).model
    assert model.sharing == pytest.approx(0.0264 / 0.026 - 1)
    assert model.inside_s == pytest.approx(0.0088)


def test_links_are_read_from_runs_and_from_files(records: Path) -> None:
    record(records, 16, 2, 1, link=measured(20, 200, 1.5))
    found = {
        "backend": GLOO, "nodes": 2, "processes_per_node": 1, "asked": None,
        "rtt_min_ms": 10.0, "bandwidth_mbit": 80.0,
        "allreduce": [{"bytes": 10**6, "s": 0.3}, {"bytes": None, "s": None}],
    }  # fmt: skip
    (records / "link-lab.json").write_text(json.dumps(found))
    table = fit_records(str(records), Overrides()).model.table
    assert [(row.size, row.shape.nodes) for row in table] == [(GRADIENT, 2), (10**6, 2)]
    assert table[0].factor == pytest.approx(1.5)
    assert (table[1].wire.delay_s, table[1].wire.bytes_per_s) == (0.005, 1e7)


def test_what_is_not_fitted_on(records: Path) -> None:
    """Slow links, smaller gradients and other strategies say nothing of computing."""
    before = fit_records(str(records), Overrides())
    record(records, 16, 2, 1, step_s=9.0)
    record(records, 16, 1, 2, "--compress", "bf16", step_s=9.0)
    record(records, 16, 1, 2, "--strategy", "diloco", "--sync_scope", "rank", step_s=9.0)
    assert fit_records(str(records), Overrides()).model == before.model


# ---- the command ----


def test_what_it_says(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(records, 16, 2, 1, link=measured(20, 200, 1.5))
    out = said(capsys, str(records), "--setup", "4_2", *FAR, "--batch", "16", "--epochs", "3")
    for words in (
        "10 ms + 1 ms a sample, over batches 8, 16, 32", "residuals by batch", "8: +1.0%",
        "each more process on a machine slows all by 10.0%", "gradient: 4 MB",
        "most: waiting for the exchange", "energy       not known", "cost         not known",
        "all-reduce over this link was measured, at 4 MB", "the curve bends: from 2 nodes on",
    ):  # fmt: skip
        assert words in out, words
    assert "interval not known: no spread of all-reduces" in out
    record(records, 16, 2, 1, link=measured(20, 200, 1.6), seed=2)
    out = said(capsys, str(records), "--setup", "4_1", *FAR)
    assert re.search(r"95 % interval [\d,.]+ ms to [\d,.]+ ms", out)


def test_the_numbers_for_programs(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(records), "--setup", "2_1", "--link", "none", "--batch", "16", "--json"]
    found = json.loads(said(capsys, *argv, "--cost_per_gpu_hour", "3.6"))
    assert found["step_s"] == pytest.approx(0.026, rel=1e-3) and found["efficiency"] == 1
    assert found["samples_per_s"] == pytest.approx(32 / 0.026, rel=1e-3)
    # 1437 samples are 44 whole updates; evaluation is shared by two.
    assert found["updates"] == 44 and found["eval_s"] == 0.2
    assert found["epoch_s"] == pytest.approx(44 * 0.026, rel=1e-3)
    assert found["cost"] == pytest.approx((found["epoch_s"] + 0.2) * 2 * 0.001)
    assert found["energy_j"] is None and found["assumed"] == []


def test_energy_where_it_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for batch in (8, 16):
        path = record(tmp_path, batch, energy_j=800.0)  # 200 W
        facts = json.loads((path / "environment.json").read_text())
        (path / "environment.json").write_text(json.dumps({**facts, "idle_power_w": 50.0}))
    found = json.loads(said(capsys, str(tmp_path), "--setup", "2_1", *FAR, "--json"))
    parts = found["parts_s"]
    step_j = 200 * parts["computing"] + 50 * parts["waiting for the exchange"]
    assert found["energy_j"] == pytest.approx(2 * found["updates"] * step_j)


def test_links_are_written_with_commas_too(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(records), "--setup", "2_1", "--json"]
    one, other = (said(capsys, *argv, "--link", text) for text in ("0.2gbit, 20ms", "20ms/200mbit"))
    assert one == other
    slower = json.loads(said(capsys, *argv, "--link", "40ms,200mbit"))
    assert slower["step_s"] > json.loads(one)["step_s"]


def test_a_picture(records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "curve.svg"
    said(capsys, str(records), "--setup", "1024_1", *FAR, "--plot", str(file))
    text = file.read_text()
    assert "<svg" in text and "training samples/s" in re.sub(r"<!-- | -->", "", text)


def test_advice(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(records), "--setup", "4_1", *FAR, "--epochs", "1000", "--advise"]
    # One process needs 1000 x (44 x 42 ms + 0.4 s) = 0.62 h and waits for nobody.
    out = said(capsys, *argv, "--deadline", "1")
    assert re.search(r"\n +1_1 +ddp +32 +0\.6", out) and "fewest device hours first" in out
    # In half of that only those do that exchange seldom.
    out = said(capsys, *argv, "--deadline", "0.4", "--strategy", "diloco", "--sync_every", "50")
    assert re.search(r"─ *\n +[24]_1 +diloco every 50 ", out)
    out = said(capsys, *argv, "--budget", "5", "--cost_per_gpu_hour", "2")
    assert "fastest first" in out and "quality is not predicted" in out
    assert "nothing up to 4_1" in said(capsys, *argv, "--deadline", "0.0001", code=1)


def test_epochs_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One GPU's epochs that others have published, and what they do not say by flags."""
    file = text_file(tmp_path, TEXT, "1_1_2e-05_16.txt")
    root = str(tmp_path / "imported")
    assert main(["import", str(file), "--source", "a.paper", "--output_dir", root]) == 0
    capsys.readouterr()
    argv = [root, "--setup", "2_1", "--link", "1gbit,0.1ms", "--json"]
    assert "no finished run of one process" in said(capsys, *argv, code=2)
    assert "--backend gloo or nccl" in said(capsys, *argv, "--train_size", "8000", code=2)
    argv += ["--train_size", "8000", "--backend", "nccl"]
    assert "--gradient_mb" in said(capsys, *argv, code=2)
    found = json.loads(said(capsys, *argv, "--gradient_mb", "438"))
    assert "a gradient of 438 MB (--gradient_mb)" in found["assumed"]
    assert any("only batch 16" in line for line in found["assumed"])
    assert found["step_low_s"] is None and 0 < found["efficiency"] <= 1


def test_two_nodes_of_others_from_their_one_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two epochs of ImageNet on a T4 and on two nodes with one each, as a course published them (UC
    Berkeley W251, homework 9, 2021): 2 h 24 min 23 s and 1 h 14 min 47 s. Model and link are not
    stated: the gradient of ResNet-18 and 10 Gbit/s.
    """
    one_s, two_s = 2 * 3600 + 24 * 60 + 23, 3600 + 14 * 60 + 47
    file = text_file(tmp_path, f"times=[{one_s / 2},{one_s / 2}]\n", "1_1_0.001_256.txt", "vit")
    root = str(tmp_path / "imported")
    assert main(["import", str(file), "--source", "w251", "--output_dir", root]) == 0
    capsys.readouterr()
    flags = ["--link", "10gbit,0.1ms", "--gradient_mb", "46.8", "--train_size", "1281167"]
    flags += ["--backend", "nccl", "--sharing", "0", "--epochs", "2"]
    found = json.loads(said(capsys, root, "--setup", "2_1", *flags, "--json"))
    assert 2 * found["epoch_s"] == pytest.approx(two_s, rel=0.05)


# ---- what is refused ----


@pytest.mark.parametrize(("argv", "words"), [
    (["--setup", "8_1"], "the link between them is not known"),
    (["--setup", "8"], "expected N_M"),
    (["--setup", "200000_1", *FAR], "100,000 nodes at most"),
    (["--setup", "2_1", *FAR, "--strategy", "hivemind"], "not modelled"),
    (["--setup", "2_1", *FAR, "--strategy", "magic"], "there is single"),
    (["--setup", "2_1", "--link", "20ms,loss1%"], "not modelled"),
    (["--setup", "3_1", "--link", "2+1:within=lan:between=continent"], "give the slowest"),
    (["--setup", "2_1", "--link", "20"], "expected none, 20ms"),
    (["--setup", "2_1", *FAR, "--fragments", "3"], "must divide --sync_every"),
    (["--setup", "2_1", *FAR, "--deadline", "3"], "go with --advise"),
    (["--setup", "2_1", *FAR, "--advise"], "one of them"),
    (["--setup", "2_1", *FAR, "--advise", "--budget", "9"], "needs --cost_per_gpu_hour"),
    (["--setup", "2_1", *FAR, "--batch", "0"], "--batch 0: must be at least 1"),
    (["--setup", "2_1", *FAR, "--sharing", "2"], "a share, 0 to 1"),
    (["--setup", "2_1", *FAR, "--cost_per_gpu_hour", "free"], "hour free: expected a number"),
    (["--setup", "2_1", *FAR, "--plot", "curve.doc"], "png, svg or pdf"),
])  # fmt: skip
def test_mistakes(
    records: Path, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert words in said(capsys, str(records), *argv, code=2)


def test_too_few_runs_say_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, 16, 1, 2, "--lr", "1e-3")
    argv = [str(tmp_path), "--setup", "2_2", *FAR]
    text = said(capsys, *argv, code=2)
    assert "python vit.py --tiny --per_gpu_batch 16 --setup 1_1" in text
    record(tmp_path, 16)
    text = said(capsys, *argv, "--batch", "64", code=2)
    assert "--setup 1_1 --per_gpu_batch 64" in text
    text = said(capsys, *argv)
    command = next(part for part in text.splitlines() if "one more: " in part).split("more: ")[1]
    words = shlex.split(command)[2:]
    assert parse("vit", words, {}).per_gpu_batch == 32
    # Without several processes on a machine nothing is known of them, unless it is said.
    alone = tmp_path / "alone"
    record(alone, 16)
    assert "measure --setup 1_2" in said(capsys, str(alone), "--setup", "2_2", *FAR, code=2)
    assert "(--sharing)" in said(capsys, str(alone), "--setup", "2_2", *FAR, "--sharing", "0.05")
    text = said(capsys, str(alone), "--setup", "2_1", *FAR, "--advise", "--deadline", "9")
    assert "2_1" in text


def test_no_records_and_unlike_ones(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--setup", "2_1", *FAR]
    assert "there is no such folder" in said(capsys, str(records / "no"), *argv, code=2)
    record(records, 16, machine="b-gpux1")
    assert "2 kinds of machine (a-cpux2, b-gpux1)" in said(capsys, str(records), *argv, code=2)
    other = records.parent / "other"
    record(other, 16)
    record(other, 16, 1, 1, "--precision", "bf16")
    text = said(capsys, str(other), *argv, code=2)
    assert f"differ in precision (bf16, fp32): name one kind, for example {other}:" in text
    assert "vit-nano" in said(capsys, f"{other}:precision=fp32", *argv)


def test_a_training_set_too_small_or_unknown(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(said(capsys, str(records), "--setup", "999_1", *FAR, "--json"))
    assert found["updates"] == 0 and found["epoch_s"] is None and found["cost"] is None
    for file in records.rglob("environment.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "data": None}))
    argv = [str(records), "--setup", "2_1", *FAR]
    assert "epoch        not known" in said(capsys, *argv)
    assert "give --train_size" in said(capsys, *argv, "--advise", "--deadline", "1", code=2)


def test_commands_of_the_readme(root: Path, records: Path, monkeypatch: pytest.MonkeyPatch,
                                capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    text = re.sub(r"\\\n\s*", "", (root / "README.md").read_text())
    commands = re.findall(r"^python -m harness (predict [^#\n]*)", text, re.MULTILINE)
    assert len(commands) >= 3
    monkeypatch.chdir(records.parent)
    for command in commands:
        _, folder, *rest = shlex.split(command)
        assert folder == "outputs"
        said(capsys, folder, *rest)
