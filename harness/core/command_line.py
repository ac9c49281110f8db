"""The command line, generated from Settings: flags, values, --help.

Written by hand rather than with argparse because three kinds of flags meet here: our own, the
Trainer's (passed through), and those Trainer flags that would falsify a comparison (refused), and
because every mistake should be answered by one line that names the nearest flag.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import gc
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from harness.core.identity import number
from harness.core.process import (
    begin_work,
    complain,
    end_with_parent,
    install_quit_handlers,
    is_leader,
    print_if_possible,
    quiet_when_closed,
)
from harness.core.provenance import check_inputs, without_package
from harness.core.records import plain
from harness.core.records.disk import check_writable
from harness.core.refused import MEANT, REFUSED
from harness.core.rules import fit_to_world, resolve
from harness.core.settings import (
    TEXT_OF_BOOL,
    NodeError,
    Settings,
    UserError,
    as_mapping,
    flag_fields,
    mistake_in_yaml,
    nearest,
    share_of,
)
from harness.core.strategies import STRATEGIES, choices_of, own_strategy
from harness.core.tasks import TASKS, listing, running_script, task_of
from harness.core.topology import world_of


@functools.cache
def trainer_flags() -> dict[str, tuple[str, str, str]]:
    """Name -> (default, first sentence of its help, its type as written) of the installed
    TrainingArguments.

    Read from its source text: importing the class would load torch. Empty where transformers is
    missing, as on a login node that only launches.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return {}
    source = Path(spec.submodule_search_locations[0], "training_args.py").read_text("utf-8")
    return {
        item.target.id: (*_default_and_help(item.value), ast.unparse(item.annotation))
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def _default_and_help(value: ast.expr | None) -> tuple[str, str]:
    keywords = {k.arg: k.value for k in value.keywords} if isinstance(value, ast.Call) else {}
    default, metadata, text = keywords.get("default"), keywords.get("metadata"), ""
    if isinstance(metadata, ast.Dict) and metadata.values:
        with suppress(ValueError):
            text = str(ast.literal_eval(metadata.values[0]))
    shown = ast.unparse(default) if isinstance(default, ast.Constant) else ""
    return shown, " ".join(text.split()).split(". ")[0].rstrip(".")


NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)
# The packages outside the standard library that training imports.
NEEDED = ("torch", "transformers", "accelerate", "datasets", "evaluate", "sklearn", "psutil")


def field_of(script: str, name: str) -> str | None:
    """The settings field that a flag names; None for a Trainer flag; any other flag is refused."""
    names = names_of(script)
    if name in names:
        return names[name]
    if name in REFUSED:
        raise UserError(f"--{name} is not taken: {REFUSED[name]}")
    if name in trainer_flags():
        return None
    for other in TASKS:
        if name in names_of(other):
            raise UserError(f"--{name} is a flag of {other}.py, not of {script}.py")
    if name in MEANT:
        raise UserError(f"unknown flag --{name}: {MEANT[name]}")
    known = [*names, *trainer_flags(), *MEANT, "help", "print_settings", "list_models"]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.65)
    hint = f": did you mean --{near[0]}?" if near else f": see python {script}.py --help"
    reasons = MEANT | REFUSED
    hint += "".join(f" {reasons[other]}" for other in near if other in reasons)
    raise UserError(f"unknown flag --{name}{hint}")


def texts_of(value: Any) -> list[str]:
    """A value from a settings file, as the words that would stand on a command line."""
    if isinstance(value, dict):
        inner = {k: scalar(v) if isinstance(v, str) else v for k, v in value.items()}
        return [json.dumps(inner)]
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]


def typed(name: str, field_name: str | None, values: list[str]) -> Any:
    """The typed value of a flag; for a Trainer flag that is no text, the text decides the type."""
    if field_name is None:
        kinds = {*re.findall(r"\w+", trainer_flags()[name][2] if name in trainer_flags() else "")}
        is_text = "str" in kinds and not kinds & {"bool", "int", "float", "dict"}
        convert = str if is_text else functools.partial(scalar, is_switch="bool" in kinds)
        scalars = tuple(map(convert, values)) or (True,)
        return scalars[0] if len(scalars) == 1 else scalars
    meta = flag_fields()[field_name].metadata
    if len(values) > 1:
        raise UserError(f"--{name} takes one value, not {len(values)}: {', '.join(values)}")
    if not (text := values[0] if values else "true" if meta["kind"] == "bool" else ""):
        raise UserError(f"--{name} needs a value: {meta['help']}")
    try:
        return setting(field_name)(text)
    except BadValue as error:
        is_share = field_name == "test_size" and share_of(text) is not None
        hint = f": a share of the training split is --test_split {text}" if is_share else ""
        raise UserError(f"--{name} {error}{hint}") from None


