"""What the trainers' integrations share: they say what to install, and keep their state in a checkpoint's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import workers

import gradcomp
from gradcomp.testing import run

ROOT = Path(gradcomp.__file__).parents[1]
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
