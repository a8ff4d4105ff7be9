"""The benchmarks run, write valid rows, and leave nothing behind."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import exchange  # noqa: E402
import links  # noqa: E402
import peers  # noqa: E402
import planner  # noqa: E402
import report  # noqa: E402
import schema  # noqa: E402

CANNOT_ISOLATE = links.why_not()
needs_links = pytest.mark.skipif(CANNOT_ISOLATE is not None, reason=f"shaped links: {CANNOT_ISOLATE}")


# ---------------------------------------------------------------- rows
def make(**changes: object) -> schema.Row:
    values = {"config": {"spec": "int8", "sizes": [1, 2]}, "seed": 3, "measured": {"loss": 0.5}, **changes}
    return schema.Row.make("test", **values)  # type: ignore[arg-type]


def test_rows_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    rows = [
        make(measured={"step_ms": schema.quantiles([3.0, 1.0, 2.0]), "wire_bytes": 10, "curve": [[1, 2.5], [2, 2.0]]}),
        make(measured={}, error="diverged at step 7"),
    ]
    schema.append(path, rows[:1])
    schema.append(path, rows[1:])
    assert schema.read(path) == rows
    assert schema.read(path)[0].number("step_ms") == 2.0
    assert rows[0].versions["torch"]
    assert rows[0].machine.cores >= 1


def test_quantiles() -> None:
    found = schema.quantiles([float(i) for i in range(100, -1, -1)])
    assert (found.p20, found.p50, found.p80, found.n) == (20.0, 50.0, 80.0, 101)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"measured": {}}, "must say in `error` why"),
        ({"measured": {"loss": float("nan")}}, "finite number"),
        ({"seed": -1}, "greater than or equal to 0"),
        ({"config": {"spec": {"nested": 1}}}, "valid string"),
    ],
)
def test_rows_that_mean_nothing_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(**changes)


def test_a_broken_file_is_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    schema.append(path, [make()])
    path.write_text(path.read_text() + path.read_text().replace('"seed"', '"sead"'))
    with pytest.raises(ValueError, match=r"line 2: .*"):
        schema.read(path)


# ---------------------------------------------------------------- links
PROBE = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
import links
links.isolate()
with links.star(2, 0.1) as star:
    rate = "import subprocess; print(subprocess.check_output(['tc', 'qdisc', 'show'], text=True))"
    star.launch([sys.executable, "-c", "import os; print(os.environ['RANK'], os.environ['MASTER_ADDR']);" + rate], print)
    try:
        star.launch([sys.executable, "-c", "import os; assert os.environ['RANK'] == '0', 'rank 1 fails'"], print)
    except links.LinksError as error:
        print(error)
    print("waiting", flush=True)
    star.launch(["sleep", sys.argv[2]], print)
"""
SLEEP = f"1234567.{os.getpid()}"


