"""One value decides what runs: the command line, the settings file and the run's name agree."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from harness.core.command_line import command_line, help_text, parse, to_argv, trainer_flags
from harness.core.identity import SHOWN_ONLY, identity, number, run_id
from harness.core.refused import REFUSED
from harness.core.settings import (
    IF_SET,
    Settings,
    UserError,
    as_mapping,
    flag_fields,
    nearest,
    parse_setup,
)
from harness.core.strategies import OF_ONE_STRATEGY, STRATEGIES
from harness.core.tasks import TASKS
from tests.support.settings import ALONE, launched, refusal

# Written out on purpose: a new flag, or a new name for one, must be a decision.
FLAGS = """
model model_name_or_path | from_scratch | dropout | lora | max_length | image_size | batchnorm
trust_remote_code | dataset dataset_name | dataset_config dataset_config_name | text_column
image_column | label_column | train_size max_train_samples | test_size max_eval_samples | test_split
validation_split | data_seed | tail | augment | tiny | per_gpu_batch b per_device_train_batch_size
grad_acc gradient_accumulation_steps | auto_batch | epochs num_train_epochs | lr learning_rate
muon | seed | precision
rank_dropout | padding | eval_batch per_device_eval_batch_size | strategy | setup | fsdp_shard
fsdp_offload | elastic_batch | balance | compress | exchange | sync_every | sync_first | sync_scope
outer_lr | outer_momentum | fragments | overlap | target_batch | local_updates | initial_peers
repeat run | num_workers dataloader_num_workers | log_every logging_steps
telemetry_hz | hang_after | peak_tflops | comm_probe | save
best_metric metric_for_best_model | output_dir o out | rerun
"""
# The same for the flags that reach the Trainer: an upgrade that brings one more fails here.
PASSED = """
activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon
dataloader_in_order dataloader_multiprocessing_context dataloader_persistent_workers
dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_bucket_cap_mb ddp_static_graph
ddp_timeout debug disable_tqdm eval_accumulation_steps eval_do_concat_batches
full_determinism gradient_checkpointing gradient_checkpointing_kwargs hub_model_id
hub_private_repo hub_revision include_for_metrics label_smoothing_factor
length_column_name liger_kernel_config log_level log_level_replica log_on_each_node
logging_first_step logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps
neftune_noise_alpha optim optim_args optim_target_modules project push_to_hub report_to run_name
save_on_each_node save_steps skip_memory_metrics torch_compile torch_compile_backend
torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id
trackio_static_space_id use_cache use_cpu use_liger_kernel warmup_steps weight_decay
"""
# Names from the example scripts of transformers, which TrainingArguments does not know.
OF_THE_EXAMPLES = {
    *("model_name_or_path", "dataset_name", "dataset_config_name"),
    *("max_train_samples", "max_eval_samples", "b", "o", "out"),
}
KINDS: dict[str, Any] = {
    **{"text": "some thing", "count": 160, "natural": 3, "seed": 11, "size": 123},
    **{"positive": 1.23456789e-07, "share": 0.25, "rate": 2.5, "seconds": 3.5, "bool": True},
}
# Fields whose other value must fit the world of two nodes with two processes.
FITTING = {
    "strategy": "fsdp",
    "best_metric": "f1",
    "balance": "2,1,1,1",
    "compress": "powersgd:2",
    "initial_peers": "/ip4/10.0.0.1/tcp/40123/p2p/12D3KooW",
    "fragments": 5,
    "overlap": 3,
    "setup": "2_2_P100far",
    "test_split": "0.25",
    "validation_split": "0.1",
}


def another(name: str) -> Any:
    """A value of this field that is not its default."""
    meta = flag_fields()[name].metadata
    return FITTING.get(name) or (meta["choices"] or (KINDS[meta["kind"]],))[-1]


@pytest.mark.parametrize("name", flag_fields())
def test_every_flag_survives_the_command_line(name: str) -> None:
    field, value = flag_fields()[name], another(name)
    assert value != field.default
    script = "vit" if field.metadata["input"] == "image" else "bert"
    owners = [s.name for s in STRATEGIES.values() if name in s.own]
    needs = {"strategy": "fsdp"} if name.startswith("fsdp") else {}
    needs |= {"strategy": owners[-1]} if owners else {}
    settings = Settings(script=script, **{**needs, name: value})
    parsed = parse(script, to_argv(settings), launched(2, 2))
    assert getattr(parsed, name) == value
    assert parse(script, to_argv(parsed), launched(2, 2)) == parsed
    for alias in field.metadata["names"]:
        assert getattr(parse(script, [f"--{alias}={value}"], launched(2, 2)), name) == value


PASSED_THROUGH: list[tuple[list[str], Any]] = [
    (["--warmup_steps", "100"], 100),
    (["--adam_epsilon", "1.23456789e-08"], 1.23456789e-08),
    (["--max_grad_norm", "1.0"], 1),
    (["--torch_compile"], True),
    (["--torch_compile", "false"], False),
    (["--optim_target_modules", "query", "value"], ("query", "value")),
    (["--lr_scheduler_kwargs", '{"num_cycles": 2}'], '{"num_cycles": 2}'),
    (["--lr-scheduler-type", "cosine"], "cosine"),
    (["--run_name", "1_2"], "1_2"),
    (["--run_name", "007"], "007"),
]


@pytest.mark.parametrize(("argv", "value"), PASSED_THROUGH)
def test_flags_of_the_trainer_survive_the_command_line(argv: list[str], value: Any) -> None:
    settings = parse("bert", argv, ALONE)
    name = argv[0].lstrip("-").replace("-", "_")
    assert settings.trainer == ((name, value),)
    assert type(settings.trainer[0][1]) is type(value)
    assert parse("bert", to_argv(settings), ALONE) == settings


def test_a_home_that_the_shell_has_left_to_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in --model=~/m, and in a settings file."""
    monkeypatch.setenv("HOME", "/home/me")
    argv = ["--model=~/m", "--output_dir=~/runs", "--dataset=~/d.csv", "--run_name=~/kept"]
    settings = parse("bert", argv, ALONE)
    assert (settings.model, settings.output_dir) == ("/home/me/m", "/home/me/runs")
    assert settings.dataset == "/home/me/d.csv" and settings.trainer == (("run_name", "~/kept"),)
    (file := tmp_path / "mine.yaml").write_text("model: ~/m\noutput_dir: ~/runs\n")
    of_file = parse("bert", [str(file)], ALONE)
    assert (of_file.model, of_file.output_dir) == ("/home/me/m", "/home/me/runs")


