"""``torch.distributed.checkpoint``: a handle's state beside model and optimizer.

Residuals differ by rank, and torch's checkpoints store what all ranks have under the same name only once. So every rank's
state goes under a name of its own.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.compressors.base import require
from gradcomp.errors import ConfigError
from gradcomp.registration import Handle

_FORMAT = 1


class HandleState:
    """A :class:`torch.distributed.checkpoint.stateful.Stateful` over a handle::

        state = {"model": model, "optimizer": optimizer, "gradcomp": HandleState(handle)}
        torch.distributed.checkpoint.save(state, checkpoint_id=path)
        torch.distributed.checkpoint.load(state, checkpoint_id=path)

    Args:
        handle: what :func:`gradcomp.register` returned.
        saved_world_size: to load a checkpoint of another world size (ranks of the handle's process group), that size; the
            total residual is kept.

    Loading raises what :meth:`gradcomp.Handle.load_state_dict` raises.
    """

    def __init__(self, handle: Handle, *, saved_world_size: int | None = None) -> None:
        whole = saved_world_size is None or (isinstance(saved_world_size, int) and saved_world_size > 0)
        require(whole, "saved_world_size", saved_world_size, "a whole number of at least 1, or None")
        self._handle = handle
        self._saved_world = saved_world_size
        # several groups (tensor parallel, HSDP) write to one checkpoint; the lowest rank tells them apart
        self._group = min(dist.get_process_group_ranks(handle.group.process_group))

    def state_dict(self) -> dict[str, Any]:
        """This rank's state as bytes; when another world size is to be loaded, a place for each state wanted."""
        if self._saved_world is not None:
            wanted = range(self._handle.group.rank, self._saved_world, self._handle.group.world)
            return {"format": _FORMAT} | {self._key(rank): b"" for rank in wanted}
        file = io.BytesIO()
        torch.save(self._handle.state_dict(), file)
        return {"format": _FORMAT, self._key(self._handle.group.rank): file.getvalue()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :func:`torch.distributed.checkpoint.load` read. Collective."""
        if state_dict.get("format") != _FORMAT:
            raise ConfigError(f"format={state_dict.get('format')!r}: allowed is {_FORMAT}; is this a gradcomp state?")
        held = [value for key, value in state_dict.items() if key != "format"]
        states = [torch.load(io.BytesIO(value), weights_only=True) for value in held]
        self._handle.load_state_dict(states)
        self._saved_world = None

    def _key(self, rank: int) -> str:
        return f"group{self._group}-rank{rank}"
