"""``gradcomp plan``: flags, plan files, errors, JSON, picture, and what it prints to paste."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import gradcomp

pytest.importorskip("typer", reason="needs the extra gradcomp[cli]")

from typer.testing import CliRunner, Result

from gradcomp import cli
from gradcomp.planner import Job, assumed_network, from_parameters, paste, predict
from gradcomp.planner.config import gigabits, make_job, nbytes, seconds

SMALL = ["--params", "1e8", "--gpus", "4", "--link", "1Gbps"]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.make_app(), ["plan", *arguments])


def test_help_teaches() -> None:
    shown = call("--help").output
    assert "gradcomp plan --params 7e9 --gpus 8 --link 10Gbps" in re.sub(r"\s+", " ", shown)
    assert "torchrun" in CliRunner().invoke(cli.make_app(), ["probe", "--help"]).output


def test_table() -> None:
    shown = call(*SMALL)
    assert shown.exit_code == 0, shown.output
    for text in (
        "DDP",
        "ZeRO-3",
        "what binds",
        "tokens/s",
        "GB per",
        "recommended",
        "To paste",
        "more rows with --all",
    ):
        assert text in shown.output, text
    assert len(call(*SMALL, "--all").output.splitlines()) > len(shown.output.splitlines())


def test_json() -> None:
    result = call(*SMALL, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    for row in found["rows"]:
        assert {"scheme", "compressor", "bytes_per_rank", "comm_seconds", "step_seconds", "memory_bytes"} <= set(row)
    ddp = next(row for row in found["rows"] if (row["scheme"], row["compressor"]) == ("ddp", "none"))
    assert ddp["bytes_per_rank"] == pytest.approx(2 * 3 / 4 * 2 * 1e8, rel=1e-6)
    assert found["recommendation"]["scheme"] in {row["scheme"] for row in found["rows"]}
    refused = {(row["scheme"], row["compressor"]) for row in found["rows"]}
    assert ("zero3", "topk") not in refused  # does not fit a reduce-scatter
    assert ("zero2", "topk") in refused


def test_a_plan_file_and_flags_that_override_it(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 1000, "num_attention_heads": 4})
    )
    file = tmp_path / "job.toml"
    file.write_text(
        f'[model]\nconfig = "{config}"\n[cluster]\ngpus = 2\nlink = "100Mbps"\nmemory = "24GB"\nmtu = 9000\n'
        '[training]\nprecision = "fp32"\naccumulation = 2\n[compare]\nschemes = ["ddp"]\ncompressors = ["none", "int8"]\n'
    )
    found = json.loads(call(str(file), "--gpus", "3", "--json").output)
    assert found["gpus"] == 3
    assert found["link"]["gigabits"] == pytest.approx(0.1)
    assert {row["compressor"] for row in found["rows"]} == {"none", "int8"}
    assert found["precision"] == "fp32"


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra gradcomp[bench]")
    path = tmp_path / "plan.png"
    assert call(*SMALL, "--schemes", "ddp", "--plot", str(path)).exit_code == 0
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:])[0] > 800


def test_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from gradcomp.planner import commands

    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    result = call(*SMALL, "--plot", str(tmp_path / "x.png"))
    assert result.exit_code == 1
    assert "pip install 'gradcomp[bench]'" in result.output


@pytest.mark.parametrize(
    ("arguments", "field", "allowed"),
    [
        ([], "model='nothing'", "params"),
        (["--params", "10"], "params=10.0", "1e3"),
        ([*SMALL, "--config", "x.json"], "model='params, config'", "one of"),
        (["--config", "absent.json"], "config='absent.json'", "config.json"),
        (["absent.toml"], "file='absent.toml'", "TOML"),
        ([*SMALL, "--link", "fast"], "link='fast'", "10Gbps"),
        ([*SMALL, "--link", "0"], "link='0'", "10Gbps"),
        ([*SMALL, "--gpus", "0"], "gpus=0", "at least 1"),
        ([*SMALL, "--gpus-per-node", "3"], "gpus_per_node=3", "divisor of gpus=4"),
        ([*SMALL, "--memory", "much"], "memory='much'", "40GB"),
        ([*SMALL, "--precision", "int8"], "precision='int8'", "bf16"),
        ([*SMALL, "--optimizer", "lion"], "optimizer='lion'", "adam8bit"),
        ([*SMALL, "--device", "tpu"], "device='tpu'", "cuda or cpu"),
        ([*SMALL, "--compute-seconds", "soon"], "compute_seconds='soon'", "1.5ms"),
        ([*SMALL, "--schemes", "zero9"], "schemes='zero9'", "zero3"),
        ([*SMALL, "--compressors", "int9"], "compressor='int9'", "int8"),
        ([*SMALL, "--mtu", "10"], "cluster.mtu=10", "greater than or equal to 576"),
        ([*SMALL, "--profile", "absent.json"], "profile='absent.json'", "gradcomp probe"),
        ([*SMALL, "--schemes", "ddp", "--plot", f"{__file__}/x.png"], "plot=", "can be written"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], field: str, allowed: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("gradcomp: ")]
    assert len(lines) == 1
    assert field in lines[0]
    assert allowed in lines[0]
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("text", "field", "allowed"),
    [
        ("[cluster]\nspeed = 3\n", "cluster.speed=3", "link"),
        ("[net]\nlink = 3\n", "net=", "cluster"),
        ("[training]\naccumulation = 'many'\n", "training.accumulation='many'", "integer"),
        ("model = 3\n", "model=3", "ModelSection"),
        ("[cluster", "file=", "TOML"),
    ],
)
def test_bad_plan_files(tmp_path: Path, text: str, field: str, allowed: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    result = call(str(file), *(["--params", "1e8"] if not text.startswith("model") else []))
    assert result.exit_code == 2, result.output
    assert field in result.output
    assert allowed in result.output


def test_probe_needs_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = CliRunner().invoke(cli.make_app(), ["probe", "--link", "1Gbps"])
    assert result.exit_code == 2
    assert "torchrun" in result.output


def test_units() -> None:
    assert gigabits("10Gbps") == gigabits("10 Gbit/s") == gigabits(10) == 10
    assert gigabits("100Mbps") == pytest.approx(0.1)
    assert nbytes("40GB") == nbytes(40) == 40e9
    assert nbytes("24GiB") == 24 * 1024**3
    assert seconds("50us", "latency") == pytest.approx(5e-5)
    assert seconds(0.5, "x") == 0.5


# ------------------------------------------------------------------------ to paste
def job(**changes: Any) -> Job:
    return Job(model=from_parameters(1e8), gpus=4, network=assumed_network(1.0), **changes)


@pytest.mark.parametrize("scheme", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("spec", ["none", "int8", "onebit"])
def test_deepspeed_takes_the_configuration(scheme: str, spec: str) -> None:
    pytest.importorskip("deepspeed", reason="needs the extra gradcomp[deepspeed]")
    made = job(accumulation=4, offload=scheme == "zero2")
    config = json.loads(paste.paste(made, predict(made, scheme, spec)))
    zero = config["zero_optimization"]
    assert zero["stage"] == int(scheme[-1])
    assert config["gradient_accumulation_steps"] == 4
    assert ("gradcomp" in config) == (spec != "none")
    if spec != "none":
        assert gradcomp.format_spec(config["gradcomp"]["compressor"]) == spec
        from gradcomp.integrations.deepspeed.initialize import parse_block

        options = parse_block(config["gradcomp"])
        assert options["spec"] == spec
        assert options["warmup_steps"] == (200 if spec == "onebit" else 0)
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    checked = DeepSpeedZeroConfig(**zero)  # it refuses keys that it does not know
    assert checked.stage == zero["stage"]


def test_ddp_lines_are_python() -> None:
    made = job(bucket_mb=10)
    code = paste.paste(made, predict(made, "ddp", "onebit"))
    calls: dict[str, Any] = {}

    class Wrapped:
        def __init__(self, model: Any, **options: Any) -> None:
            calls["ddp"] = options

    class Fake:
        @staticmethod
        def register(*arguments: Any, **options: Any) -> None:
            calls["register"] = (arguments[1:], options)

    exec(code, {"DistributedDataParallel": Wrapped, "model": torch.nn.Linear(1, 1), "gradcomp": Fake})
    assert calls["ddp"] == {"gradient_as_bucket_view": True, "bucket_cap_mb": 10}
    assert calls["register"] == (("onebit",), {"warmup_steps": 200})
    assert "register" not in paste.paste(made, predict(made, "ddp", "none"))
    compile(paste.paste(made, predict(made, "fsdp2", "int8")), "fsdp", "exec")


def test_defaults_are_those_of_the_job() -> None:
    made = make_job({}, {"model": {"params": 1e8}})
    for name in ("precision", "optimizer", "offload", "micro_batch", "sequence", "accumulation", "checkpointing", "tflops",
                 "bucket_mb", "overlap", "schedule", "local_steps", "schemes", "compressors", "safe", "device"):  # fmt: skip
        assert getattr(made, name) == Job.__dataclass_fields__[name].default, name
