"""What the trainers' integrations share: they say what to install, and keep their state in a checkpoint's folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import workers

import gradcomp
from gradcomp.testing import run

ROOT = Path(__file__).resolve().parents[1]
SPEC = "onebit"


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("lightning", "lightning"),
        ("accelerate", "accelerate"),
        ("transformers", "transformers"),
        ("transformers", "accelerate"),
    ],
)
def test_missing_trainer_is_one_clear_sentence(module: str, package: str, tmp_path: Path) -> None:
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import gradcomp.integrations.{module}
"""
    (tmp_path / "gradcomp").symlink_to(Path(gradcomp.__file__).parent)  # not the root: its folder `kernels`
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last == f"ImportError: gradcomp.integrations.{package} needs {package}: pip install 'gradcomp[{package}]'"
    assert "another exception occurred" not in result.stderr


def test_extras_are_those_of_the_messages() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for extra in ("lightning", "accelerate", "transformers"):
        assert f"\n{extra} = [" in text


FILES = {
    "DDP": ("ddp", "features", "resume", "nonfinite", "refusals", "lightning"),
    "FSDP2": ("fsdp", "fsdp_hybrid"),
    "DeepSpeed": ("deepspeed", "deepspeed_state", "deepspeed_setup"),
    "Lightning": ("lightning",),
    "Accelerate": ("accelerate", "trainers", "deepspeed_trainers"),
    "Transformers": ("transformers", "trainers", "deepspeed_trainers"),
}
"""Where the tests are that a column of the table of compatibility speaks of; test_lightning.py trains in plain DDP as well."""


def table() -> list[tuple[str, str, str, list[str]]]:
    """Every cell: row, trainer, what it says, and the tests of its row."""
    text = (ROOT / "integrations" / "README.md").read_text()
    lines = text[text.index("## Compatibility") : text.index("## PyTorch DDP")].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    assert header[1:-1] == list(FILES)
    return [
        (row[0], trainer, cell, re.findall(r"`(\w+)`", row[-1]))
        for row in rows
        for trainer, cell in zip(header[1:-1], row[1:-1], strict=True)
    ]


@pytest.mark.parametrize(("row", "trainer", "cell", "tests"), table())
def test_every_yes_has_a_test(row: str, trainer: str, cell: str, tests: list[str]) -> None:
    assert re.match(r"yes|no \(|not tried|-$", cell)
    if cell.startswith("yes"):
        paths = [ROOT / "tests" / f"test_{name}.py" for name in FILES[trainer]]
        defined = set(re.findall(r"^def (test_\w+)", "\n".join(p.read_text() for p in paths if p.exists()), re.M))
        assert defined & set(tests)


def test_releases_in_the_table_are_those_that_are_tested() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    text = (ROOT / "integrations" / "README.md").read_text()
    for package, name in (("lightning", "Lightning"), ("accelerate", "Accelerate"), ("transformers", "Transformers")):
        version = re.search(rf"^{package}==(\S+)", constraints, re.M)
        assert version
        assert f"{name} {version[1]}" in text


def save(rank: int, world: int, folder: str) -> None:
    from gradcomp.integrations.trainers import save_states

    ddp, optimizer, handle = workers.setup(SPEC)
    workers.train(ddp, optimizer, range(3), rank)
    save_states([handle], folder)


def load(rank: int, world: int, folder: str) -> Any:
    from gradcomp.integrations.trainers import load_states, save_states

    ddp, optimizer, handle = workers.setup(SPEC)
    nothing = load_states([handle], f"{folder}/empty")
    found = load_states([handle], folder)
    torch.save(handle.state_dict(), f"{folder}/loaded{rank}.pt")
    torch.distributed.barrier()
    if rank == 0:
        Path(folder, "gradcomp_rank2_of_3.pt").unlink()
    torch.distributed.barrier()
    try:
        load_states([handle], folder)
        error = ""
    except gradcomp.ConfigError as raised:
        error = str(raised)
    workers.train(ddp, optimizer, range(3, 5), rank)
    save_states([handle], folder)
    torch.distributed.barrier()
    return nothing, found, error, sorted(path.name for path in Path(folder).glob("gradcomp*"))


def test_states_of_another_world_size(tmp_path: Path) -> None:
    """Three ranks save, two load: the total residual is kept. A later save leaves no file of the three."""
    run(save, 3, str(tmp_path))
    before = [torch.load(tmp_path / f"gradcomp_rank{rank}_of_3.pt")[0] for rank in range(3)]
    results = run(load, 2, str(tmp_path))
    after = [torch.load(tmp_path / f"loaded{rank}.pt") for rank in range(2)]
    model = workers.Net()
    assert workers.worst(workers.total_residual(before, model), workers.total_residual(after, model)) < 1e-6
    for nothing, found, error, names in results:
        assert not nothing
        assert found
        assert "do not see the states that they need" in error
        assert names == ["gradcomp_rank0_of_2.pt", "gradcomp_rank1_of_2.pt"]