def left_behind() -> list[str]:
    """Interfaces of a star on this machine, and ranks of the probe that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().split(b"\0")[:-1]
            found += [path.parent.name] * (command == [b"sleep", SLEEP.encode()])
        except OSError:  # it has ended
            continue
    return found + [device for device in os.listdir("/sys/class/net") if device in ("switch", "port0", "port1")]


@needs_links
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_links_work_and_nothing_is_left_however_the_program_ends(how: signal.Signals) -> None:
    before = left_behind()
    process = subprocess.Popen(
        [sys.executable, "-c", PROBE, str(BENCHMARKS), SLEEP], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line == "waiting\n":
                break
        text = "".join(said)
        assert text.startswith("0 10.77.0.1\n")
        assert "qdisc tbf" in text
        assert "rate 100Mbit" in text
        assert "rank 1: exit code 1" in text
        assert "AssertionError: rank 1 fails" in text
        assert "rank 0:" not in text
        while not left_behind():  # the sleeping ranks are outside this process's namespaces, but seen from here
            time.sleep(0.02)
        # Ctrl-C reaches every process of the terminal, other signals the program alone
        os.killpg(process.pid, how) if how == signal.SIGINT else process.send_signal(how)
        process.wait(20)
        assert process.returncode in (128 + how, -how)
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    deadline = time.monotonic() + 20
    while left_behind() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_behind() == before


def test_links_refuse_without_isolation() -> None:
    with pytest.raises(links.LinksError, match="isolate"), links.star(2, 1.0):
        pass


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="changes its user, so it must be root")
def test_without_root_the_message_says_what_to_do() -> None:
    code = "import os, sys; sys.path.insert(0, sys.argv[1]); import links; os.seteuid(65534); print(links.why_not())"
    done = subprocess.run([sys.executable, "-c", code, str(BENCHMARKS)], capture_output=True, text=True, check=True)
    assert "needs root" in done.stdout
    assert "sudo" in done.stdout


# ---------------------------------------------------------------- each benchmark, quickly
def quick(name: str, out: Path, *options: str) -> list[schema.Row]:
    """Run a benchmark's quick mode as a user would; its rows."""
    command = [sys.executable, str(BENCHMARKS / name), "--quick", "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr + done.stdout
    return schema.read(out)


@pytest.mark.timeout(300)
@needs_links
def test_network(tmp_path: Path) -> None:
    rows = quick("network.py", tmp_path / "rows.jsonl")
    assert [row.config["exchange"] for row in rows] == ["no communication", "onebit"]
    assert all(row.error is None and row.config["gigabits"] == 1.0 for row in rows)
    sent = rows[1].number("payload_bytes")
    assert 1.4e6 < sent < 1.6e6  # 10.5 M parameters at 1.125 bit, in two phases of half of it each
    assert sent < rows[1].number("link_bytes") < 1.1 * sent
    # the link was shaped: what was sent cannot have taken less than it takes at this speed (the bucket passes for free)
    assert rows[1].number("step_ms") > 8e-6 * (sent - 2 * 128e3)


def test_network_without_root_says_so() -> None:
    code = (
        "import os, runpy, sys; os.geteuid = lambda: 1000; sys.path.insert(0, sys.argv[1]); sys.argv = ['network.py'];"
        "runpy.run_module('network', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(BENCHMARKS)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "network.py: needs root, to make network namespaces: run it with sudo" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.timeout(300)
def test_kernels(tmp_path: Path) -> None:
    rows = quick("kernels.py", tmp_path / "rows.jsonl", "--only", "int8")
    assert len(rows) == 5
    for row in rows:
        assert row.error is None
        assert row.number("kernel_ms") > 0
        assert row.number("of_copy") > 0
    assert rows[0].number("torch_default_ratio") > 0


@pytest.mark.timeout(300)
@needs_links
def test_peers(tmp_path: Path) -> None:
    ours, fp16 = quick("peers.py", tmp_path / "rows.jsonl")
    assert ours.config["peer"] == "gradcomp int8"
    assert 0.001 < ours.number("error_of_one") < 0.02
    assert 1e-5 < fp16.number("error_of_one") < 1e-3
    assert ours.number("calls") == 2
    assert ours.number("link_bytes") < 0.7 * fp16.number("link_bytes")


def test_a_peer_that_is_missing_gets_a_row_that_says_so() -> None:
    found = peers.row(
        "hivemind fp16", None, 1.0, argparse.Namespace(ranks=2, seed=0), {}, "rank 0: no module\nImportError: x"
    )
    assert found.error is not None
    assert found.error.endswith("ImportError: x")
    assert found.measured == {}


def test_deepspeeds_packer_is_what_its_kernel_does() -> None:
    """A bit per value, most significant last, set for zero and above."""
    packer, values = exchange.Packer(), torch.tensor([1.0, -1.0, 0.0, -2.0, -3.0, 4.0, 5.0, -6.0])
    packed = packer.packbits(values, 8, 0)
    assert packed.tolist() == [0b01100101]
    assert packer.unpackbits(packed, 1, 0).tolist() == [1, -1, 1, -1, -1, 1, 1, -1]


# ---------------------------------------------------------------- the README
def test_the_readme_says_what_the_results_say() -> None:
    before = report.README.read_text()
    assert "<!-- results: kernels -->" in before
    assert report.rewritten(before) == before, "run python benchmarks/report.py"


def test_every_committed_row_is_valid_and_every_section_made_from_it() -> None:
    for path in schema.RESULTS.glob("*.jsonl"):
        if path.stem in report.BENCHMARKS:
            assert schema.read(path)
    names = {match["name"] for match in report.MARKED.finditer(report.README.read_text())}
    assert names <= set(report.SECTIONS)


def test_a_stale_table_and_an_unknown_section_are_noticed() -> None:
    stale = "a\n<!-- results: kernels -->\nstale text\n<!-- end of results -->\nb\n"
    assert "stale text" not in report.rewritten(stale)
    assert report.rewritten(report.rewritten(stale)) == report.rewritten(stale)
    with pytest.raises(ValueError, match="no section 'kernel'; known are kernels"):
        report.rewritten(stale.replace("kernels", "kernel"))


def test_a_section_without_results_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(schema, "RESULTS", tmp_path)
    made = report.rewritten("<!-- results: peers -->\n<!-- end of results -->\n")
    assert "Not measured yet: `peers.jsonl` is missing" in made


def test_break_even_is_interpolated_between_measured_speeds() -> None:
    assert report.crossing([(0.1, 0.25), (1.0, 0.5), (10.0, 2.0)]) == "3.2"
    assert report.crossing([(0.1, 0.2), (10.0, 0.9)]) == "above 10"
    assert report.crossing([(0.1, 1.5), (10.0, 2.0)]) == "below 0.1"


def test_of_equal_rows_the_last_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "RESULTS", tmp_path)
    schema.append(tmp_path / "test.jsonl", [make(measured={"loss": 1.0}), make(measured={"loss": 2.0}), make(seed=4)])
    assert [(row.seed, row.number("loss")) for row in report.load("test")] == [(3, 2.0), (4, 0.5)]


@pytest.mark.timeout(300)
@needs_links
def test_planner(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra gradcomp[bench]")
    out, picture = tmp_path / "rows.jsonl", tmp_path / "plan.png"
    rows = quick("planner.py", out, "--plot", str(picture))
    assert [row.config["exchange"] for row in rows] == ["none", "int8"]
    for row in rows:
        assert row.number("step_ms") > 0
        assert row.number("predicted_ms") >= row.number("compute_ms") > 0
    advised, fastest, more = planner.regret(rows)
    assert {advised, fastest} <= {"none", "int8"}
    assert more >= 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
