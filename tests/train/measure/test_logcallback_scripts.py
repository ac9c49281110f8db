"""LogCallback alone: what it takes from arguments and models of scripts of anybody's."""

from __future__ import annotations

import dataclasses
import fcntl
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from harness.core.records import RunFolder, read_json, read_rows, write_json
from harness.core.settings import UserError
from harness.core.topology import batch_of_trainer, per_gpu_batch_of_trainer
from harness.read.records.runs import read_run
from harness.train.measure import telemetry
from harness.train.measure.environment import model_name, recorded_settings, resolved_arguments
from logcallback import LogCallback
from tests.support.ranks import ranks
from tests.support.recorded import alone, environment_of, rows_of, train, trainer_for
from tests.support.toys import CPU, Net, Points

pytestmark = pytest.mark.process


def settings_of(folder: str | Path) -> dict[str, Any]:
    return read_json(RunFolder(Path(folder)).settings) or {}


def on_gpus(folder: str, gpus: int) -> None:
    """On a machine without GPUs nn.DataParallel hands all of a batch to the model."""
    telemetry.uuids = lambda devices: []  # type: ignore[assignment]
    args = TrainingArguments(
        f"{folder}-checkpoints", num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    assert args.device.type == "cpu"
    args._n_gpu = gpus
    data = Points(64)
    Trainer(Net(), args, train_dataset=data, callbacks=[LogCallback(folder)]).train()


def test_all_gpus_of_data_parallel_count(tmp_path: Path) -> None:
    folder, _ = alone(tmp_path, on_gpus, 4)
    for row in rows_of(folder):
        assert row["effective_batch"] == 16
        assert row["train_samples_per_s_per_gpu"] == pytest.approx(row["train_samples_per_s"] / 4)
    environment, settings = environment_of(folder), settings_of(folder)
    assert environment["observed"] == {"strategy": "dp", "devices": 4}
    assert environment["nodes"] == environment["processes_per_node"] == 1
    assert (settings["setup"], settings["strategy"]) == ("1_4", "dp")
    run = read_run(RunFolder(Path(folder)), {}, "dp", None)
    assert (run.state, run.processes, run.devices) == ("finished", 1, 4)
    one, _ = alone(tmp_path / "one", on_gpus, 1)
    other = read_run(RunFolder(Path(one)), {}, "one", None)
    assert other.devices == 1 and "observed" not in other.environment
    assert other.identity != run.identity


def test_a_quantized_model_is_not_spread() -> None:
    args: Any = TrainingArguments("out", use_cpu=True)
    assert args.device.type == "cpu"
    args._n_gpu = 4
    world: Any = SimpleNamespace(nodes=1, per_node=1)
    for model, setup in ((Net(), "1_4"), (SimpleNamespace(is_loaded_in_8bit=True), "1_1")):
        assert recorded_settings(None, args, world, model, [])["setup"] == setup


def split_batches(folder: str) -> list[int]:
    net = Net()
    config = {"split_batches": True}
    trainer = trainer_for(
        folder, net, Points(22), accelerator_config=config, per_device_train_batch_size=8
    )
    trainer.train()
    return [len(batch) for batch in net.fed]


def test_a_batch_that_the_ranks_split_counts_once(tmp_path: Path) -> None:
    folder = str(tmp_path / "record")
    assert ranks(2, split_batches, folder, env=CPU) == [[4] * 6] * 2
    for row in rows_of(folder):
        assert (row["effective_batch"], row["samples"], row["fed_samples"]) == (8, 22, 24)
    assert rows_of(folder)[1]["timed_samples"] == 22
    settings = settings_of(folder)
    assert settings["per_gpu_batch"] == 4
    assert settings["training_arguments"]["per_device_train_batch_size"] == 8
    starts = [r for r in read_rows(RunFolder(Path(folder)).attempts)[0] if r["event"] == "start"]
    assert [row["per_gpu_batch"] for row in starts] == [4]
    assert read_run(RunFolder(Path(folder)), {}, "split", None).other_batches == ()


@pytest.mark.parametrize(
    ("config", "batch"),
    [(None, 24), ("accelerator.json", 24), ({"split_batches": False}, 24),
     ({"split_batches": True}, 12), (SimpleNamespace(split_batches=True), 12)],
)  # fmt: skip
def test_the_batch_by_any_form_of_the_argument(config: Any, batch: int) -> None:
    args = SimpleNamespace(
        per_device_train_batch_size=4, train_batch_size=4, gradient_accumulation_steps=3,
        world_size=2, accelerator_config=config,
    )  # fmt: skip
    assert batch_of_trainer(args) == batch
    assert per_gpu_batch_of_trainer(args) == batch // 6


def readings(folder: Path) -> int:
    return len(read_rows(RunFolder(folder).telemetry(0))[0])


def twice(folder: str) -> None:
    for _ in range(2):
        train(folder)


def test_each_training_keeps_its_own_readings(tmp_path: Path) -> None:
    folder, _ = alone(tmp_path, twice)
    earlier = Path(f"{folder}.earlier-1")
    assert readings(Path(folder)) > 0 and readings(earlier) > 0
    for record in (Path(folder), earlier):
        (begun, *_), times = read_rows(RunFolder(record).attempts)[0], []
        times += [row["unix"] for row in read_rows(RunFolder(record).telemetry(0))[0]]
        ended = read_rows(RunFolder(record).attempts)[0][-1]["unix"]
        assert max(times) <= ended + 1 and min(times) >= begun["unix"] - 10


def refused(folder: str) -> tuple[list[str], int]:
    path = RunFolder(Path(folder)).lock("run")
    path.parent.mkdir(parents=True)
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        trainer = trainer_for(folder)  # holds the callback, and what that would have started
        with pytest.raises(UserError, match="is being written by"):
            trainer.train()
        running = psutil.Process().children()
        return [p.name for p in Path(folder).rglob("*.jsonl")], len(running)


def test_a_refused_training_writes_nothing_and_leaves_no_sampler(tmp_path: Path) -> None:
    _, (written, running) = alone(tmp_path, refused)
    assert (written, running) == ([], 0)


def small(hidden: int, **more: Any) -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(vocab_size=20, hidden_size=hidden, num_hidden_layers=1, num_attention_heads=2,
                   intermediate_size=8, **more)
    )  # fmt: skip


