"""The command line: what it prints, writes and returns, and that it leaves no process behind."""

import gzip
import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch

import gradcomp
from gradcomp import ConfigError, GradcompError

pytest.importorskip("typer", reason="needs the extra gradcomp[cli]")

from typer.testing import CliRunner, Result

from gradcomp import cli, doctor
from gradcomp.demo import Settings, data, launch, parse_compressors, predict, report, train
from gradcomp.kernels import reference

SOURCE = Path(gradcomp.__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
COMMAND = [sys.executable, "-m", "gradcomp"]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.make_app(), list(arguments))


# ------------------------------------------------------------------------ help, list, doctor
def test_help_teaches() -> None:
    overview = call("--help")
    assert overview.exit_code == 0
    assert all(command in overview.output for command in ("demo", "list", "doctor"))
    demo = call("demo", "--help")
    assert demo.exit_code == 0
    assert "gradcomp demo --compressors" in demo.output
    assert call("--version").output == f"gradcomp {gradcomp.__version__}\n"


def test_list() -> None:
    shown = call("list")
    assert shown.exit_code == 0
    assert all(name in shown.output for name in gradcomp.compressor_names())
    entries = {entry["name"]: entry for entry in json.loads(call("list", "--json").output)["compressors"]}
    assert list(entries) == gradcomp.compressor_names()
    assert entries["int8"]["options"]["block"] == {"default": 256, "type": "int"}
    assert entries["onebit"]["biased"] is True


def test_list_one() -> None:
    shown = call("list", "topk")
    assert shown.exit_code == 0
    assert "Stich" in shown.output
    assert "Literal['sampled', 'exact']" in shown.output
    assert json.loads(call("list", "topk", "--json").output)["options"]["ratio"]["default"] == 0.01


def test_list_shows_a_broken_plugin_and_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "compressor_names", lambda: ["int8", "absent"])
    shown = call("list")
    assert shown.exit_code == 0
    assert "8-bit" in shown.output
    assert "compressor='absent'" in shown.output


def test_doctor() -> None:
    result = call("doctor", "--json")
    found = json.loads(result.output)
    assert found["usable"] is True
    assert result.exit_code == 0
    assert found["versions"]["torch"] == torch.__version__
    assert found["choice"]["cpu"] in found["kernels"]
    assert {check["compressor"] for check in found["checks"]} >= {"int8", "onebit", "topk", "powersgd"}
    assert all(check["ok"] for check in found["checks"]), found["checks"]


def test_doctor_notices_wrong_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = doctor._exchange

    def wrong(spec: str, backend: str, device: torch.device) -> torch.Tensor:
        if spec == "int4" and backend == "numba":
            raise RuntimeError("no such\ninstruction")
        return exchange(spec, backend, device) + (spec == "int8" and backend == "numba")

    monkeypatch.setattr(doctor, "_exchange", wrong)
    monkeypatch.setattr(doctor, "available", lambda: {"torch": "available", "numba": "available"})
    monkeypatch.setattr(doctor, "backend_name", lambda device: "numba")
    # where numba is absent, its place is taken by the reference: only the wrong results above matter here
    monkeypatch.setattr(doctor, "get_ops", lambda device, backend: reference)
    result = call("doctor")
    assert result.exit_code == 1
    assert "NOT usable" in result.output
    assert "int4 (RuntimeError: no such)" in result.output
    assert "int8 (AssertionError" in result.output


def test_doctor_names_the_command_that_adds_what_is_missing() -> None:
    missing = doctor._missing({"numba": "No module named 'llvmlite'; install it with: pip install 'gradcomp[cpu]'"})
    assert any(entry.command == "pip install 'gradcomp[cpu]'" and "llvmlite" in entry.purpose for entry in missing)


def test_without_typer_one_sentence() -> None:
    code = "import sys; sys.modules['typer'] = None; from gradcomp.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == "gradcomp: the command line needs typer: pip install 'gradcomp[cli]'\n"


# ------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("arguments", "field", "allowed"),
    [
        (["--ranks", "0"], "ranks=0", "2 to 64"),
        (["--steps", "2"], "steps=2", "at least 5"),
        (["--task", "speech"], "task='speech'", "text or images"),
        (["--optimizer", "lion"], "optimizer='lion'", "sgd or adamw"),
        (["--seed", "-1"], "seed=-1", "from 0"),
        (["--schedule", "later"], "schedule='later'", "pipeline"),
        (["--compressors", "int9"], "compressor='int9'", "did you mean 'int8'"),
        (["--compressors", "topk:ratio=7"], "ratio=7.0", "at most 1"),
        (["--compressors", "int8,int8"], "compressors='int8,int8'", "different"),
        (["--compressors", ""], "compressors=''", "different"),
        (["--compressors", "none", "--out", f"{__file__}/x"], "out=", "can be written"),
        (["list", "int9"], "compressor='int9'", "int8"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], field: str, allowed: str) -> None:
    result = call(*arguments) if arguments[0] == "list" else call("demo", *arguments)
    assert result.exit_code == 2
    lines = [line for line in result.output.splitlines() if line.startswith("gradcomp: ")]
    assert len(lines) == 1
    assert field in lines[0]
    assert allowed in lines[0]
    assert "Traceback" not in result.output


