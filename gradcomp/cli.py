"""The command ``gradcomp``: demo, list, doctor, plan, probe. Needs the extra ``cli`` (typer, which brings rich).

Exit codes: 0 done, 1 something failed, 2 a bad option or a missing extra, 130 interrupted.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import MISSING, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import gradcomp
from gradcomp.errors import ConfigError
from gradcomp.registry import compressor_names, get_compressor

_MISSING = [name for name in ("typer", "rich") if find_spec(name) is None]

if not _MISSING:
    import typer
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from gradcomp.planner import commands as planner
    from gradcomp.terminal import make_console, print_json, reporting

_DEMO_HELP = """Train a small model with each compressor on this machine, and compare bytes, quality and time.

Starts the ranks as processes, trains the same model from the same seed on real data that needs no download, and ends \
with a table, demo.png and demo.json. The default run takes about two minutes on 2 cores; Ctrl-C ends all ranks.

Examples:

    gradcomp demo

    gradcomp demo --compressors "none,topk:ratio=0.02,values=fp16"

    gradcomp demo --task images --optimizer adamw --steps 300 --out results
"""
_LIST_HELP = """Show the compressors, or everything about one.

Examples:

    gradcomp list

    gradcomp list topk

    gradcomp list --json
"""
_DOCTOR_HELP = """Show versions, devices, backends and the kernel choice, test the kernels, and say what is missing.