def scalar(text: str, is_switch: bool = False) -> Any:
    if text.startswith("{"):
        try:
            return json.dumps(json.loads(text), sort_keys=True)  # in canonical form
        except ValueError:
            return text
    if text.lower() in ("true", "false") or (is_switch and text.lower() in TEXT_OF_BOOL):
        return TEXT_OF_BOOL[text.lower()]
    if not NUMBER.fullmatch(text):
        return text
    value = float(text)
    return int(text) if text.lstrip("+-").isdigit() else int(value) if value.is_integer() else value


class BadValue(argparse.ArgumentTypeError):
    """A text that its flag does not accept; argparse and typed() prepend the flag's name."""


def setting(field_name: str) -> Callable[[str], Any]:
    """The function that converts a text into a value of this setting."""
    choices = choices_of(field_name)
    if field_name == "strategy":
        known = one_of(*choices, "FILE.py:CLASS")
        return lambda text: str(Path(text)) if own_strategy(text) else known(text)
    if field_name in ("model", "dataset", "output_dir"):
        return os.path.expanduser  # shells leave the ~ of --model=~/mine to us
    return one_of(*choices) if choices else KINDS[flag_fields()[field_name].metadata["kind"]]


def one_of(*choices: str) -> Callable[[str], str]:
    def choose(text: str) -> str:
        if text in choices:
            return text
        hint = nearest(text, choices, "")
        expected = f"expected one of {', '.join(choices)}"
        raise BadValue(f"{text}: {expected}{hint and f'; {hint}'}")

    return choose


def true_or_false(text: str) -> bool:
    if text.lower() not in TEXT_OF_BOOL:
        raise BadValue(f"{text}: expected true or false")
    return TEXT_OF_BOOL[text.lower()]


def integer(text: str, least: int = 1, most: int | None = None, otherwise: str = "") -> int:
    if not re.fullmatch("[+-]?[0-9]+", text):
        raise BadValue(f"{text}: expected a whole number{otherwise}")
    value = int(text)
    if value < least:
        raise BadValue(f"{text}: must be at least {least}")
    if most is not None and value > most:
        raise BadValue(f"{text}: must be at most {most}")
    return value


def natural(text: str) -> int:
    return integer(text, 0)


def positive(text: str) -> float:
    value = _real(text)
    if not 0 < value < math.inf:
        raise BadValue(f"{text}: must be above 0")
    return value


