"""The plan file and the command's flags as a :class:`~gradcomp.planner.decide.Job`. Needs pydantic (extra ``cli``).

Flags override the file. Every error names field, value and what is allowed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradcomp.compressors.base import require
from gradcomp.errors import ConfigError
from gradcomp.planner import model as models
from gradcomp.planner.predict import DEFAULT_COMPRESSORS, DEFAULT_SCHEMES, Job
from gradcomp.planner.profile import Profile, assumed_network

_SPEED = re.compile(r"^\s*([0-9.]+(?:e[0-9]+)?)\s*(k|m|g|t)?\s*(bps|bit/s|b/s|bit|b)?\s*$", re.IGNORECASE)
_SIZE = re.compile(r"^\s*([0-9.]+(?:e[0-9]+)?)\s*(k|m|g|t)?(i)?(b)?\s*$", re.IGNORECASE)
_TIME = re.compile(r"^\s*([0-9.]+(?:e-?[0-9]+)?)\s*(us|ms|s)?\s*$", re.IGNORECASE)
_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def gigabits(value: str | float, field: str = "link") -> float:
    """``"10Gbps"``, ``"100 Mbit/s"`` or a number of Gb/s.

    Raises:
        ConfigError: something else, or not above 0.
    """
    found = _SPEED.match(str(value))
    allowed = "a speed such as 10Gbps, 100Mbps or 25 (Gb/s)"
    require(found is not None, field, value, allowed)
    assert found is not None
    number = _number(found[1], field, value, allowed)
    speed = number * _POWERS[(found[2] or "g").lower()] / 1e9
    require(0 < speed <= 1e5, field, value, allowed)
    return speed


def nbytes(value: str | float, field: str = "memory") -> float:
    """``"40GB"``, ``"24GiB"`` or a number of GB.

    Raises:
        ConfigError: something else, or not above 0.
    """
    found = _SIZE.match(str(value))
    allowed = "a size such as 40GB, 24GiB or 80 (GB)"
    require(found is not None, field, value, allowed)
    assert found is not None
    number = _number(found[1], field, value, allowed)
    unit = (found[2] or "g").lower()
    size = number * (1024 ** " kmgt".index(unit) if found[3] else _POWERS[unit])
    require(size > 0, field, value, allowed)
    return size


def seconds(value: str | float, field: str) -> float:
    """``"50us"``, ``"1.5 ms"`` or a number of seconds.

    Raises:
        ConfigError: something else.
    """
    found = _TIME.match(str(value))
    allowed = "a time such as 50us, 1.5ms or 0.8 (s)"
    require(found is not None, field, value, allowed)
    assert found is not None
    return _number(found[1], field, value, allowed) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[(found[2] or "s").lower()]


def _number(text: str, field: str, value: object, allowed: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{field}={value!r}: allowed is {allowed}") from None


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(_Section):
    """``params``, or ``config`` (a Hugging Face config.json), or the fields of a transformer."""

    params: float | None = None
    config: Path | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    vocabulary: int | None = None
    tied: bool | None = None


class ClusterSection(_Section):
    """Machines and what joins them."""

    gpus: int = 8
    gpus_per_node: int = 1
    link: str | float = "10Gbps"
    latency: str | float | None = None
    efficiency: float | None = Field(default=None, gt=0, le=1)
    mtu: int = Field(default=1500, ge=576, le=65536)
    rdma: bool = False
    memory: str | float | None = None
    device: str = "cuda"
    backend: str | None = None
    profile: Path | None = None


class TrainingSection(_Section):
    """What a step does."""

    precision: str = "bf16"
    optimizer: str = "adam"
    offload: bool = False
    micro_batch: int = 1
    sequence: int = 2048
    accumulation: int = 1
    checkpointing: bool = True
    compute_seconds: str | float | None = None
    tflops: float = 125.0
    bucket_mb: float = 25.0
    overlap: bool = True
    schedule: str = "auto"
    local_steps: int = 100


class CompareSection(_Section):
    """What to compare."""

    schemes: list[str] = list(DEFAULT_SCHEMES)
    compressors: list[str] = list(DEFAULT_COMPRESSORS)
    safe: bool = False


class PlanFile(_Section):
    """The whole file: sections ``[model]``, ``[cluster]``, ``[training]``, ``[compare]``, all optional."""

    model: ModelSection = ModelSection()
    cluster: ClusterSection = ClusterSection()
    training: TrainingSection = TrainingSection()
    compare: CompareSection = CompareSection()


def read_toml(path: Path) -> dict[str, Any]:
    """A plan file as plain values.

    Raises:
        ConfigError: no such file, or no TOML.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"file={str(path)!r}: allowed is a TOML file: {error}") from None