def test_our_flags_are_these() -> None:
    frozen = [tuple(flag.split()) for flag in FLAGS.replace("\n", " | ").split("|") if flag.strip()]
    assert [(name, *f.metadata["names"]) for name, f in flag_fields().items()] == frozen
    assert len({alias for names in frozen for alias in names}) == sum(map(len, frozen))


def test_every_flag_of_the_trainer_is_ours_refused_or_passed() -> None:
    installed = {f.name for f in dataclasses.fields(TrainingArguments)}
    assert set(trainer_flags()) == installed  # read from the source text, without importing it
    ours = {a for name, f in flag_fields().items() for a in (name, *f.metadata["names"])}
    assert installed - ours - set(REFUSED) == set(PASSED.split())
    assert not ours & set(REFUSED)
    assert set(REFUSED) <= installed
    assert set(SHOWN_ONLY) <= set(PASSED.split())
    aliases = {a for f in flag_fields().values() for a in f.metadata["names"]}
    assert aliases - installed - {"run"} == OF_THE_EXAMPLES


@pytest.mark.parametrize("name", REFUSED)
def test_refused_flags_are_answered_with_the_reason(name: str) -> None:
    assert refusal([f"--{name}", "1"]) == f"--{name} is not taken: {REFUSED[name]}"


def test_every_field_is_used(root: Path) -> None:
    read: set[str] = set()
    scripts = [root / f"{name}.py" for name in ("bert", "vit", "logcallback")]
    for file in [*scripts, *(root / "harness").rglob("*.py")]:
        if file.name != "settings.py":
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("settings"):
                    read.add(node.attr)
    # What belongs to one strategy is asked for by its own name there.
    assert set(flag_fields()) - read - set(OF_ONE_STRATEGY) == set()


