"""--help: our flags in groups, then the Trainer's, then those that are refused."""

from __future__ import annotations

import shutil
import textwrap

from harness.identity import number
from harness.settings import flag_fields
from harness.strategies import STRATEGIES
from harness.trainer_flags import REFUSED, trainer_flags


def names_of(script: str) -> dict[str, str]:
    """Every way to write one of our flags in this script -> the field's name."""
    return {
        alias: name
        for name, f in flag_fields().items()
        if f.metadata["script"] in ("", script)
        for alias in (name, *f.metadata["names"])
    }


def help_text(script: str) -> str:
    """Our flags first, in groups, each with its default; then the Trainer's."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    out = [
        f"usage: python {script}.py [settings.yaml] [flags]",
        f"       torchrun --standalone --nproc_per_node=2 {script}.py [flags]",
        "",
        f"Fine-tune {'a text' if script == 'bert' else 'an image'} classifier and record what it "
        f"cost. Try: python {script}.py --tiny",
    ]
    group = ""
    for name, f in flag_fields().items():
        meta = f.metadata
        if meta["script"] not in ("", script):
            continue
        if meta["group"] != group:
            group = meta["group"]
            out += ["", f"{group}:"]
        names = ", ".join(f"--{n}" for n in (name, *(n for n in meta["names"] if len(n) == 1)))
        default = "" if f.default is None or meta["kind"] == "bool" else f" ({number(f.default)})"
        choices = f" [{'|'.join(meta['choices'])}]" if meta["choices"] else ""
        out += _entry(names, meta["help"] + choices + default, width)
        if name == "strategy":
            for strategy in STRATEGIES.values():
                text = f"{strategy.name}: {strategy.what}; exchanges {strategy.exchanges}"
                out += _entry("", text, width)
    out += ["", "Printing:"]
    out += _entry("--print_settings", "print the resolved settings and stop", width)
    out += _entry("--list_models", "print the architectures that need no download and stop", width)
    out += _entry("--help, -h", "print this and stop", width)
    out += [
        "",
        "Flags of transformers.TrainingArguments, passed through to the Trainer:",
    ]
    for name, (default, text) in sorted(trainer_flags().items()):
        if name not in REFUSED and name not in names_of(script):
            out += _entry(f"--{name}", text + (f" ({default})" if default else ""), width)
    out += ["", "Refused, because they would falsify a comparison:"]
    for name, reason in REFUSED.items():
        if name in trainer_flags():
            out += _entry(f"--{name}", reason, width)
    return "\n".join(out)


def _entry(names: str, text: str, width: int) -> list[str]:
    indent = 28
    lines = textwrap.wrap(text, width - indent) or [""]
    head = f"  {names}"
    if len(head) >= indent - 1:
        return [head, *(" " * indent + line for line in lines)]
    return [head.ljust(indent) + lines[0], *(" " * indent + line for line in lines[1:])]
