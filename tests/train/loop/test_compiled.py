"""--torch_compile compiles what is trained, in the updates that are left out of the rates."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.core.records.redact import redacted
from harness.core.settings import UserError
from harness.train.loop.compiling import Compiled, what_it_brings
from harness.train.run.failures import outcome_of, what_ended
from tests.support.broken_runs import only_run
from tests.support.ranks import script

# 10 whole updates an epoch and an evaluation whose last batch is short.
ARGV = ["--tiny", "--train_size", "320", "--test_size", "101", "--epochs", "2", "--dropout", "0"]


PASSES = ("compiled_pass_s", "eager_pass_s")


def trained(folder: Path, count: int, *more: str) -> tuple[Any, Any]:
    argv = [*ARGV, "--b", str(32 // count), "--save", "none", *more, "--o", str(folder)]
    done = script("vit", *argv, count=count)
    assert done.code == 0, done.err
    run = only_run(folder)
    return run.read_epochs()[0], run.read_environment()


def check(tmp_path: Path, count: int, *more: str) -> None:
    plain, environment = trained(tmp_path / "plain", count)
    assert "compiled_graphs" not in environment["observed"]
    rows, environment = trained(tmp_path / "compiled", count, "--torch_compile", *more)
    observed = environment["observed"]
    assert observed["compiled_graphs"] >= 1 and observed["dtype"] == "float32"
    # Neither the evaluation nor the second epoch compiles anything again.
    assert observed["compiled_in_updates"] == [1] and environment["timing_warmup_steps"] >= 1
    assert observed["compile_s"] > 0
    # Several processes would compile once more for passes alone.
    assert [observed.get(name, 0.0) > 0 for name in PASSES] == [count == 1] * 2
    for row, other in zip(rows, plain, strict=True):
        assert row["timed_steps"] == other["timed_steps"]
        for name in ("train_loss", "eval_loss", "grad_norm"):
            assert row[name] == pytest.approx(other[name], rel=1e-3), name


@pytest.mark.process
def test_compiled_once_and_trained_alike(tmp_path: Path) -> None:
    """Without code for the machine, which takes a compiler and half a minute."""
    check(tmp_path, 1, "--torch_compile_backend", "eager")


@pytest.mark.process
def test_texts_of_many_lengths_are_compiled_once(tmp_path: Path) -> None:
    """A shape that is not said to vary is compiled for its numbers alone, and the next again."""
    words = ["one", "two", "three", "four"]
    rows = [f'"{" ".join(words * (1 + n % 11))}",{n % 2}' for n in range(80)]
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    argv = ["--tiny", "--dataset", str(tmp_path / "texts.csv"), "--train_size", "64", "--b", "2"]
    argv += ["--test_size", "16", "--epochs", "1", "--save", "none", "--o", str(tmp_path / "out")]
    done = script("bert", *argv, "--torch_compile", "--torch_compile_backend", "eager", count=1)
    assert done.code == 0, done.err
    observed = only_run(tmp_path / "out").read_environment()["observed"]
    assert observed["compiled_graphs"] == 1 and observed["compiled_in_updates"] == [1]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("count", [1, 2])
def test_compiled_to_code_of_the_machine(count: int, tmp_path: Path) -> None:
    check(tmp_path, count)


@pytest.mark.parametrize("inside", [True, False])
def test_code_that_was_cut_off_is_removed(
    inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill leaves it while the linker writes. torch wraps the error of its loader."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    library = tmp_path / ("cache/ab/cut.main.so" if inside else "cut.main.so")
    library.parent.mkdir(parents=True, exist_ok=True)
    library.write_bytes(b"\x7fELF")
    spec = importlib.util.spec_from_file_location("cut", library)
    assert spec is not None
    with pytest.raises(ImportError) as refused:
        importlib.util.module_from_spec(spec)
    raised = RuntimeError("InductorError")
    raised.__cause__ = refused.value
    context: Any = SimpleNamespace(
        args=SimpleNamespace(torch_compile=True), folder=SimpleNamespace(path=tmp_path)
    )

    def refuse(*args: object, **more: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        assert what_ended(raised, context) is raised
    ended = what_ended(raised, context)
    assert library.exists() != inside
    if inside:
        assert isinstance(ended, UserError)
        assert str(ended) == (
            f"{library}, which torch compiled, is damaged and was removed: the same command "
            "compiles it again"
        )
        assert outcome_of(ended) == ("failed", redacted(str(ended)))
    else:
        assert ended is raised


def test_a_model_that_is_not_compiled_is_not_recorded_as_one() -> None:
    with pytest.raises(RuntimeError, match="asked for --torch_compile"):
        Compiled(None, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("eager_s", "line"),
    [
        (0.16, "a pass is 1.60 times as fast: it pays after 10.0 epochs"),
        (0.101, "a pass is 1.01 times as fast: no more than noise"),
        (0.08, "a pass is 0.80 times as fast: it costs time"),
    ],
)
def test_from_which_epoch_compiling_pays(eager_s: float, line: str) -> None:
    observed = {"compile_s": 60.0, "compiled_pass_s": 0.1, "eager_pass_s": eager_s}
    assert what_it_brings(observed, passes=100) == f"compiling took 60 s, and {line}"
    padded = {**observed, "padding_reason": "on a CPU, and runs have many shapes to compile"}
    more = "; without it, texts would not be padded, which is not counted"
    assert what_it_brings(padded, passes=100) == f"compiling took 60 s, and {line}{more}"


class Slow(nn.Linear):
    """Lacks memory where it is not compiled."""


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("could not create a primitive"),
        MemoryError(),
    ],
)
def test_passes_that_lack_memory_say_nothing(error: Exception) -> None:
    callback = Compiled.__new__(Compiled)
    trainer: Any = SimpleNamespace(
        rehearsal=contextlib.nullcontext,
        args=SimpleNamespace(device=SimpleNamespace(type="cpu")),
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> None:
        if isinstance(model, Slow):
            raise error

    trainer.training_step = step
    fields = {"trainer": trainer, "batch": None, "pass_s": {}, "seen": 1, "before": 0,
              "updates": [1], "compiling_s": [9.0], "others_s": [1.0, 3.0]}  # fmt: skip
    vars(callback).update(fields, model=SimpleNamespace(_orig_mod=Slow(1, 1)))
    callback._try_both()
    assert callback.observed == {
        "compiled_graphs": 1, "compiled_in_updates": [1], "compile_s": 7.0,
    }  # fmt: skip