def test_models_of_unlike_configurations_have_unlike_names(tmp_path: Path) -> None:
    one, two = small(8), small(16)
    names = [model_name(each) for each in (one, two, small(8, hidden_dropout_prob=0.2))]
    assert len({*names}) == 3 and all("BertForSequenceClassification (" in n for n in names)
    one.config.problem_type = "single_label_classification"  # as its first pass does
    one.save_pretrained(tmp_path)
    assert model_name(one) == model_name(small(8)) == names[0]
    loaded = BertForSequenceClassification.from_pretrained(tmp_path)
    assert model_name(loaded) == str(tmp_path)
    assert model_name(Net()) == "Net"


@dataclasses.dataclass
class Arguments(TrainingArguments):
    """Somebody's own, as many scripts have them."""

    wandb_api_key: str = ""
    client_secret: str | None = None
    max_tokens: int = 512
    tokenizer_name: str = ""
    tracker: dict[str, Any] = dataclasses.field(default_factory=dict)
    cache: Path = Path("somewhere")
    text_key: str = "text"
    data_dir: str = ""
    results_dir: str = ""
    bidirectional: bool = True  # has "dir" in it
    weights: Any = dataclasses.field(default_factory=lambda: np.array([1.0, 1.0]))


def test_arguments_with_names_of_secrets_are_not_recorded() -> None:
    value = "0123456789abcdef" * 2
    more: dict[str, Any] = {"max_tokens": 64, "tokenizer_name": "other"}  # neither is a secret
    args = Arguments("out", use_cpu=True, wandb_api_key=value, client_secret=value, **more)
    world: Any = SimpleNamespace(nodes=1, per_node=1)
    settings = recorded_settings(None, args, world, Net(), [])
    assert value not in json.dumps(settings, default=str)
    assert settings["trainer"].items() >= more.items()
    arguments = resolved_arguments(args)
    assert "include_num_input_tokens_seen" in arguments and "hub_token" not in arguments


