"""A command line whose mistakes are said in one line, as all others are."""

from __future__ import annotations

import argparse
from typing import NoReturn

from harness.settings import UserError


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))
