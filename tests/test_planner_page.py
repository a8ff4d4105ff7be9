"""The page "ZeRO on slow Ethernet": every block is what its command prints. ``python tests/test_planner_page.py`` renews them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs the extra gradcomp[cli]")

from typer.testing import CliRunner

import gradcomp
from gradcomp import cli
from gradcomp.testing import run

PAGE = Path(gradcomp.__file__).parent / "planner" / "README.md"
BLOCK = re.compile(r"```console\n\$ gradcomp (plan [^\n]*)\n(.*?)```", re.DOTALL)


def output(command: str) -> str:
    result = CliRunner().invoke(cli.make_app(), shlex.split(command))
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.output.partition("\nTo paste")[0].splitlines()]
    # assumptions that hold for all blocks are said once, at the top of the page
    kept = [
        line for line in lines if not line.startswith(("Note: Link eff", "Note: Codec times", "Note: Compute time"))
    ]
    return "\n".join(kept).rstrip() + "\n"


@pytest.mark.parametrize(("command", "shown"), BLOCK.findall(PAGE.read_text()))
def test_block_is_what_the_command_prints(command: str, shown: str) -> None:
    assert shown == output(command)


def tuned(rank: int, world: int, code: str) -> str:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(torch.nn.Linear(64, 64))
    names = {
        "gradcomp": gradcomp, "ddp": ddp, "optimizer": torch.optim.SGD(ddp.parameters(), 0.1), "print": lambda *args: None,
        "loader": [(torch.randn(4, 64), torch.randn(4, 64))] * 14, "loss_fn": torch.nn.functional.mse_loss,
    }  # fmt: skip
    exec(code, names)
    return str(names["tuner"].decision)  # type: ignore[attr-defined]


def test_the_job_that_tunes_itself_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    first, second = run(tuned, 2, code)
    assert first == second
    assert "measured" in first


def main() -> None:
    text = PAGE.read_text()
    for command, shown in BLOCK.findall(text):
        old = f"```console\n$ gradcomp {command}\n{shown}```"
        text = text.replace(old, f"```console\n$ gradcomp {command}\n{output(command)}```")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