def test_secrets_inside_arguments_are_not_recorded(tmp_path: Path) -> None:
    value = "s3cr3t-Wert"  # of no service whose tokens are known by their form
    args = Arguments(
        "out", use_cpu=True, tracker={"login": {"api_key": value}, "names": ["a"]},
        lr_scheduler_kwargs={"token": value, "num_cycles": 2}, optim_args=f"a=1,token={value}",
        accelerator_config={"gradient_accumulation_kwargs": {"hub_token": value}},
    )  # fmt: skip
    world: Any = SimpleNamespace(nodes=1, per_node=1)
    settings = recorded_settings(None, args, world, Net(), [])
    write_json(tmp_path / "settings.json", settings)  # also the path, which JSON does not have
    assert value not in (tmp_path / "settings.json").read_text()
    arguments = settings["training_arguments"]
    assert arguments["tracker"] == {"login": {"api_key": "***"}, "names": ["a"]}
    assert arguments["lr_scheduler_kwargs"] == {"token": "***", "num_cycles": 2}
    assert settings["trainer"]["optim_args"] == "a=1,token=***"
    assert arguments["cache"] == "somewhere" and "cache" not in settings["trainer"]


def test_unlike_arguments_that_are_not_recorded_make_unlike_runs() -> None:
    world: Any = SimpleNamespace(nodes=1, per_node=1)

    def trainer(out: str = "out", **more: Any) -> dict[str, Any]:
        args = Arguments(out, use_cpu=True, **more)
        settings: dict[str, Any] = recorded_settings(None, args, world, Net(), [])["trainer"]
        return settings

    plain = trainer()
    assert not [value for value in plain.values() if "checksum" in str(value)]
    assert trainer("other", results_dir="a", wandb_api_key="b", run_name="c") == plain
    ways: list[dict[str, Any]] = [
        {"lr_scheduler_kwargs": {"num_cycles": 2}}, {"lr_scheduler_kwargs": {"num_cycles": 3}},
        {"optim_target_modules": ["a"]}, {"accelerator_config": {"even_batches": False}},
        {"text_key": "title"}, {"text_key": "body"}, {"data_dir": "a"}, {"data_dir": "b"},
        {"weights": np.array([1.0, 2.0])}, {"weights": np.array([1.0, 3.0])},
        {"bidirectional": False},
    ]  # fmt: skip
    each = [trainer(**way) for way in ways]
    assert all(one != other for n, one in enumerate(each) for other in [plain, *each[:n]])
    assert "title" not in json.dumps(each)


def own_arguments_in_the_identity(*names: str) -> set[str]:
    """Those of own arguments that make another run when they are changed."""
    fields = [(name, str, dataclasses.field(default="")) for name in names]
    own = dataclasses.make_dataclass("Own", fields, bases=(TrainingArguments,))
    args = own("out", use_cpu=True, **dict.fromkeys(names, "other"))
    world: Any = SimpleNamespace(nodes=1, per_node=1)
    return {*names} & {*recorded_settings(None, args, world, Net(), [])["trainer"]}


def test_whole_parts_of_a_name_tell_whether_an_argument_changes_results() -> None:
    data = ("dialog_path", "catalog_path", "logits_path", "template_path", "layout_dir",
            "rapid_path", "authors_path", "saved_model_path", "eos_token")  # fmt: skip
    places = ("log_path", "tb_log_dir", "logs_dir", "logdir", "temp_dir", "tmpdir", "out_dir",
              "outputs_path", "output_path", "cache_dir", "save_path", "results_dir", "ckpt_dir",
              "my_api_key", "auth_token", "hf_token", "my_token", "tokens", "passphrase",
              "wandb_project")  # fmt: skip
    assert own_arguments_in_the_identity(*data, *places) == {*data}
