"""A sweep file says what is to be measured, and every mistake in it is shown where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.core.links import Link, link_of
from harness.core.settings import UserError
from harness.launch.sweepfile import Sweep, load
from tests.support.sweeps import sweep_file


def loaded(folder: Path, text: str, tiny: bool = False, installed: str = "") -> Sweep:
    return load(sweep_file(folder, text), tiny, installed=lambda name: name == installed)


def test_every_key_is_read_and_typed(tmp_path: Path) -> None:
    sweep = loaded(
        tmp_path,
        """
# Question: which batch
#           is it?
# Runs: 4
#
# Of whom nothing is asked.
# Hypothesis: the small
# one.
script: [bert, vit]
settings: {epochs: 3, report_to: [tensorboard, wandb]}
bert: {max_length: 64}
grid:
  b: [4, 16]
  learning-rate: [2e-5, 0.0002]
  setup: [1_1, 2_2_far]
  link: [none, 20 ms/1gbit]
runs:
  - {strategy: ddp}
  - {strategy: fsdp, script: vit}
exclude:
  - {per_device_train_batch_size: 4}
seeds: [2, 42]
order: [setup]
baseline: {setup: 1_1}
target: {metric: f1, value: 0.9}
expect:
  - {of: {b: 4}, against: {b: 16, strategy: fsdp}, measure: f1, at_least: -1, at_most: 2}
  - {of: {link: 20 ms/1gbit}, measure: tta_wall_s, at_most: 1e-1}
hold: effective_batch
lr_rule: sqrt
columns: [wall_s]
per_node: true
""",
    )
    assert sweep.name == "mine" and sweep.scripts == ("bert", "vit")
    assert sweep.settings["bert"] == {
        "epochs": 3, "report_to": ("tensorboard", "wandb"), "max_length": 64
    }  # fmt: skip
    assert sweep.settings["vit"] == {"epochs": 3, "report_to": ("tensorboard", "wandb")}
    # Names as the settings have them; a set-up is no number.
    assert sweep.grid == {
        "per_gpu_batch": [4, 16], "lr": [2e-5, 2e-4], "setup": ["1_1", "2_2_far"],
        "link": [Link(), Link(20.0, 1000.0)], "seed": [2, 42],
    }  # fmt: skip
    assert sweep.runs == [{"strategy": "ddp"}, {"script": "vit", "strategy": "fsdp"}]
    assert sweep.exclude == [{"per_gpu_batch": 4}]
    assert sweep.order == ("setup",) and sweep.baseline == {"setup": "1_1"}
    assert sweep.target == {"metric": "f1", "value": 0.9}
    against = {"per_gpu_batch": 16, "strategy": "fsdp"}
    assert sweep.expect == [
        {"of": {"per_gpu_batch": 4}, "against": against, "measure": "f1",
         "at_least": -1.0, "at_most": 2.0},
        {"of": {"link": link_of("20ms/1gbit")}, "against": None, "measure": "tta_wall_s",
         "at_least": None, "at_most": 0.1},
    ]  # fmt: skip
    assert (sweep.hold, sweep.lr_rule, sweep.per_node) == ("effective_batch", "sqrt", True)
    assert sweep.columns == ["wall_s"]
    assert sweep.header == {
        "question": "which batch is it?", "hypothesis": "the small one.", "runs": "4"
    }  # fmt: skip


def test_tiny_replaces_whole_keys(tmp_path: Path) -> None:
    text = """
script: vit
settings: {epochs: 3, model: resnet-18}
grid: {lr: [1, 2]}
tiny:
  settings: {epochs: 1}