PINNED = Settings(
    script="bert", model="google-bert/bert-base-uncased", dataset="fancyzhx/ag_news",
    train_size=8000, test_size="all", per_gpu_batch=16, grad_acc=2, epochs=3, lr=2e-5,
    max_length=512, strategy="ddp", setup="2_2", repeat=2, precision="bf16", exchange="backend",
    trainer=(("lr_scheduler_type", "cosine"), ("report_to", "none")),
)  # fmt: skip


def test_run_id_is_stable() -> None:
    # Another name than this one would orphan the records of all earlier runs.
    assert run_id(PINNED) == "bert-base-uncased_ddp_b16_acc2_lr2e-05_e3_s42_bf16_r2_6a55fe37"
    spellings = ["--lr 2e-5", "--lr=0.00002", "--lr 2E-05", "--learning_rate=2.0e-5"]
    names = {run_id(parse("bert", words.split(), ALONE)) for words in spellings}
    assert len(names) == 1


def test_an_option_that_is_declared_so_is_named_only_where_it_is_set() -> None:
    """A new option then leaves the names of all runs without it as they are."""
    flags = {name: flag for name, flag in flag_fields().items() if flag.metadata["identity"]}
    where_set = {name for name, flag in flags.items() if flag.metadata["identity"] == IF_SET}
    assert where_set == {"lora", "balance", "sync_first", "muon"}
    assert not any(flags[name].default for name in where_set)
    assert {*flags} - {"tiny"} - where_set == {*identity(PINNED)} - {"script", "trainer"}
    for name in where_set:
        assert identity(replace(PINNED, **{name: 0})) == identity(PINNED), name
        told = replace(PINNED, **{name: another(name)})
        assert identity(told) == {**identity(PINNED), name: another(name)}, name


def test_run_id_tells_apart_what_changes_the_result() -> None:
    seen = {run_id(PINNED)}
    shown = {
        *("initial_peers", "output_dir", "rerun", "save", "best_metric", "telemetry_hz", "tiny"),
        "hang_after",
        "auto_batch",
        *("comm_probe", "peak_tflops"),
    }
    for name in flag_fields():
        other = run_id(replace(PINNED, **{name: another(name)}))
        assert (other in seen) == (name in shown), name
        seen.add(other)
    close = [replace(PINNED, lr=lr) for lr in (2.00000001e-5, 2.00000002e-5)]
    others = [replace(PINNED, script="vit"), replace(PINNED, trainer=()), *close]
    for i, other_settings in enumerate(others):
        assert run_id(other_settings) not in seen, i
        seen.add(run_id(other_settings))


def test_with_a_validation_set_the_kept_weights_are_part_of_the_run_id() -> None:
    """They decide what is tested at the end; without one nothing depends on them."""
    chosen = [("last", "accuracy"), ("best", "accuracy"), ("best", "f1"), ("last", "f1")]
    for split, count in ((None, 1), ("0.1", 3)):
        one = replace(PINNED, validation_split=split)
        names = {run_id(replace(one, save=save, best_metric=by)) for save, by in chosen}
        assert len(names) == count, split


def test_an_eval_batch_that_the_device_chooses_does_not_change_the_run_id() -> None:
    """The id must not depend on the device; only another number makes it another run."""
    assert PINNED.eval_batch is None
    assert run_id(replace(PINNED, eval_batch=64)) == run_id(PINNED)
    assert run_id(replace(PINNED, eval_batch=512)) != run_id(PINNED)


def test_no_augmentation_has_one_name() -> None:
    assert PINNED.augment is None
    assert run_id(replace(PINNED, augment="none")) == run_id(PINNED)


