"""``gradcomp demo``: the same small model trained with each compressor, and what that cost in bytes and time.

:func:`run` starts the ranks (:mod:`~gradcomp.demo.launch`), which train (:mod:`~gradcomp.demo.train`), and writes table,
picture and JSON (:mod:`~gradcomp.demo.report`, :mod:`~gradcomp.demo.plot`). Needs the extras ``cli`` and, for the picture,
``bench``.
"""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from gradcomp.demo import data
from gradcomp.demo.launch import run_ranks
from gradcomp.demo.progress import Display
from gradcomp.demo.report import Row, as_json, make_rows, print_report
from gradcomp.demo.settings import Settings
from gradcomp.demo.train import Run, train_all
from gradcomp.errors import ConfigError
from gradcomp.registry import parse_specs as parse_compressors

__all__ = ["Settings", "parse_compressors", "run"]

_NO_PLOT = "no picture: matplotlib is missing; install it with: pip install 'gradcomp[bench]'"


def run(settings: Settings, out: Path, console: Console) -> list[Row]:
    """Train with every compressor, show progress and the table, write ``demo.png`` and ``demo.json`` to ``out``.

    Raises:
        ConfigError: a bad option, or no data for the task. GradcompError: a rank failed.
    """
    begun = time.monotonic()
    source = data.describe(settings.task)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={str(out)!r}: allowed is a folder that can be written: {error}") from error
    plotting = find_spec("matplotlib") is not None
    names = ", ".join(settings.compressors)
    console.print(
        f"Training on {source}\n{settings.ranks} ranks, {settings.steps} steps each: {names}", highlight=False
    )
    if not plotting:
        console.print(_NO_PLOT, highlight=False, markup=False)

    runs: list[Run] = []
    compute: list[float] = []
    with Display(console, settings) as display:

        def on_message(kind: str, content: Any) -> None:
            display(kind, content)
            if kind == "run":
                runs.append(content[1])
            elif kind == "compute":
                compute.append(content)

        run_ranks(train_all, settings.ranks, (settings,), on_message)

    rows = make_rows(runs, compute[0], settings)
    print_report(console, rows, compute[0], source, settings)
    result = as_json(rows, compute[0], source, settings, time.monotonic() - begun)
    (out / "demo.json").write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    written = [out / "demo.json"]
    if plotting:
        from gradcomp.demo import plot

        plot.save(out / "demo.png", rows, compute[0], settings)
        written.append(out / "demo.png")
    console.print(
        f"Wrote {' and '.join(map(str, written))} after {result['seconds']:.0f} s.", highlight=False, markup=False
    )
    return rows