def below(limit: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = _real(text)
        if not 0 <= value < limit:
            raise BadValue(f"{text}: must be at least 0 and below {limit:g}")
        return value

    return read


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadValue(f"{text}: expected a number") from None


KINDS: dict[str, Callable[[str], Any]] = {
    "text": str,
    "bool": true_or_false,
    "count": integer,
    "natural": natural,
    "seed": lambda text: integer(text, 0, 2**32 - 1),
    "size": lambda text: text if text == "all" else integer(text, otherwise=" or all"),
    "positive": positive,
    "rate": below(100),
    "seconds": below(1e6),
    "share": below(1),
}


def names_of(script: str) -> dict[str, str]:
    """Every way to write one of our flags in this script -> the field's name."""
    kind = task_of(script).input
    return {
        alias: name
        for name, f in flag_fields().items()
        if f.metadata["input"] in ("", kind)
        for alias in (name, *f.metadata["names"])
    }


def help_text(script: str) -> str:
    """Our flags first, in groups, each with its default; then the Trainer's."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    task = task_of(script)
    out = [
        f"usage: python {script}.py [settings.yaml] [flags]",
        f"       torchrun --standalone --nproc_per_node=2 {script}.py [flags]",
        "",
        f"{task.summary} Try: python {script}.py --tiny",
    ]
    out += _own_flags(task.input, width)
    out += ["", "Printing:"]
    out += _entry("--print_settings", "print the resolved settings and stop", width)
    out += _entry("--list_models", "print the architectures that need no download and stop", width)
    out += _entry("--help, -h", "print this and stop", width)
    out += ["", "Flags of transformers.TrainingArguments, passed through to the Trainer:"]
    for name, (default, text, _) in sorted(trainer_flags().items()):
        if name not in REFUSED and name not in names_of(script):
            out += _entry(f"--{name}", text + (f" ({default})" if default else ""), width)
    out += ["", "Refused, as they would falsify a comparison or are named otherwise here:"]
    for name, reason in REFUSED.items():
        if name in trainer_flags():
            out += _entry(f"--{name}", reason, width)
    return "\n".join(out)


def _own_flags(input: str, width: int) -> Iterator[str]:
    group = ""
    for name, f in flag_fields().items():
        meta = f.metadata
        if meta["input"] not in ("", input):
            continue
        if meta["group"] != group:
            group = meta["group"]
            yield from ("", f"{group}:")
        names = ", ".join(f"--{n}" for n in (name, *(n for n in meta["names"] if len(n) == 1)))
        default = "" if f.default is None or meta["kind"] == "bool" else f" ({number(f.default)})"
        choices = f" [{'|'.join(known)}]" if (known := choices_of(name)) else ""
        yield from _entry(names, meta["help"] + choices + default, width)
        for strategy in STRATEGIES.values() if name == "strategy" else ():
            text = f"{strategy.name}: {strategy.what}; exchanges {strategy.exchanges}"
            yield from _entry("", text, width)


def _entry(names: str, text: str, width: int) -> list[str]:
    indent = 28
    lines = textwrap.wrap(text, width - indent) or [""]
    head = f"  {names}"
    if len(head) >= indent - 1:
        return [head, *(" " * indent + line for line in lines)]
    return [head.ljust(indent) + lines[0], *(" " * indent + line for line in lines[1:])]


def parse(
    script: str, argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings from a command line, checked against the processes started; UserError if wrong."""
    argv = list(sys.argv[1:] if argv is None else argv)
    environ = os.environ if environ is None else environ
    values = {**_from_file(script, argv), **_from_argv(script, argv)}
    return fit_to_world(resolve(bare(script, values)), world_of(environ))


def bare(script: str, values: Mapping[str, Any]) -> Settings:
    """Settings with these values alone: defaults are not filled in yet."""
    trainer = tuple(sorted((k, v) for k, v in values.items() if k not in flag_fields()))
    ours = {k: v for k, v in values.items() if k in flag_fields()}
    return Settings(script=script, trainer=trainer, **ours)


def command_line(script: str, argv: Sequence[str] | None = None) -> Settings:
    """parse() for the first lines of a script: --help and mistakes end the process here.

    Without argv, the running script is used: a copy of bert.py records under its own name.
    """
    own_name = argv is None
    argv = list(sys.argv[1:] if argv is None else argv)
    flags = {a.lstrip("-").replace("-", "_") for a in argv if a.startswith("-")}
    leader = is_leader()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()  # a rank does not outlive its launcher
    try:
        if own_name:
            install_quit_handlers()  # a script loads torch next
            gc.disable()  # until start(): collection would take a fifth of that time
            print_if_possible()
            script = running_script(script)
        if printer := next((PRINTERS[name] for name in PRINTERS if name in flags), None):
            raise SystemExit(show(printer(script), leader))
        settings = parse(script, [a for a in argv if a.replace("-", "_") != "__print_settings"])
        if leader and "print_settings" not in flags:  # other ranks may have another disk
            check_inputs(settings)
            check_writable(Path(settings.output_dir))
    except (ModuleNotFoundError, UserError) as error:
        refuse(script, error, leader)
    if "print_settings" in flags:
        raise SystemExit(show(json.dumps(as_mapping(settings), indent=2), leader))
    if missing := [p for p in NEEDED if importlib.util.find_spec(p) is None]:
        refuse(script, ModuleNotFoundError(name=missing[0]), leader)
    if own_name and leader:
        begin_work("loading libraries")  # shown until start()
    return settings


# Flags that print something instead of training; if several are given, the first one here wins.
PRINTERS = {"h": help_text, "help": help_text, "list_models": listing}


def show(text: str, leader: bool) -> int:
    if leader:
        with quiet_when_closed():
            print(text)
    return 0


def refuse(script: str, error: Exception, leader: bool = True) -> NoReturn:
    """One line and exit code 2, printed by rank 0; a NodeError, by the first rank of its node."""
    leader |= isinstance(error, NodeError) and os.environ.get("LOCAL_RANK") == "0"
    error = without_package(error) if isinstance(error, ModuleNotFoundError) else error
    raise SystemExit(complain(f"{script}.py", error, leader)) from None


def print_json(value: Any) -> None:
    """Print one JSON document: null is unknown, "inf" an infinite time (a missed target)."""
    print(json.dumps(plain(value, infinite=str), indent=2, default=str))


def to_argv(settings: Settings) -> list[str]:
    """The command line from which parse() restores exactly these settings."""
    argv: list[str] = []
    for name, f in flag_fields().items():
        value = getattr(settings, name)
        if value is None or value is False or value == f.default:
            continue
        argv += [f"--{name}"] if value is True else [f"--{name}", number(value)]
    return argv + trainer_argv(settings)


def trainer_argv(settings: Settings) -> list[str]:
    """The passed-through flags, as TrainingArguments' own parser reads them."""
    argv: list[str] = []
    for name, value in settings.trainer:
        values = value if isinstance(value, (list, tuple)) else [value]
        texts = (json.dumps(v) if isinstance(v, (bool, dict)) else number(v) for v in values)
        argv += [f"--{name}", *texts]
    return argv


def _from_argv(script: str, argv: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    # Read -o as --o everywhere: a word with one dash would be taken for a value.
    names = names_of(script)
    short = re.compile("-([a-z])(=.*)?", re.DOTALL)
    argv = [f"-{w}" if (m := short.fullmatch(w)) and m[1] in names else w for w in argv]
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not word.startswith("--"):
            if position == 1 and word.endswith((".yaml", ".yml", ".json")):
                continue
            hint = nearest(word, [*names, "help"], "flags are written --name value", mark="--")
            raise UserError(f"unexpected {word!r}: {hint}")
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        values = [text] if equals else []
        field_name = field_of(script, name)
        if not equals:
            several = field_name is None
            while position < len(argv) and not argv[position].startswith("--"):
                values.append(argv[position])
                position += 1
                if not several:
                    break
        _add(settings, name, field_name, values)
    return settings


def _from_file(script: str, argv: list[str]) -> dict[str, Any]:
    """A settings file named first: the same names as the flags, in YAML or JSON."""
    if not argv or not argv[0].endswith((".yaml", ".yml", ".json")):
        return {}
    content = _read_file(Path(argv[0]))
    if (written_by := content.pop("script", script)) != script:
        raise UserError(f"settings file {argv[0]} is for {written_by}.py, not {script}.py")
    passed = content.pop("trainer", {})
    if not isinstance(passed, dict):
        raise UserError(f"settings file {argv[0]}: trainer holds {passed!r}, not names and values")
    settings: dict[str, Any] = {}
    for name, value in [*content.items(), *passed.items()]:
        if value in ("", "null", "~"):
            continue  # not set: the default holds, whichever script the field belongs to
        name = str(name).replace("-", "_")
        field_name = field_of(script, name)
        values = texts_of(value)
        if field_name is not None and len(values) != 1:
            raise UserError(f"settings file {argv[0]}: {name} takes one value, not {values}")
        _add(settings, name, field_name, values)
    return settings


def _read_file(path: Path) -> dict[str, Any]:
    import yaml  # the only third-party package here, and only to read YAML

    if not path.is_file():
        raise UserError(f"settings file {path} does not exist")
    with reading_yaml(f"settings file {path}"):
        # Read all values as text, as on a command line: YAML would read the set-up 1_1 as 11.
        root = (loader := yaml.BaseLoader(path.read_text("utf-8"))).get_single_node()
        content = root and loader.construct_document(root)
    if root is None or not isinstance(content, dict):
        raise UserError(f"settings file {path}: expected lines such as 'lr: 3e-5'")
    within = [node for _, node in root.value if isinstance(node, yaml.MappingNode)]
    names = [[key.value for key, _ in node.value] for node in (root, *within)]
    if twice := [name for of in names for name in of if of.count(name) > 1]:
        raise UserError(f"settings file {path}: {twice[0]} is given twice")
    return content


@contextmanager
def reading_yaml(name: str) -> Iterator[None]:
    """Turn a failure to read a YAML file into a one-line UserError that begins with `name`."""
    import yaml

    try:
        yield
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{name}: not readable as YAML: it is not UTF-8") from None
    except RecursionError:
        raise UserError(f"{name}: not readable as YAML: nested too deeply") from None
    except yaml.YAMLError as error:
        raise UserError(f"{name}{mistake_in_yaml(error)}") from None


def _add(settings: dict[str, Any], name: str, field_name: str | None, values: list[str]) -> None:
    value = typed(name, field_name, values)
    if (earlier := settings.setdefault(field_name or name, value)) != value:
        raise UserError(f"--{name} {value} contradicts an earlier {earlier} for the same setting")