def test_run_id_ignores_how_a_run_is_shown() -> None:
    for name in SHOWN_ONLY:
        trainer = tuple(sorted({**dict(PINNED.trainer), name: "other"}.items()))
        assert run_id(replace(PINNED, trainer=trainer)) == run_id(PINNED), name


def test_number_keeps_every_digit() -> None:
    assert [number(v) for v in (2e-5, 0.00002, 1e-3, 16, "all")] == (
        ["2e-05", "2e-05", "0.001", "16", "all"]
    )
    for value in (1.23456789e-05, 1234567.5, 0.1 + 0.2):
        assert float(number(value)) == value


def test_settings_file_and_command_line(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "lr: 3e-5\ngradient-accumulation-steps: 2\nsetup: 1_1\ntrain_size: all\nepochs: null\n"
        "warmup-steps: 10\ntorch_compile: true\nlr_scheduler_kwargs: {num_cycles: 2}\n"
        "optim_target_modules: [query, value]\ntrainer: {weight_decay: 0.1}\n"
    )
    settings = parse("bert", [str(file), "--learning-rate", "4e-5", "--weight_decay=0.2"], ALONE)
    assert (settings.lr, settings.grad_acc, settings.setup) == (4e-5, 2, "1_1")
    assert (settings.train_size, settings.epochs) == ("all", TASKS["bert"].defaults["epochs"])
    assert dict(settings.trainer) == {
        "warmup_steps": 10, "torch_compile": True, "lr_scheduler_kwargs": '{"num_cycles": 2}',
        "optim_target_modules": ("query", "value"), "weight_decay": 0.2,
    }  # fmt: skip


WAYS = "--strategy ddp has none, bf16, fp16, int8, int4, powersgd[:rank]"
UNFIT = {
    "--strategy fsdp --compress bf16": "does not go with --strategy fsdp, but with ddp (bf16, fp16",
    "--strategy fsdp --optim adafactor": "--optim adafactor does not go with --strategy fsdp",
    "--strategy single --compress none:1": "does not go with --strategy single",
    "--strategy diloco --compress powersgd": "--strategy diloco has none, bf16, int8",
    "--compress int2": f"--compress int2: {WAYS}",
    "--compress zip": f"--compress zip: {WAYS}",
    "--compress none:1": f"--compress none:1: {WAYS}",
    "--compress bf16:2": f"--compress bf16:2: {WAYS}",
    "--compress powersgd:": f"--compress powersgd:: {WAYS}",
    "--compress powersgd:0": f"--compress powersgd:0: {WAYS}",
    "--compress powersgd:two": f"--compress powersgd:two: {WAYS}",
    "--compress powersgd:4 --precision fp16": "does not go with --precision fp16",
}


@pytest.mark.parametrize("words", UNFIT)
def test_a_compression_that_does_not_fit_is_refused(words: str) -> None:
    assert UNFIT[words] in refusal(words.split(), launched(2, 1))


def test_a_compression_that_fits_is_taken() -> None:
    for words in ("none", "bf16", "fp16", "powersgd", "powersgd:32"):
        assert parse("bert", ["--compress", words], launched(2, 1)).compress == words
    # One training has one name.
    assert parse("bert", ["--compress", "powersgd:1"], launched(2, 1)).compress == "powersgd"


BAD_FILES = {
    "lr: 1e-3\nlearning_rate: 2e-3": ["contradicts"],
    "lr: [1e-3, 2e-3]": ["lr takes one value"],
    "lr: {a: 1}": ["--lr"],
    "trainer: 5": ["trainer"],
    "- lr": ["lr: 3e-5"],
    "script: vit": ["vit.py", "bert.py"],
    "lr: 1\nb: [": ["line"],
    "lr: 1\nreport_to: [a\nb: 2": ["a.yml line 2: not readable as YAML: the [ in this line is not"],
    "trainer:\n\tlr: 1": ["a.yml line 2 is indented with a tab: YAML takes spaces"],
    f"lr: {'[' * 5000}": ["nested too deeply"],
    "lrr: 1": ["--lrr", "did you mean --lr?"],
    "lr:3e-5\nb: 2": ["a.yml line 1: write a space after the colon: lr: 3e-5"],
    "b: 2\n\nlr:3e-5\n\nseed: 1": ["a.yml line 3: write a space after the colon: lr: 3e-5"],
    "b: 2: 3": ["a.yml line 1: not readable as YAML: mapping values"],
    "b: 2\nhttp://x\nlr: 1": ["a.yml line 3: not readable as YAML"],
    "b: 0": ["at least 1"],
}


