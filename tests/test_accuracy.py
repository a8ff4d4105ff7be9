"""benchmarks/accuracy.py runs on real ranks, goes on where it stopped, and its tables say what its rows say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import accuracy_report  # noqa: E402
import accuracy_virtual  # noqa: E402
import report  # noqa: E402
import schema  # noqa: E402
from accuracy import config_of  # noqa: E402
from accuracy_cases import Case, case, grid, quick  # noqa: E402


def run(*arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / "accuracy.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_quick_runs_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    first, *others = quick()
    there = row(first, 0, 7.0)
    schema.append(out, [there])
    printed = run("--quick", "--out", str(out))
    assert "5 runs to do" in printed
    rows = schema.read(out)
    assert rows[0] == there
    assert [(r.config, r.seed) for r in rows[1:]] == [(config_of(c), c.seed) for c in others]
    ratios = {}
    for measured in rows[1:]:
        assert measured.number("loss") > 0
        assert 0 <= measured.number("accuracy") <= 1
        assert measured.number("raw_bytes") / measured.number("wire_bytes") == pytest.approx(measured.number("ratio"))
        ratios[measured.config["optimizer"], measured.config["spec"]] = measured.number("ratio_per_step")
    assert ratios["sgd", "onebit"] > 6  # the embedding stays uncompressed
    assert ratios["adamw", "topk:ratio=0.01"] > 40
    for real, of in zip(rows[1:3], others[:2], strict=True):  # virtual ranks compute the same
        virtual = accuracy_virtual.train(of, full=False)
        for name in ("loss", "accuracy", "train_loss", "ratio", "ratio_per_step", "compressed"):
            assert virtual[name] == pytest.approx(real.number(name), rel=1e-3)  # headers of pieces


def row(of: Case, seed: int, loss: float | None, accuracy: float = 0.8) -> schema.Row:
    measured = {
        "loss": loss, "accuracy": accuracy, "diverged_at": 7 if loss is None else None,
        "wire_bytes": 10_000_000, "ratio_per_step": 3.94, "ratio": 3.9,
    }  # fmt: skip
    return schema.Row.make("accuracy", config=config_of(of), seed=seed, measured=measured)


def test_changes_are_paired_by_seed(tmp_path: Path) -> None:
    none, int8 = (case("text", "sgd", spec, 0) for spec in ("none", "int8"))
    onebit = case("text", "sgd", "onebit", 0, warmup=0.1)
    rows = [row(none, seed, loss) for seed, loss in enumerate((2.0, 3.0, 4.0))]
    rows += [row(int8, seed, loss) for seed, loss in enumerate((2.02, 3.03, 4.04))]
    rows += [row(onebit, seed, loss) for seed, loss in enumerate((2.1, None, 4.0))]
    images = [case("images", "adamw", spec, 0) for spec in ("none", "int8")]
    rows += [row(images[0], 0, 0.5, 0.80), row(images[1], 0, 0.5, 0.79)]
    results = accuracy_report.Results(rows)
    found = results.find("text", "sgd", "int8")
    assert found is not None
    assert found.changes == pytest.approx((1.0, 1.0, 1.0))
    table = accuracy_report.main_table(results)
    assert "| `none` | 1 | 3.000 ± 33.3 % |" in table
    assert "| `int8` | 3.9 | +1.0 ± 0.0 |  |  | -1.0 |" in table
    assert "| `onebit` | 3.9 | diverged |" in table
    accuracy_report.write_planner_summary(results, tmp_path / "planner.json")
    summary = json.loads((tmp_path / "planner.json").read_text())
    assert summary["compressors"]["int8"] == {"sgd": [1.0, 1.0]}
    assert not any(name.startswith("onebit") for name in summary["compressors"])  # no figure for what diverged


def test_documents_say_what_the_results_say() -> None:
    for path in report.DOCUMENTS:
        text = path.read_text()
        assert "<!-- results: accuracy" in text
        assert report.rewritten(text) == text, "run python benchmarks/report.py"


def test_real_ranks_take_precedence() -> None:
    of = case("text", "sgd", "none", 0)
    virtual = row(of, 0, 2.0)
    virtual.config["virtual"] = True
    for rows in ([virtual, row(of, 0, 3.0)], [row(of, 0, 3.0), virtual]):
        results = accuracy_report.Results(rows)
        assert results.all[of].values == (3.0,)
        assert len(results.both) == 1


def test_every_case_has_its_uncompressed_run() -> None:
    cases = grid("all", 3)
    assert len(set(cases)) == len(cases)
    assert all(accuracy_report.baseline_of(c) in set(cases) for c in cases)