"""
    assert loaded(tmp_path, text).settings["vit"] == {"epochs": 3, "model": "resnet-18"}
    tiny = loaded(tmp_path, text, tiny=True)
    assert tiny.settings["vit"] == {"epochs": 1} and tiny.grid == {"lr": [1.0, 2.0]}
    assert tiny.tiny and tiny.name == "mine-tiny"


def test_what_is_used_where_a_package_is_installed(tmp_path: Path) -> None:
    text = "script: vit\nsettings: {model: a}\nif_installed: {timm: {model: b, epochs: 2}}\n"
    assert loaded(tmp_path, text).settings["vit"] == {"model": "a"}
    assert loaded(tmp_path, text, installed="timm").settings["vit"] == {"model": "b", "epochs": 2}


LINKS = [
    ("none", Link(), "none"),
    ("20ms", Link(20), "20ms"),
    ("0.5ms/200mbit", Link(0.5, 200), "0.5ms/200mbit"),
    ("25gbit", Link(0, 25000), "25000mbit"),
    ({"delay_ms": "20", "rate_mbit": "200"}, Link(20, 200), "20ms/200mbit"),
]


@pytest.mark.parametrize(("value", "link", "text"), LINKS)
def test_links(value: Any, link: Link, text: str) -> None:
    assert link_of(value) == link and str(link) == text
    assert link_of(text) == link


@pytest.mark.parametrize(
    "value", ["", "/", "fast", "20", "-1ms", "0mbit", "1..2ms", {"delay": "1"}, {"delay_ms": "x"},
              {"rate_mbit": "0"}, {"delay_ms": "-1"}]
)  # fmt: skip
def test_wrong_links(value: Any) -> None:
    with pytest.raises(UserError, match="link"):
        link_of(value)


def test_a_baseline_names_its_strategys_flags_that_are_off(tmp_path: Path) -> None:
    """`compress: none` is what a run has that does not name it, as for `compare`."""
    runs = "runs: [{strategy: ddp}, {strategy: ddp, compress: bf16}]\n"
    text = "script: vit\n{}baseline: {{strategy: ddp, compress: none}}"
    assert loaded(tmp_path, text.format(runs)).baseline == {"strategy": "ddp"}
    named = text.format(runs.replace("{strategy: ddp}", "{strategy: ddp, compress: none}"))
    assert loaded(tmp_path, named).baseline == {"strategy": "ddp", "compress": "none"}


# With a baseline, whose next line is the fourth.
EXPECT = "script: vit\ngrid: {setup: [1_1, 1_2]}\nbaseline: {setup: 1_1}\n"
WRONG = {
    "nothing": ("", "expected keys such as script and grid"),
    "a list": ("- script", "expected keys"),
    "broken": ("script: [vit", "line 1: not readable as YAML: expected ',' or ']', but got"),
    "a bracket of another line": (
        "script: vit\ngrid:\n  setup: [1_1, 1_2\n  lr: [1]",
        "line 3: not readable as YAML: the [ in this line is not closed, or lacks a comma, before "
        "line 4: expected ',' or ']', but got ':'",
    ),
    "a missing comma": (
        "script: vit\ngrid: {lr: [1]\n  b: [2]}",
        "line 2: not readable as YAML: the { in this line is not closed, or lacks a comma, before "
        "line 3: expected ',' or '}', but got '<scalar>'",
    ),
    "a bracket without an end": (
        "script: vit\ngrid: {lr: [1, 2}\n",
        "line 2: not readable as YAML: expected ',' or ']', but got '}'",
    ),
    "a bracket until the end": (
        "script: vit\nseeds: [1,\n  2\n\n",
        "line 2: not readable as YAML: the [ in this line is not closed before the end"
    ),
    "a quotation mark": (
        "script: 'vit\ngrid: {}",
        "line 1: not readable as YAML: the ' in this line is not closed before"
    ),
    "two documents": ("{script: vit}\n---\n{}", "line 2: not readable as YAML: but found another"),
    "a tab": ("script: vit\ngrid:\n\tlr: [1]", "yaml line 3 is indented with a tab: YAML takes"),
    "a tab in a list": ("script: vit\nseeds:\n- 1\n \t- 2", "line 4 is indented with a tab"),
    "a tab after a colon": ("script: vit\ngrid:\n  lr:\t[1]", "line 3 has a tab: YAML takes"),
    "no space": (
        "# a\n\nscript:bert\ngrid: {}",
        "yaml line 3: write a space after the colon: script: bert",
    ),
    "no space below": (
        "script: bert\nsettings:\n  # a\n  label_column:sentiment\n\n  lr: 1",
        "yaml line 4: write a space after the colon: label_column: sentiment",
    ),
    "no space in braces": (
        "script: bert\nsettings: {lr: 1, label_column:sentiment}",
        "yaml line 2: write a space after the colon: label_column: sentiment",
    ),
    "no space in a list": ("script: vit\nruns:\n- setup:1_1", "line 3: write a space after the c"),
    "no space alone": ("script: vit\nsettings:\n  lr:1", "write a space after the colon: lr: 1"),
    "no text": ("script: \x07", "not readable as YAML: special characters are not allowed"),
    "no script": ("grid: {}", "script is missing"),
    "a script with a long name": (f"script: {'a' * 300}", f"line 1: unknown script {'a' * 300}"),
    "unknown script": ("script: vitt", "line 1: unknown script vitt: did you mean vit?"),
    "script twice": ("script: [vit, vit]", "name each script once"),
    "key": ("script: vit\n\ngird: {}", "line 3: unknown key gird: did you mean grid?"),
    "link at the top": ("script: vit\nlink: 20ms", "unknown key link: it belongs under grid"),
    "hypothesis": ("script: vit\nhypothesis: 16", "it is a comment above the keys"),
    "far key": ("script: vit\nzzz: 1", "line 2: unknown key zzz: there are script"),
    "key in tiny": ("script: vit\ntiny:\n  gird: {}", "line 3: unknown key gird"),
    "tiny": ("script: vit\ntiny: 3", "line 2: tiny: expected keys"),
    "a mapping as key": (
        "script: vit\nsettings: {{epochs: 3}}",
        "line 2: expected a name before each colon (are { } doubled?)",
    ),
    "a list as key": ("script: vit\n? [a, b]\n: 1", "expected a name before each colon"),
    "no value": (
        "script: vit\ngrid: {validation_split: [0.1, null]}",
        "line 2: validation_split: null is no value: leave validation_split out",
    ),
    "no value as ~": ("script: vit\nsettings: {lr: ~}", "line 2: lr: ~ is no value"),
    "a key twice": ("script: vit\ngrid: {}\ngrid: {}", "line 3: grid is given twice"),
    "setting": (
        "script: vit\ngrid:\n  setup: [1_1]\n  per_gpu_bach: [1]",
        "line 4: unknown flag --per_gpu_bach: did you mean --per_gpu_batch?",
    ),
    "value": (
        "script: vit\ngrid:\n  per_gpu_batch:\n    - 1\n    - two",
        "line 5: --per_gpu_batch two: expected a whole number",
    ),
    "setup": (
        "script: vit\ngrid:\n  setup:\n    - 1_1\n    - 12",
        "line 5: --setup 12: expected N_M or N_M_tag (N nodes of M processes), did you mean 1_2?",
    ),
    "setup of all runs": ("script: vit\nsettings: {setup: 2x10}", "line 2: --setup 2x10: expected"),
    "choice": ("script: vit\nsettings: {strategy: dpp}", "line 2: --strategy dpp: expected one of"),
    "other script": (
        "script: [vit, bert]\nsettings: {max_length: 9}",
        "line 2: --max_length is a flag of bert.py",
    ),
    "refused": ("script: vit\nsettings: {logging_dir: x}", "line 2: "),
    "output_dir": ("script: vit\nsettings: {output_dir: x}", "given on the command line: --output"),
    "settings": ("script: vit\nsettings: 5", "line 2: expected names and values"),
    "same setting twice": ("script: vit\nsettings: {b: 1, per_gpu_batch: 2}", "is given twice"),
    "grid": ("script: vit\ngrid: [1]", "line 2: expected names and lists"),
    "axis twice": ("script: vit\ngrid: {b: [1], per_gpu_batch: [2]}", "is given twice"),
    "value twice": ("script: vit\ngrid: {lr: [2e-5, 0.00002]}", "lr 0.00002 is given twice"),
    "no values": ("script: vit\ngrid: {lr: []}", "line 2"),
    "runs": ("script: vit\nruns: {setup: 1_1}", "runs is a list of points"),
    "run": ("script: vit\nruns: [1_1]", "expected names and values"),
    "run of no script": ("script: vit\nruns: [{script: bert}]", "script bert is not one of"),
    "grid and runs": (
        "script: vit\ngrid: {setup: [1_1]}\nruns: [{setup: 1_2}]",
        "line 3: setup is in grid already",
    ),
    "grid and settings": (
        "script: vit\ngrid: {lr: [1]}\nsettings: {lr: 2}",
        "line 2: lr is in settings already",
    ),
    "seeds": ("script: vit\nseeds: [1, x]", "line 2: --seed x: expected a whole number"),
    "one seed": ("script: vit\nseeds: 3", "line 2: seeds 3: write [3] for this seed alone, or"),
    "seeds twice": ("script: vit\nseeds: [1]\ngrid: {seed: [2]}", "line 2: seed is in grid"),
    "order": (
        "script: vit\ngrid: {setup: [1_1]}\norder: [steup]",
        "line 3: unknown key steup: did you mean setup?",
    ),
    "baseline": ("script: vit\nbaseline: {setup: 1_1}", "line 2: setup does not vary"),
    "target": ("script: vit\ntarget: 0.9", "line 2: expected {metric: accuracy, value: 0.9}"),
    "target value": ("script: vit\ntarget: {metric: f1, value: x}", "line 2: expected {metric"),
    "target in per cent": (
        "script: vit\ntarget: {metric: accuracy, value: 90}",
        "line 2: accuracy lies between 0 and 1, not at 90: for 90 % write 0.9",
    ),
    "target above 1": (
        "script: vit\ntarget: {metric: accuracy, value: 1.5}",
        "line 2: accuracy lies between 0 and 1, not at 1.5: write 0.9 for 90 %",
    ),
    "target above 100": (
        "script: vit\ntarget: {metric: accuracy, value: 101}",
        "accuracy lies between 0 and 1, not at 101: write 0.9 for 90 %",
    ),
    "target of 2 per cent": ("script: vit\ntarget: {metric: f1, value: 2}", "for 2 % write 0.02"),
    "target metric": (
        "script: vit\ntarget:\n  value: 1\n  metric: acuracy",
        "line 4: unknown metric acuracy: did you mean accuracy?",
    ),
    "expect": (f"{EXPECT}expect: {{of: 1_1}}", "line 4: expect is a list of points"),
    "expect nothing": (f"{EXPECT}expect: [1_1]", "line 4: expected {of: {setup: 1_2}, measure: "),
    "expect of what": (f"{EXPECT}expect: [{{measure: f1, at_most: 1}}]", "line 4: expected {of: "),
    "expect key": (
        f"{EXPECT}expect:\n  - {{of: {{setup: 1_2}}, measure: f1, at_last: 1}}",
        "line 5: unknown key at_last: did you mean at_least?",
    ),
    "expect measure": (
        f"{EXPECT}expect:\n  - of: {{setup: 1_2}}\n    at_most: 1\n    measure: acuracy",
        "line 7: unknown measure acuracy: did you mean accuracy?",
    ),
    "expect way": (
        f"{EXPECT}expect: [{{of: {{lr: 1}}, measure: f1, at_most: 1}}]",
        "line 4: lr does not vary: of names values of grid or runs",
    ),
    "expect target": (
        f"{EXPECT}expect: [{{of: {{setup: 1_2}}, measure: tta_wall_s, at_most: 1}}]",
        "line 4: tta_wall_s needs a target: there is none",
    ),
    "expect baseline": (
        "script: vit\ngrid: {setup: [1_1, 1_2]}\n"
        "expect: [{of: {setup: 1_2}, measure: f1, at_most: 1}]",
        "line 3: there is no baseline: name against, too",
    ),
    "expect no bound": (
        f"{EXPECT}expect: [{{of: {{setup: 1_2}}, measure: f1}}]", "line 4: give at_least, at_most"
    ),
    "expect no number": (
        f"{EXPECT}expect: [{{of: {{setup: 1_2}}, measure: f1, at_most: x}}]",
        "line 4: at_most x: expected a number of percentage points",
    ),
    "expect not finite": (
        f"{EXPECT}expect: [{{of: {{setup: 1_2}}, measure: f1, at_least: nan}}]",
        "line 4: at_least nan: expected a number of percentage points",
    ),
    "expect ratio": (
        f"{EXPECT}expect: [{{of: {{setup: 1_2}}, measure: train_samples_per_s, at_least: -5}}]",
        "line 4: at_least -5: expected a ratio above 0",
    ),
    "expect no way": (
        f"{EXPECT}expect: [{{of: {{}}, measure: f1, at_most: 1}}]",
        "line 4: of names no value of grid or runs",
    ),
    "expect no run": (
        f"{EXPECT}expect:\n  - {{of: {{setup: 4_4}}, measure: f1, at_most: 1}}",
        "line 5: no run has setup 4_4",
    ),
    "expect script": (
        f"{EXPECT}expect: [{{of: {{script: vit}}, measure: f1, at_most: 1}}]",
        "line 4: script does not vary",
    ),
    "baseline seed": ("script: vit\nseeds: [1, 2]\nbaseline: {seed: 1}", "seed does not vary"),
    "several values": (
        "script: vit\nsettings: {lr: [0.1, 0.2]}", "line 2: --lr takes one value, not 2: 0.1, 0.2"
    ),
    "expect order": (
        f"{EXPECT}expect: [{{of: {{setup: 1_2}}, measure: f1, at_least: 2, at_most: 1}}]",
        "line 4: give at_least, at_most or both, the smaller one first",
    ),
    "hold": ("script: vit\nhold: batch", "hold batch: expected one of per_gpu_batch, effective"),
    "lr_rule": ("script: vit\nlr_rule: quadratic", "lr_rule quadratic: expected one of none"),
    "columns": ("script: vit\ncolumns: wall_s", "line 2: expected a list of names"),
    "per_node": ("script: vit\nper_node: 2", "per_node 2: expected one of false, true"),
    "link": ("script: vit\ngrid: {link: [fast]}", "line 2: link fast: expected none, 20ms"),
    "if_installed": ("script: vit\nif_installed: timm", "line 2: expected a package"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    text, message = WRONG[name]
    with pytest.raises(UserError) as error:
        loaded(tmp_path, text)
    assert str(tmp_path / "mine.yaml") in str(error.value)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    sweep_file(tmp_path, "script: vit", "batch_size")
    with pytest.raises(
        UserError, match=rf"does not exist; did you mean {tmp_path}/batch_size.yaml"
    ):
        load(tmp_path / "batchsize.yaml")
    with pytest.raises(
        UserError, match=r"^batch_size does not exist; did you mean experiments/batch"
    ):
        load(Path("batch_size"))
    with pytest.raises(UserError, match=r"quite_another.yaml does not exist$"):
        load(tmp_path / "quite_another.yaml")
    with pytest.raises(UserError, match=rf"^{tmp_path} is a folder: sweep takes a file"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("# é".encode("latin-1"))
    with pytest.raises(UserError, match="it is not UTF-8"):
        load(tmp_path / "latin.yaml")


def test_aliases_that_hold_themselves_or_double_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 4: an alias \(\*\) stands inside what it stands"):
        loaded(tmp_path, "script: vit\ngrid: &g\n  seed: [1]\n  link: *g\n")
    doubling = [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    lines = ["script: vit", "settings:", "  a0: &a0 [1, 1]", *doubling]
    with pytest.raises(UserError, match="more than 100,000 values: are aliases"):
        loaded(tmp_path, "\n".join(lines))
    with pytest.raises(UserError, match="nested too deeply"):
        loaded(tmp_path, f"script: {'[' * 5000}")
    again = loaded(tmp_path, "script: vit\nsettings: {seed: &s 3}\ngrid: {repeat: [1, *s]}")
    assert again.grid == {"repeat": [1, 3]}
