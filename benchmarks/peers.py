"""The same gradients through gradcomp and through other libraries: bytes, calls, times on real links, errors.

    sudo python benchmarks/peers.py                       # gradcomp and torch's hooks; about 4 minutes, needs root
    sudo python benchmarks/peers.py --deepspeed-python DS/bin/python --hivemind-python HM/bin/python
    sudo python benchmarks/peers.py --epfml-powersgd CHECKOUT --grace CHECKOUT
    sudo python benchmarks/peers.py --quick               # does it run? 15 seconds

The 62 gradients of a ResNet-18 (11.17 M elements): a signal of rank 4, the same on all ranks and in all steps, and noise of
half its size. All of them are one bucket; ranks are joined by shaped links (links.py), and take turns through the libraries.

``bytes``         that a rank sends per step, as its network interface counts them, with headers
``calls``         of torch.distributed per step (none are seen of hivemind, which has a network of its own)
``time``          from this rank's gradient to the mean; the slowest rank's
``error, 1``      relative error of one step's mean, the third;  ``error, 6``: of the sum of the third to the eighth, where
                  error feedback shows (torch's PowerSGD hook is uncompressed in its first two)

Environments of their own, made by hand, because the versions exclude each other (never installed by this script):

    DeepSpeed's 1-bit exchange was removed after 0.19.6:  DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.6
    hivemind:                                             pip install hivemind 'numpy<2.4'   (newer: its 8-bit fails)

GRACE and epfml/powersgd are in no package index (or empty there): give the path of a checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import exchange
import links
import schema
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

OURS = ["none", "fp16", "int8", "int4", "onebit", "topk", "powersgd:rank=1", "powersgd:rank=2", "powersgd"]

Peers = dict[str, list[Any]]
"""Name to [kind, arguments...]; see exchange.KINDS."""


def by_interpreter(arguments: argparse.Namespace) -> dict[str, Peers]:
    """What runs in which Python."""
    if arguments.quick:
        return {sys.executable: {"gradcomp int8": ["gradcomp", "int8"], "torch fp16 hook": ["torch_fp16"]}}
    here: Peers = {"all-reduce of fp32": ["all_reduce"], "torch fp16 hook": ["torch_fp16"]}
    here |= {f"torch PowerSGD hook, rank {r}": ["torch_powersgd", r] for r in (1, 2, 4)}
    here |= {f"gradcomp {spec}": ["gradcomp", spec] for spec in OURS}
    if arguments.epfml_powersgd:
        path = str(arguments.epfml_powersgd.resolve())
        for rank, iterations in ((1, 1), (2, 2), (4, 2)):
            here[f"epfml PowerSGD, rank {rank}, {iterations} iterations"] = ["epfml_powersgd", path, rank, iterations]
    if arguments.grace:
        path = str(arguments.grace.resolve())
        here |= {f"GRACE {name}": ["grace", path, name] for name in exchange.GRACE}
    found = {sys.executable: here}
    if arguments.deepspeed_python:
        found[arguments.deepspeed_python] = {"DeepSpeed 1-bit": ["deepspeed_onebit"]}
    if arguments.hivemind_python:
        kinds = ["fp16", "8-bit", "powersgd 4"]
        found[arguments.hivemind_python] = {f"hivemind {kind}": ["hivemind", kind] for kind in kinds}
    return found


def measure(
    python: str, peers: Peers, gigabits: float, arguments: argparse.Namespace, note: Any
) -> tuple[list[dict[str, Any]], dict[str, str], str | None]:
    """What rank 0 said of each peer, the versions of what it imported, and what went wrong."""
    said: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    steps, parameters = (1, 4) if arguments.quick else (max(exchange.SUM_OF, arguments.steps), None)

    def hear(line: str) -> None:
        message = json.loads(line) if line.startswith("{") else {}
        if "peer" in message:
            said.append(message)
        elif "versions" in message:
            versions.update(message["versions"])
        elif "step" in message:
            note(message["step"] / (exchange.SKIP + steps))

    plan = {"peers": peers, "steps": steps, "seed": arguments.seed, "parameters": parameters}
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    try:
        with links.star(arguments.ranks, gigabits) as star:
            star.launch([python, exchange.__file__, json.dumps(plan)], hear, environment)
    except (links.LinksError, OSError) as error:
        return said, versions, str(error)
    return said, versions, None


def row(
    name: str, message: dict[str, Any] | None, gigabits: float, arguments: argparse.Namespace, versions: dict[str, str],
    error: str | None,
) -> schema.Row:  # fmt: skip
    config = {"peer": name, "gigabits": gigabits, "ranks": arguments.ranks, "gradients": "resnet18",
              "cpu_limited": gigabits >= links.CPU_LIMITED}  # fmt: skip
    if message is None or "error" in message:
        why = message["error"] if message else error or "rank 0 reported nothing"
        return schema.Row.make(
            "peers", config=config, seed=arguments.seed, measured={}, error=why[-500:], versions=versions
        )
    measured = {
        "exchange_ms": schema.quantiles(message["ms"]),
        "cpu_ms": schema.quantiles(message["cpu_ms"]),
        "link_bytes": message["bytes"],
        "calls": message["calls"] or None,
        "error_of_one": float(f"{message['error_of_one']:.3g}"),
        "error_of_sum": float(f"{message['error_of_sum']:.3g}"),
    }
    return schema.Row.make("peers", config=config, seed=arguments.seed, measured=measured, versions=versions)


def show(console: Console, rows: list[schema.Row], gigabits: float) -> None:
    table = Table("peer", title=f"{gigabits:g} Gb/s, ResNet-18's gradients")
    for heading in ("MB sent", "calls", "ms p20/p50/p80", "CPU ms", "error, 1", "error, 6"):
        table.add_column(heading, justify="right")
    for one in rows:
        name = str(one.config["peer"])
        if one.error is not None:
            table.add_row(name, f"failed: {one.error.splitlines()[-1][:70]}")
            continue
        time = one.measured["exchange_ms"]
        assert isinstance(time, schema.Quantiles)
        table.add_row(
            name,
            f"{one.number('link_bytes') / 1e6:.3f}",
            str(one.measured["calls"] or ""),
            f"{time.p20:.0f}/{time.p50:.0f}/{time.p80:.0f}",
            f"{one.number('cpu_ms'):.0f}",
            f"{one.number('error_of_one'):.3g}",
            f"{one.number('error_of_sum'):.3g}",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabits", type=float, nargs="+", default=[0.1, 1.0, 10.0], help="speeds of the links")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=exchange.SUM_OF, help="timed steps, at least 6")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deepspeed-python", help="interpreter of an environment with deepspeed 0.19.6")
    parser.add_argument("--hivemind-python", help="interpreter of an environment with hivemind")
    parser.add_argument("--epfml-powersgd", type=Path, help="checkout of github.com/epfml/powersgd")
    parser.add_argument("--grace", type=Path, help="checkout of github.com/sands-lab/grace")
    parser.add_argument("--quick", action="store_true", help="one link, two peers, a few parameters, one step")
    parser.add_argument("--out", type=Path, help="append the rows to this file, as JSON lines")
    arguments = parser.parse_args()
    try:
        links.isolate()
    except links.LinksError as error:
        print(f"peers.py: {error}", file=sys.stderr)
        return 2
    failed, console = False, Console(width=None if sys.stdout.isatty() else 150)
    speeds = [1.0] if arguments.quick else arguments.gigabits
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for gigabits in speeds:
            rows = []
            for python, peers in by_interpreter(arguments).items():
                task = progress.add_task(f"{gigabits:g} Gb/s: {', '.join(peers)[:60]}", total=1.0)
                said, versions, error = measure(
                    python, peers, gigabits, arguments, lambda part, task=task: progress.update(task, completed=part)
                )
                progress.remove_task(task)
                by_name = {message["peer"]: message for message in said}
                rows += [row(name, by_name.get(name), gigabits, arguments, versions, error) for name in peers]
            show(console, rows, gigabits)
            failed = failed or any(one.error for one in rows)
            if arguments.out:
                schema.append(arguments.out, rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
