"""A backend on another device, called with CPU tensors: so the tests that every backend shares need no change for a GPU."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gradcomp.kernels.ops import Ops


class Moved:
    """The arguments of one call on the device. Whole storages travel: offsets, aliases and canaries stay what they were."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.storages: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            if storage.data_ptr() not in self.storages:
                here = torch.empty(0, dtype=torch.uint8).set_(storage)
                self.storages[storage.data_ptr()] = here, here.to(self.device, copy=True)
            there = self.storages[storage.data_ptr()][1].untyped_storage()
            out = torch.empty(0, dtype=x.dtype, device=self.device)
            return out.set_(there, x.storage_offset(), x.size(), x.stride())
        if is_dataclass(x) and not isinstance(x, type):
            names = [field.name for field in fields(x) if isinstance(getattr(x, field.name), Tensor)]
            return replace(x, **{name: self(getattr(x, name)) for name in names})
        return x

    def back(self) -> None:
        for here, there in self.storages.values():
            here.copy_(there)


def on_device(backend: Ops, device: torch.device) -> Any:
    """The ops of ``backend``, each on copies of its arguments."""

    def wrap(op: Any) -> Any:
        def call(*arguments: Any) -> Any:
            moved = Moved(device)
            result = op(*(moved(x) for x in arguments))
            moved.back()
            return result

        return call

    names = [name for name in vars(Ops) if not name.startswith("_")]
    return SimpleNamespace(name=backend.name, **{name: wrap(getattr(backend, name)) for name in names})
