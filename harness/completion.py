"""harness completion bash|zsh|fish: what a shell needs to complete verbs and flags."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

from harness.cli import VERBS, parser_of

START = {
    "bash": "_harness() {{\n  local words='{verbs}'\n  if ((COMP_CWORD > 1)); then\n"
    "    words=\n    case ${{COMP_WORDS[1]}} in\n",
    "zsh": "#compdef harness\n_harness() {{\n  if ((CURRENT == 2)); then\n"
    "    compadd -- {verbs}\n  elif [[ $PREFIX == -* ]]; then\n    case $words[2] in\n",
}
END = {
    # bash completes file names where no flag matches, and any word that is not a flag.
    "bash": "    esac\n  fi\n"
    '  [[ $COMP_CWORD -gt 1 && $2 != -* ]] || COMPREPLY=($(compgen -W "$words" -- "$2"))\n}\n'
    "complete -o default -F _harness harness",
    "zsh": "    esac\n  else\n    _files\n  fi\n}\ncompdef _harness harness",
}
CASE = {"bash": "      {verb}) words='{flags}' ;;", "zsh": "      {verb}) compadd -- {flags} ;;"}


def run(options: argparse.Namespace) -> int:
    lines = _fish() if options.shell == "fish" else _cases(options.shell)
    print("\n".join(lines))
    return 0


def _flags(verb: str) -> dict[str, str]:
    """The first long spelling of each flag -> its help text."""
    flags = {}
    for action in parser_of(verb)._actions:
        if names := [name for name in action.option_strings if name.startswith("--")]:
            flags[names[0]] = action.help or ""
    return flags


def _cases(shell: str) -> Iterator[str]:
    yield START[shell].format(verbs=" ".join(VERBS)).rstrip("\n")
    for verb in VERBS:
        yield CASE[shell].format(verb=verb, flags=" ".join(_flags(verb)))
    yield END[shell]


def _fish() -> Iterator[str]:
    for verb, about in VERBS.items():
        summary = shlex.quote(about.summary)
        yield f"complete -c harness -n __fish_use_subcommand -f -a {verb} -d {summary}"
        seen = f"-n '__fish_seen_subcommand_from {verb}'"
        for name, text in _flags(verb).items():
            yield f"complete -c harness {seen} -l {name[2:]} -d {shlex.quote(text)}"
