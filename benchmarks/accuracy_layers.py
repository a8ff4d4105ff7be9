"""Where 1-bit loses: the relative squared error of one encoding, layer by layer, for several blocks.

    python benchmarks/accuracy_layers.py      # seconds; about 0.36 is what normally distributed elements would give

Trains the models of accuracy.py without compression (SGD, one rank's data) and then averages ``|C(g) - g|^2 / |g|^2`` over ten
gradients g, C(g) = mean|g| sign(g) per block of the flattened parameter.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from accuracy_cases import BATCH, case
from accuracy_train import build, load
from torch import Tensor, nn
from torch.nn import functional as F

BLOCKS = (32, 256, 4096)
_BEFORE, _GRADIENTS = 100, 10


def error(gradient: Tensor, block: int) -> float:
    """Of one encoding, relative to the gradient's squared norm; the elements after the last whole block are left out."""
    flat = gradient.flatten()
    size = min(block, flat.numel())
    rows = flat[: flat.numel() // size * size].view(-1, size)
    sent = rows.abs().mean(1, keepdim=True) * rows.sign()
    return float((sent - rows).square().sum() / rows.square().sum())


def errors(task: str) -> dict[str, list[float]]:
    """Per matrix of the task's model, one figure for each of BLOCKS."""
    settings, dataset = case(task, "sgd", "none", 0), load(task, 0, 2, False)
    torch.manual_seed(0)
    model, batches = build(dataset), torch.Generator().manual_seed(0)
    optimizer = settings.make_optimizer(model.parameters())
    found: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(BLOCKS))
    for step in range(_BEFORE + _GRADIENTS):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate(step)
        inputs, targets = dataset.batch(BATCH[task], batches)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()  # type: ignore[no-untyped-call]
        for name, p in model.named_parameters() if step >= _BEFORE else ():
            if p.dim() > 1 and p.grad is not None and not name.startswith("embedding"):
                found[name] = [e + error(p.grad, b) / _GRADIENTS for e, b in zip(found[name], BLOCKS, strict=True)]
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
    return found


def main() -> None:
    torch.set_num_threads(1)
    for task in ("text", "images"):
        print(f"{task:24}" + "".join(f"block {block:<6}" for block in BLOCKS))
        for name, values in errors(task).items():
            print(f"  {name:22}" + "".join(f"{value:<12.2f}" for value in values))


if __name__ == "__main__":
    main()