def test_commas_separate_specs_and_options() -> None:
    assert parse_compressors("none, topk:ratio=0.02,values=fp16 ,int8") == (
        "none",
        "topk:ratio=0.02,values=fp16",
        "int8",
    )
    assert parse_compressors("int8:block=256") == ("int8",)
    assert parse_compressors("all") == tuple(gradcomp.compressor_names())
    with pytest.raises(ConfigError, match="block=3"):
        parse_compressors("block=3")


def test_defaults_of_command_and_settings_agree() -> None:
    options = {name: parameter.default for name, parameter in signature(cli.demo).parameters.items()}
    for field in fields(Settings):
        if field.name != "compressors":
            assert options[field.name] == field.default, field.name


# ------------------------------------------------------------------------ the demo
@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    result = subprocess.run(
        [*COMMAND, "demo", "--steps", "6", "--compressors", "none,int8", "--ranks", "2", "--out", str(out)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=110,
        cwd=out.parent.parent,
    )
    return result, out


def test_demo_writes_json(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    result, out = demo
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    found = json.loads((out / "demo.json").read_text())
    assert found["task"] == "text"
    assert {"cpu", "cores", "python", "torch", "gradcomp"} <= set(found["machine"])
    none, int8 = found["rows"]
    assert [none["compressor"], int8["compressor"]] == ["none", "int8"]
    parameters = sum(p.numel() for p in train.models.build("text", 0).parameters())
    assert none["wire_bytes_per_step"] == pytest.approx(4 * parameters, rel=1e-3)  # 2 (N-1)/N = 1 for two ranks
    assert none["ratio"] == pytest.approx(1)
    assert 3.5 < int8["ratio"] < 4
    assert int8["final_loss"] == pytest.approx(none["final_loss"], rel=0.02)
    assert int8["bits_per_byte"] == pytest.approx(int8["final_loss"] / math.log(2), rel=1e-4)
    for row in (none, int8):
        assert row["step_ms"] > 0
        assert set(row["predicted_ms"]) == {"1", "10", "25"}
        assert row["curve"][-1]["loss"] == row["final_loss"]


def test_demo_writes_a_picture(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra gradcomp[bench]")
    header = (demo[1] / "demo.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    assert width > 1000
    assert height > 400


def test_demo_prints_a_table(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    output = demo[0].stdout
    for heading in ("compressor", "kB/step", "ratio", "loss", "bits/byte", "step ms", "25 Gb/s"):
        assert heading in output
    assert "Predicted, not measured; no overlap assumed" in " ".join(output.split())
    assert "none: step 1 of 6" in output  # plain lines: the output is no terminal


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    if not tasks.is_dir():
        pytest.skip("needs /proc")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def running(pid: int) -> bool:
    """Not gone, and not merely waiting for init to collect it, which some containers' init never does."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def long_demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo that runs longer than any test."""
    process = subprocess.Popen(
        [*COMMAND, "demo", "--steps", "4000", "--compressors", "none", "--out", str(tmp_path)],
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    left = children(process.pid) if process.poll() is None else []
    process.kill()
    process.communicate()
    for pid in filter(running, left):
        os.kill(pid, signal.SIGKILL)


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    assert any(text in line for line in process.stdout), f"{text!r} was never printed"


def all_end(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(map(running, pids))


def test_interrupt_ends_all_ranks(long_demo: subprocess.Popen[str]) -> None:
    # while the ranks are still importing: later they have nothing more to go wrong
    wait_for_line(long_demo, "2 ranks, 4000 steps")
    while len(started := children(long_demo.pid)) < 3:  # the ranks, and the tracker of multiprocessing
        time.sleep(0.02)
    long_demo.send_signal(signal.SIGINT)
    _, errors = long_demo.communicate(timeout=30)
    assert long_demo.returncode == 130
    assert errors == "gradcomp: interrupted; all ranks have ended\n"
    assert all_end(started)


def test_a_killed_rank_ends_the_others(long_demo: subprocess.Popen[str]) -> None:
    wait_for_line(long_demo, "none: step 1 of")
    started = children(long_demo.pid)
    os.kill(started[-1], signal.SIGKILL)  # the last one started is rank 1
    _, errors = long_demo.communicate(timeout=30)
    assert long_demo.returncode == 1
    assert errors == "gradcomp: rank 1 ended with exit code -9\n"
    assert all_end(started)


def test_an_error_in_the_ranks_is_reported() -> None:
    with pytest.raises(GradcompError, match=r"rank \d failed: TypeError: .*settings"):
        launch.run_ranks(train.train_all, 2, (), lambda kind, content: None)


def test_the_cause_is_reported_not_its_consequences() -> None:
    lost = (0, "RuntimeError", "[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    with pytest.raises(GradcompError, match="rank 2 failed: ValueError: no"):
        launch._raise([lost, (1, "Ended", "ended with exit code -6"), (2, "ValueError", "no")])
    with pytest.raises(GradcompError, match="rank 1 ended with exit code -9"):
        launch._raise([lost, (1, "Ended", "ended with exit code -9")])
    with pytest.raises(ConfigError, match=r"^schedule"):
        launch._raise([(0, "ConfigError", "schedule='x'")])


# ------------------------------------------------------------------------ what is predicted and reported
def test_prediction_formula() -> None:
    # 10 ms compute, 2 ms codec, 1 MB at 1 Gb/s: 8e6 bits / 0.85e9 = 9.412 ms, 5 collectives of 0.3 ms
    seconds = predict.predicted_seconds(0.010, 0.002, 1e6, 5, 1.0)
    assert seconds == pytest.approx(0.010 + 0.002 + 8e6 / 0.85e9 + 0.0015)
    assert predict.predicted_seconds(0.010, 0.002, 0, 0, 25.0) == pytest.approx(0.012)


def test_break_even_is_where_both_predictions_are_equal() -> None:
    link = predict.break_even_gigabits(0.006, 1.5e6, 14, 0.001, 6e6, 7)
    assert link is not None
    compressed = predict.predicted_seconds(0.05, 0.006, 1.5e6, 14, link)
    assert compressed == pytest.approx(predict.predicted_seconds(0.05, 0.001, 6e6, 7, link))
    assert predict.break_even_gigabits(0.006, 6e6, 7, 0.001, 6e6, 7) is None
    assert predict.break_even_gigabits(0.001, 1e6, 7, 0.001, 6e6, 7) == math.inf


def make_run(spec: str, **changes: object) -> train.Run:
    values: dict[str, object] = {"step": 0.05, "encode": 0.001, "decode": 0.001, "loss": 2.0, "accuracy": 0.5}
    values |= {"wire_bytes_per_step": 1000, "raw_bytes_per_step": 4000, "collectives_per_step": 2}
    return train.Run(spec=spec, warmup_steps=0, **{**values, **changes})  # type: ignore[arg-type]


def test_a_diverged_run_is_shown_and_never_the_fastest() -> None:
    settings = Settings(compressors=("none", "onebit"))
    runs = [
        make_run("none", wire_bytes_per_step=4_000_000),
        make_run("onebit", loss=math.nan, diverged_at=7, step=math.nan, curve=[(5, 10, math.nan)]),
    ]
    rows = report.make_rows(runs, 0.04, settings)
    assert report.fastest(rows, 1.0) is rows[0]
    found = json.loads(json.dumps(report.as_json(rows, 0.04, "text", settings, 1.0), allow_nan=False))
    assert found["rows"][1]["final_loss"] is None
    assert found["rows"][1]["diverged_at_step"] == 7


def test_warm_up_is_for_strongly_biased_compressors() -> None:
    settings = Settings(compressors=("none",), steps=100)
    steps = {name: settings.warmup_steps(name) for name in gradcomp.compressor_names()}
    assert {name for name, count in steps.items() if count} == {"onebit", "topk"}
    assert set(steps.values()) == {0, 10}
    assert {name for name in steps if settings.rules(name)} == {"onebit", "topk"}


# ------------------------------------------------------------------------ data
@pytest.mark.parametrize("task", ["text", "images"])
def test_ranks_have_different_data_and_share_the_evaluation(task: str) -> None:
    if task == "images":
        pytest.importorskip("sklearn", reason="needs the extra gradcomp[bench]")
    first, second = (data.load(task, rank, 2) for rank in range(2))
    assert not torch.equal(first.train[:100], second.train[:100])
    assert torch.equal(first.evaluation, second.evaluation)
    shares = [first.evaluation_share(rank, 2)[1] for rank in range(2)]
    whole = first.evaluation_share(0, 1)[1]
    assert sorted(torch.cat(shares).flatten().tolist()) == sorted(whole.flatten().tolist())
    batches = [first.batch(4, torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(batches[0][0], batches[1][0])


def test_idx_files(tmp_path: Path) -> None:
    images = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(struct.pack(">HBBIII", 0, 8, 3, 2, 3, 4) + images.tobytes()))
    assert np.array_equal(data.read_idx(path), images)
    path.write_bytes(gzip.compress(struct.pack(">HBBI", 0, 13, 1, 2) + bytes(8)))
    with pytest.raises(ConfigError, match="0xd instead of unsigned bytes"):
        data.read_idx(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        data.read_idx(tmp_path / "absent.gz")
