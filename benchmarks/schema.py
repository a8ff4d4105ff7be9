"""The one format of benchmark results: JSON lines, each a :class:`Row`.

    row = schema.Row.make("network", config={"hook": "int8", "gigabits": 1.0}, seed=0, measured={"step_ms": quantiles(times)})
    schema.append(path, [row])

A row says what was run (``config``, ``seed``), on what (``machine``, ``versions``, ``date``) and what came of it
(``measured``). A run that failed gets a row as well, with ``error`` saying why and whatever was measured until then.
Rows are checked when they are made and when they are read: unknown fields, NaN and infinity are refused.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

import gradcomp

RESULTS = Path(__file__).resolve().parent / "results"
_STRICT = ConfigDict(extra="forbid", frozen=True)


class Quantiles(BaseModel):
    """Of ``n`` repeated measurements."""

    model_config = _STRICT
    p20: FiniteFloat
    p50: FiniteFloat
    p80: FiniteFloat
    n: Annotated[int, Field(ge=1)]


class Machine(BaseModel):
    """What times depend on. ``load``: the one-minute load average when the row was made."""

    model_config = _STRICT
    cpu: str
    cores: Annotated[int, Field(ge=1)]
    memory_gb: float
    system: str
    avx512: bool
    huge_pages: str
    load: float
    gpu: str | None = None


Plain: TypeAlias = bool | int | FiniteFloat | str | None
Value: TypeAlias = Quantiles | bool | int | FiniteFloat | str | list[list[FiniteFloat]] | None
"""One number, quantiles of several, or a curve: points of equal length."""


class Row(BaseModel):
    """One result. Names of what was measured end in their unit: ``_ms``, ``_bytes``; ratios and errors have none."""

    model_config = _STRICT
    benchmark: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    date: datetime.date
    machine: Machine
    versions: dict[str, str]
    config: dict[str, Plain | list[Plain]]
    seed: Annotated[int, Field(ge=0)]
    measured: dict[str, Value]
    error: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Row:
        if not self.measured and self.error is None:
            raise ValueError("a row without measurements must say in `error` why")
        return self

    @classmethod
    def make(
        cls,
        benchmark: str,
        *,
        config: Mapping[str, Any],
        seed: int,
        measured: Mapping[str, Any],
        error: str | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> Row:
        """A row of today, this machine and these versions; ``versions`` are added (a peer's, from another environment)."""
        return cls(
            benchmark=benchmark,
            date=datetime.datetime.now(datetime.timezone.utc).date(),
            machine=machine(),
            versions={**installed(), **(versions or {})},
            config=dict(config),
            seed=seed,
            measured=dict(measured),
            error=error,
        )

    def number(self, name: str) -> float:
        """What was measured under ``name``: the number, or the median."""
        value = self.measured[name]
        value = value.p50 if isinstance(value, Quantiles) else value
        if not isinstance(value, int | float):
            raise TypeError(f"{name} is {value!r}, not a number")
        return float(value)


def quantiles(values: Sequence[float], digits: int = 4) -> Quantiles:
    """The 20 %, 50 % and 80 % quantiles, rounded to ``digits`` significant digits."""
    ordered = sorted(values)
    p20, p50, p80 = (float(f"{ordered[round(q * (len(ordered) - 1))]:.{digits}g}") for q in (0.2, 0.5, 0.8))
    return Quantiles(p20=p20, p50=p50, p80=p80, n=len(ordered))


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a file, which is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(row.model_dump_json(exclude_defaults=True) + "\n" for row in rows)


def read(path: Path) -> list[Row]:
    """All rows of a file.

    Raises:
        ValueError: a line is no row; the message says which line and field.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            rows.append(Row.model_validate_json(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return rows


def machine() -> Machine:
    """This one."""
    cpu: dict[str, str] = {}
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        cpu = {key.strip(): value.strip() for key, _, value in lines}
    name = cpu.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in cpu:
        name += f" (family {cpu['cpu family']}, model {cpu['model']})"
    huge = ""
    with contextlib.suppress(OSError):
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        huge = text.partition("[")[2].partition("]")[0]
    return Machine(
        cpu=name,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        system=f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        avx512="avx512f" in cpu.get("flags", "").split(),
        huge_pages=huge,
        load=round(os.getloadavg()[0], 1),
    )


def installed() -> dict[str, str]:
    """Versions that results depend on."""
    found = {"python": platform.python_version(), "gradcomp": gradcomp.__version__}
    for name in ("torch", "numpy", "numba", "deepspeed"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