Exits with 0 if gradients can be exchanged here and the chosen kernels work, else with 1.
"""


# ------------------------------------------------------------------------ demo
def demo(
    task: Annotated[
        str,
        typer.Option(
            help="text: a byte-level transformer on the standard library's source; images: a convolutional net."
        ),
    ] = "text",
    compressors: Annotated[
        str, typer.Option(help='Specs separated by commas, e.g. "none,int8,topk:ratio=0.02"; all: every compressor.')
    ] = "all",
    ranks: Annotated[int, typer.Option(help="Processes, each with its own share of the data.")] = 2,
    steps: Annotated[int, typer.Option(help="Training steps for each compressor.")] = 120,
    optimizer: Annotated[str, typer.Option(help="sgd (with momentum) or adamw.")] = "sgd",
    seed: Annotated[int, typer.Option(help="Of weights and batches, the same for every compressor.")] = 0,
    schedule: Annotated[str, typer.Option(help="auto, inline, pipeline, pipeline:depth=D or thread.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for demo.png and demo.json.")] = Path("gradcomp-demo"),
) -> None:
    """See ``_DEMO_HELP``."""
    with reporting():
        from gradcomp import demo as demonstration

        settings = demonstration.Settings(
            task=task,
            compressors=demonstration.parse_compressors(compressors),
            ranks=ranks,
            steps=steps,
            optimizer=optimizer,
            seed=seed,
            schedule=schedule,
        )
        demonstration.run(settings, out, make_console())


# ------------------------------------------------------------------------ list
def list_compressors(
    name: Annotated[str, typer.Argument(help="A compressor, to see its options and its maths.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """See ``_LIST_HELP``."""
    with reporting():
        if name:
            entry = describe(name)
            documentation = inspect.getdoc(inspect.getmodule(get_compressor(name))) or ""
            if as_json:
                print_json({**entry, "documentation": documentation})
            else:
                _print_one(entry, documentation)
            return
        entries, broken = [], {}
        for each in compressor_names():
            try:
                entries.append(describe(each))
            except ConfigError as error:  # a broken plug-in must not hide the others
                broken[each] = str(error)
        if as_json:
            print_json({"compressors": entries, "broken": broken})
            return
        _print_list(entries)
        for problem in broken.values():
            make_console().print(problem, style="red", markup=False, highlight=False)


def describe(name: str) -> dict[str, Any]:
    """A compressor's traits and options as plain values.

    Raises:
        ConfigError: no such compressor, or its plug-in cannot be loaded.
    """
    compressor = get_compressor(name)
    traits = compressor.traits
    kinds = get_type_hints(compressor.Config)
    return {
        "name": name,
        "summary": traits.summary,
        "bits_per_element": traits.bits,
        "memory_bytes_per_parameter": traits.memory,
        "memory_bytes_divided_among_ranks": traits.memory_sharded,
        "collectives": traits.collectives,
        "biased": traits.biased,
        "linear": traits.linear,
        "bypassed_by_default": sorted(traits.bypass),
        "reference": traits.reference,
        "options": {
            field.name: {
                "default": None if field.default is MISSING else field.default,
                "type": _type_name(kinds[field.name]),
            }
            for field in fields(compressor.Config)
        },
        "options_help": inspect.getdoc(compressor.Config) or "",
    }


def _memory(entry: dict[str, Any]) -> str:
    """Bytes per parameter, with what is divided among N ranks."""
    sharded = entry["memory_bytes_divided_among_ranks"]
    return f"{entry['memory_bytes_per_parameter']:g}" + (f" + {sharded:g}/N" if sharded else "")


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _print_list(entries: list[dict[str, Any]]) -> None:
    table = Table(header_style="bold")
    for heading in ("name", "summary"):
        table.add_column(heading)
    for heading in ("bits per\nelement", "memory bytes\nper parameter"):
        table.add_column(heading, justify="right")
    for heading in ("collectives", "biased"):
        table.add_column(heading)
    table.add_column("options", no_wrap=True)
    table.add_column("reference", overflow="fold")
    for entry in entries:
        options = "\n".join(f"{name}={_value(option['default'])}" for name, option in entry["options"].items())
        table.add_row(
            Text(entry["name"], style="bold"),
            entry["summary"],
            f"{entry['bits_per_element']:.4g}",
            _memory(entry),
            entry["collectives"],
            "yes" if entry["biased"] else "no",
            escape(options),
            escape(entry["reference"]),
        )
    console = make_console()
    console.print(table)
    console.print(
        'Use: gradcomp.register(ddp, "topk:ratio=0.02"). Options of one, and its maths: gradcomp list NAME',
        markup=False,
        highlight=False,
    )


def _print_one(entry: dict[str, Any], documentation: str) -> None:
    console = make_console()
    console.print(Text(f"{entry['name']}: {entry['summary']}", style="bold"))
    console.print(
        f"{entry['bits_per_element']:.4g} bits per element, {_memory(entry)} bytes of memory per "
        f"parameter, {entry['collectives']}, {'biased' if entry['biased'] else 'unbiased'}",
        highlight=False,
    )
    left_out = entry["bypassed_by_default"]
    console.print(f"uncompressed by default: {', '.join(left_out) if left_out else 'nothing'}\n", highlight=False)
    console.print(documentation + "\n", markup=False, highlight=False, soft_wrap=True)
    if entry["options"]:
        table = Table(header_style="bold")
        for heading in ("option", "default", "type"):
            table.add_column(heading)
        for name, option in entry["options"].items():
            table.add_row(name, _value(option["default"]), escape(option["type"]))
        console.print(table)
    console.print(entry["options_help"], markup=False, highlight=False, soft_wrap=True)


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


# ------------------------------------------------------------------------ doctor
def doctor(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """See ``_DOCTOR_HELP``."""
    from gradcomp.doctor import examine

    with reporting():
        report = examine()
    if as_json:
        print_json(report.as_dict())
    else:
        _print_report(report)
    raise typer.Exit(0 if report.usable else 1)


def _print_report(report: Any) -> None:
    console = make_console()

    def section(title: str, lines: list[str]) -> None:
        console.print(title, style="bold")
        for line in lines:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)

    section("versions", [f"{name:10} {text or 'not installed'}" for name, text in report.versions.items()])
    section("devices", report.devices)
    section("process groups", [f"{name:10} {'yes' if here else 'no'}" for name, here in report.distributed.items()])
    section("kernels", [f"{name:10} {state}" for name, state in report.kernels.items()])
    section("chosen by backend='auto'", [f"{device:10} {name}" for device, name in report.choice.items()])
    tested = dict.fromkeys((check.backend, check.device) for check in report.checks)
    lines = []
    for backend, device in tested:
        checks = [check for check in report.checks if (check.backend, check.device) == (backend, device)]
        bad = [f"{check.compressor} ({check.problem})" for check in checks if not check.ok]
        verdict = f"FAILED: {'; '.join(bad)}" if bad else f"{len(checks)} compressors equal the reference"
        lines.append(f"{backend:10} on {device}: {verdict}")
    section(f"self-test, {report.check_seconds:.1f} s", lines)
    section("missing, all optional", [f"{m.what}: {m.purpose}. {m.command}" for m in report.missing] or ["nothing"])
    console.print("usable" if report.usable else "NOT usable", style="bold green" if report.usable else "bold red")


# ------------------------------------------------------------------------ the app
def _version(show: bool) -> None:
    if show:
        sys.stdout.write(f"gradcomp {gradcomp.__version__}\n")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Gradient compression for PyTorch data-parallel training over slow links."""


def make_app() -> typer.Typer:
    """The commands as a typer application."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_root)
    app.command("demo", help=_DEMO_HELP)(demo)
    app.command("list", help=_LIST_HELP)(list_compressors)
    app.command("doctor", help=_DOCTOR_HELP)(doctor)
    app.command("plan", help=planner.PLAN_HELP)(planner.plan)
    app.command("probe", help=planner.PROBE_HELP)(planner.probe)
    return app


def main() -> None:
    """Entry point."""
    if _MISSING:
        sys.stderr.write(f"gradcomp: the command line needs {_MISSING[0]}: pip install 'gradcomp[cli]'\n")
        raise SystemExit(2)
    make_app()(prog_name="gradcomp")


if __name__ == "__main__":
    main()
