"""python -m harness import FILES: other people's records become ours, marked as imported."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.core.command_line import typed
from harness.core.identity import number
from harness.core.settings import UserError, parse_setup
from harness.read.imports.formats import read_state, read_text
from harness.read.imports.records import Foreign, folder_of, imported_in, write_record

USAGE = """usage: python -m harness import FILES [--output_dir DIR] [flags]   (outputs)

FILES: text files with a list a line (f1=[0.90,0.91]) whose name holds the settings, such as
bert/2_1_2e-05_16_P100far.txt, or the trainer_state.json of the Hugging Face Trainer

Flags say what name and content of all these files do not:
  --script bert|vit  --setup N_M[_tag]  --lr X  --batch B  --grad_acc N  --epochs N  --seed N
  --model NAME  --dataset NAME  --train_size N  --test_size N  --precision FORMAT  --strategy NAME
  --source NAME      who made them and where: their machine is then imported:NAME, and records
                     of two sources are never averaged (the format of the file)"""


# Flags by what they are called here.
SETTINGS = {
    "setup": "setup", "lr": "lr", "batch": "per_gpu_batch", "b": "per_gpu_batch",
    "per_gpu_batch": "per_gpu_batch", "grad_acc": "grad_acc", "epochs": "epochs", "seed": "seed",
    "model": "model", "dataset": "dataset", "train_size": "train_size", "test_size": "test_size",
    "precision": "precision", "strategy": "strategy",
}  # fmt: skip


OTHERS = ("script", "source", "output_dir", "o")


# Without these a record has no place, or could not be told from others.
NEEDED = {
    "callback-text": {
        "script": "--script bert or vit",
        "setup": "--setup N_M",
        "lr": "--lr",
        "per_gpu_batch": "--batch",
    },
    "trainer-state": {"script": "--script bert or vit", "setup": "--setup N_M"},
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    try:
        files, given = _words(argv)
        said = import_files(files, given)
    except UserError as error:
        # Nothing was written: every file that is wrong is named.
        for line in str(error).splitlines():
            print(f"harness import: error: {line}", file=sys.stderr)
        return 2
    print("\n".join(said))
    return 0


def _words(argv: list[str]) -> tuple[list[Path], dict[str, Any]]:
    files: list[Path] = []
    given: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        if not word.startswith("--"):
            files.append(Path(word))
            continue
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        if name not in SETTINGS and name not in OTHERS:
            known = ", ".join(f"--{n}" for n in (*SETTINGS, *OTHERS) if len(n) > 1)
            raise UserError(f"unknown flag --{name}: there are {known}")
        value = text if equals else next(words, "")
        given[_named(name)] = _typed(name, value)
    if not files:
        raise UserError("no file is named")
    return files, given


def _named(name: str) -> str:
    return "output_dir" if name == "o" else SETTINGS.get(name, name)


def _typed(name: str, text: str) -> Any:
    if not text or text.startswith("--"):
        raise UserError(f"--{name} needs a value")
    if name == "script" and text not in ("bert", "vit"):
        raise UserError(f"--script {text}: expected bert or vit")
    if name == "source" and not text.replace("-", "").replace(".", "").replace("_", "").isalnum():
        raise UserError(f"--source {text}: expected letters, digits, and . _ - between them")
    if name == "setup":
        parse_setup(text)
    return typed(name, SETTINGS[name], [text]) if name in SETTINGS else text


def import_files(files: list[Path], given: dict[str, Any]) -> list[str]:
    """A line for each file; all of them or, if one is wrong, none."""
    output_dir = Path(given.pop("output_dir", "outputs"))
    source = given.pop("source", None)
    read, wrong = [], []
    for file in files:
        try:
            read.append(_complete(_read(file), given))
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise UserError("\n".join([*wrong, "nothing was imported"]))
    known = imported_in(output_dir)
    return [_place(foreign, source, output_dir, known) for foreign in read]


def _read(file: Path) -> Foreign:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    return read_state(file, content) if file.suffix == ".json" else read_text(file, content)


def _complete(foreign: Foreign, given: dict[str, Any]) -> Foreign:
    """With what the flags say, which must not contradict what the file says."""
    found = foreign.settings
    for name, value in given.items():
        if found.get(name) not in (None, value):
            flag = "batch" if name == "per_gpu_batch" else name
            raise UserError(
                f"{foreign.file}: --{flag} {number(value)} contradicts the file, "
                f"which says {number(found[name])}: import it without"
            )
    settings = {**found, **given}
    missing = [flag for name, flag in NEEDED[foreign.format].items() if settings.get(name) is None]
    if missing:
        raise UserError(
            f"{foreign.file}: name and content do not say all: give {', '.join(missing)}"
        )
    return replace(foreign, settings=settings)


def _place(
    foreign: Foreign, source: str | None, output_dir: Path, known: dict[Path, dict[str, Any]]
) -> str:
    """One file written, unless it or another state of the same run is there."""
    for path, imported in known.items():
        if imported.get("sha256") == foreign.sha256:
            return f"already imported: {foreign.file} is {path}"
        if foreign.begins is not None and imported.get("begins") == foreign.begins:
            return (
                f"not imported: {foreign.file} is another state of the run that {path} holds; "
                "to take it instead, remove that folder"
            )
    folder = folder_of(foreign, output_dir)
    write_record(foreign, source or foreign.format, folder)
    known[folder.path] = {"sha256": foreign.sha256, "begins": foreign.begins}
    return f"imported: {foreign.file} is {folder.path}"
