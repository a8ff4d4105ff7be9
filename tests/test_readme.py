"""Every Python snippet of the README runs as written, on two real ranks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.testing import run

README = (Path(__file__).parent.parent / "README.md").read_text()


def snippets() -> list[str]:
    found = []
    for kind, body in re.findall(r"```(python|diff)\n(.*?)```", README, re.DOTALL):
        lines = body.splitlines()
        if kind == "diff":
            lines = [line[1:] for line in lines if not line.startswith("-")]
        found.append("\n".join(lines))
    return found


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(100, 64)
        self.body = torch.nn.Linear(64, 64)
        self.head = torch.nn.Linear(64, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)).relu())


def work(rank: int, world: int, codes: list[str], folder: str) -> list[tuple[int, bool]]:
    """Run each snippet with a fresh model, then train two steps; returns (bytes sent, ranks equal)."""
    import os
    import sys

    os.chdir(folder)
    dist.init_process_group = lambda *args, **kwargs: None  # the launcher has done it
    results = []
    for number, code in enumerate(codes):
        torch.manual_seed(0)
        model = Net()
        tokens = torch.randint(0, 100, (8,), generator=torch.Generator().manual_seed(rank))
        names: dict[str, Any] = {
            "__name__": f"snippet{number}", "torch": torch, "dist": dist, "gradcomp": gradcomp, "model": model,
            "DistributedDataParallel": DistributedDataParallel, "ddp": DistributedDataParallel(model),
            "loader": [(tokens, tokens)] * 2,
            "loss_fn": torch.nn.functional.cross_entropy, "print": lambda *args: None,
        }  # fmt: skip
        sys.modules[names["__name__"]] = type(sys)(names["__name__"])
        exec(compile(code, f"README snippet {number}", "exec"), names)
        ddp, handle = names["ddp"], names.get("handle") or names["optimizer"]
        for _ in range(2):
            torch.nn.functional.cross_entropy(ddp(tokens), tokens).backward()
            if "optimizer" in names:
                names["optimizer"].step()
        source = [p.detach() if "optimizer" in names else p.grad for p in ddp.parameters()]
        flat = torch.cat([tensor.flatten() for tensor in source])
        everyone = [torch.empty_like(flat) for _ in range(world)]
        dist.all_gather(everyone, flat)
        results.append((handle.stats().wire_bytes, all(torch.equal(flat, other) for other in everyone)))
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run(work, 2, snippets(), str(tmp_path_factory.mktemp("readme")))


@pytest.mark.parametrize("number", range(len(snippets())))
def test_snippet(results: list[Any], number: int) -> None:
    for sent, same in (rank[number] for rank in results):
        assert sent > 0
        assert same


def test_every_compressor_is_in_the_readme() -> None:
    table = README[README.index("## Compressors") : README.index("## Checkpoints")]
    for name in gradcomp.compressor_names():
        assert f"| `{name}" in table or f"`, `{name}`" in table
