"""What the commands share: a console, errors as one line, JSON. Needs the extra ``cli``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from gradcomp.errors import ConfigError, GradcompError

_WIDTH = 120  # of output that goes to a file or a pipe


def make_console() -> Console:
    """The terminal, or 120 columns where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


@contextmanager
def reporting() -> Iterator[None]:
    """Errors as one red line each, without a traceback."""
    console = Console(stderr=True, soft_wrap=True)
    try:
        yield
    except ConfigError as error:
        console.print(f"gradcomp: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    except GradcompError as error:
        console.print(f"gradcomp: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("gradcomp: interrupted; all ranks have ended", markup=False, highlight=False)
        raise typer.Exit(130) from None


def print_json(value: object) -> None:
    """Indented, to standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