@pytest.mark.parametrize("text", BAD_FILES, ids=lambda text: text[:20])
def test_wrong_settings_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(text)
    message = refusal([str(tmp_path / "a.yml")])
    assert all(word in message for word in BAD_FILES[text]), message


@pytest.mark.parametrize("script", ["bert", "vit"])
def test_print_settings_is_a_settings_file(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--tiny", "--lr", "1.23456789e-3", "--warmup_steps", "5", "--setup=1_1_here"]
    argv += ["--lr_scheduler_kwargs", '{"num_cycles": 2}', "--optim_target_modules", "a", "b"]
    with pytest.raises(SystemExit) as left:
        command_line(script, [*argv, "--print-settings"])
    printed = capsys.readouterr().out
    assert left.value.code == 0 and json.loads(printed)["lr"] == 1.23456789e-3
    (tmp_path / "a.json").write_text(printed)
    settings = parse(script, argv, ALONE)
    assert parse(script, [str(tmp_path / "a.json")], ALONE) == settings
    assert json.loads(json.dumps(as_mapping(settings))) == json.loads(printed)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit):
        command_line(script, [*argv, "--print_settings"])
    assert capsys.readouterr().out == ""  # one rank speaks


@pytest.mark.parametrize("columns", [80, 100, 200])
@pytest.mark.parametrize("script", ["bert", "vit"])
def test_help(script: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_text(script)
    assert max(map(len, text.splitlines())) <= columns
    ours, passed, refused = re.split(r"\nFlags of transformers.*|\nRefused,.*", text)

    def flags(part: str) -> set[str]:
        return set(re.findall(r"^  --(\w+)", part, re.M))

    mine = {
        n: f for n, f in flag_fields().items() if f.metadata["input"] in ("", TASKS[script].input)
    }
    assert flags(ours) == {*mine, "print_settings", "list_models", "help"}
    assert flags(passed) == set(PASSED.split()) and flags(refused) == set(REFUSED)
    entries = dict(re.findall(r"^  --(\w+)((?:.*\n {28})*.*)", ours, re.M))
    for name, f in mine.items():
        words = " ".join(entries[name].split())
        assert all(part in words for part in f.metadata["help"].split("-")), name
        default = f.default if f.default is not None else TASKS[script].defaults.get(name)
        if f.metadata["kind"] != "bool" and default is not None and "/" not in str(default):
            assert f"({number(default)})" in words, name
    assert "a image" not in text


@pytest.mark.parametrize(
    "setup", ["1_2\n", "\uff11_\uff12", "1_\u0662", "0_1", "1_2_", "1_2_a b", "1_2_far\n"]
)
def test_an_invalid_setup_is_refused(setup: str) -> None:
    with pytest.raises(UserError, match="expected N_M or N_M_tag"):
        parse_setup(setup)


def test_setup_is_split_into_its_parts() -> None:
    assert parse_setup("2_1_P100far") == (2, 1, "P100far") and parse_setup("1_4") == (1, 4, "")
    with pytest.raises(UserError, match=r"--setup 1_1_a+\.\.\.: 254 characters, 100 are the most"):
        parse_setup(f"1_1_{'a' * 250}")


def test_letters_in_another_order_are_the_nearest_name() -> None:
    assert nearest("tyni", ["timeout", "tiny", "yes"]) == "did you mean tiny?"
    assert nearest("zzz", ["a", "b"]) == "there are a, b"