def make_job(file: Mapping[str, Any], flags: Mapping[str, Mapping[str, Any]]) -> Job:
    """A job from a plan file's values and the flags that were given (section -> field -> value).

    Raises:
        ConfigError: an unknown field, or a value that is not allowed.
    """
    merged: dict[str, Any] = {
        name: dict(values) if isinstance(values, Mapping) else values for name, values in file.items()
    }
    for section, values in flags.items():
        given = {field: value for field, value in values.items() if value is not None}
        if given and isinstance(merged.setdefault(section, {}), dict):
            merged[section].update(given)
    try:
        checked = PlanFile(**merged)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(problem) for problem in error.errors())) from None
    cluster, training = checked.cluster, checked.training
    profile = Profile.load(cluster.profile) if cluster.profile is not None else None
    link = gigabits(cluster.link)
    if profile is not None:
        network = profile.network(cluster.gpus_per_node)
        if "link" in merged.get("cluster", {}):
            network = network.at(link)
    else:
        network = assumed_network(
            link, mtu=cluster.mtu, rdma=cluster.rdma, gpus_per_node=cluster.gpus_per_node,
            latency=None if cluster.latency is None else seconds(cluster.latency, "latency"),
            efficiency=cluster.efficiency,
        )  # fmt: skip
    device = profile.device if profile is not None else cluster.device
    backend = cluster.backend or (profile.backend if profile is not None else "nccl" if device == "cuda" else "gloo")
    return Job(
        model=make_model(checked.model), gpus=cluster.gpus, gpus_per_node=cluster.gpus_per_node, network=network,
        device=device, backend=backend,
        gpu_memory=None if cluster.memory is None else nbytes(cluster.memory),
        precision=training.precision, optimizer=training.optimizer, offload=training.offload,
        micro_batch=training.micro_batch, sequence=training.sequence, accumulation=training.accumulation,
        checkpointing=training.checkpointing,
        compute_seconds=None
        if training.compute_seconds is None
        else seconds(training.compute_seconds, "compute_seconds"),
        tflops=training.tflops, bucket_mb=training.bucket_mb, overlap=training.overlap, schedule=training.schedule,
        local_steps=training.local_steps, schemes=tuple(checked.compare.schemes),
        compressors=tuple(checked.compare.compressors), safe=checked.compare.safe, profile=profile,
    )  # fmt: skip


def make_model(section: ModelSection) -> models.Model:
    """The model that the section describes.

    Raises:
        ConfigError: it describes none, or several.
    """
    given = {name: value for name, value in section.model_dump().items() if value is not None}
    ways = [way for way in ("params", "config", "layers") if way in given]
    require(
        len(ways) == 1, "model", ", ".join(ways) or "nothing",
        "one of: params (a count), config (a Hugging Face config.json), layers and hidden",
    )  # fmt: skip
    if section.params is not None:
        require(len(given) == 1, "model", ", ".join(given), "params alone, or layers, hidden and the other sizes")
        return models.from_parameters(section.params)
    if section.config is not None:
        try:
            return models.from_config(json.loads(section.config.read_text()))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(
                f"config={str(section.config)!r}: allowed is a Hugging Face config.json: {error}"
            ) from None
    return models.from_config(given)


def _explain(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        sections: dict[str, Any] = {name: info.annotation for name, info in PlanFile.model_fields.items()}
        holder = sections.get(str(problem["loc"][0])) if len(problem["loc"]) > 1 else PlanFile
        known = ", ".join(holder.model_fields) if holder is not None else ""
        return f"{where}={problem['input']!r}: no such field; allowed are {known}"
    return f"{where}={problem['input']!r}: allowed is {_allowed(problem)}"


def _allowed(problem: Any) -> str:
    message = str(problem["msg"])
    return (
        message[0].lower() + message[1:].removeprefix("nput should be ")
        if not message.startswith("Input should be ")
        else (message.removeprefix("Input should be "))
    )
