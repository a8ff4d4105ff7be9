"""What the trainers' integrations share: a clear error without the trainer, numbers for its logs, state in its checkpoints."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.collectives import Group
from gradcomp.errors import ConfigError
from gradcomp.registration import Handle

LOGGED = ("wire_bytes", "ratio_per_step", "residual_ratio", "skipped_steps")
"""Fields of :class:`gradcomp.Stats` that go into a trainer's logs. The last step's ratio is the steady state's."""

ALONE = "gradcomp: one process, so no gradients are exchanged and none compressed"

State = dict[str, Any]


@contextmanager
def required(package: str, extra: str) -> Iterator[None]:
    """Around the import of a trainer: says in one sentence how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:  # it is installed, but something that it needs is not
            raise
        raise ImportError(f"gradcomp.integrations.{extra} needs {package}: pip install 'gradcomp[{extra}]'") from None


def logged(handles: Sequence[Handle]) -> dict[str, float]:
    """The numbers of this rank for a trainer's logs; those of several models are told apart by their number."""
    numbers = {}
    for index, handle in enumerate(handles):
        prefix = "gradcomp" if len(handles) == 1 else f"gradcomp{index}"
        stats = handle.stats()
        numbers.update({f"{prefix}/{name}": float(getattr(stats, name)) for name in LOGGED})
    return numbers


def share(rank: int, world: int, saved_world: int) -> range:
    """Which of the ``saved_world`` ranks' states this rank loads: its own, or some of another world size's."""
    return range(rank, rank + 1) if world == saved_world else range(rank, saved_world, world)


def states_for(states: Sequence[State]) -> State | Sequence[State]:
    """As ``Handle.load_state_dict`` takes them."""
    return states[0] if len(states) == 1 else states


# ---------------------------------------------------------------- one file per rank in a checkpoint's folder
def save_states(handles: Sequence[Handle], folder: str | os.PathLike[str]) -> None:
    """Write this rank's states to ``folder``; every rank must call it. A second save replaces the first."""
    group = handles[0].group
    path = _path(folder, group, group.rank, group.world)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save([handle.state_dict() for handle in handles], partial)
    partial.replace(path)
    if group.rank == 0:
        for world in _saved_worlds(folder, group) - {group.world}:  # of an earlier run into the same folder
            for rank in range(world):
                _path(folder, group, rank, world).unlink(missing_ok=True)


def load_states(handles: Sequence[Handle], folder: str | os.PathLike[str]) -> bool:
    """Restore what :func:`save_states` wrote, also in another world size (then every rank must see all files). Collective.

    Returns:
        Whether there was something to restore.

    Raises:
        ConfigError, MismatchError: on every rank, when files are missing, damaged, or do not fit the models.
    """
    group = handles[0].group
    seen: list[tuple[set[int], bool]] = group.gather_object(
        (_worlds_for(folder, group), bool(_saved_worlds(folder, group))), "looking for gradcomp's state"
    )
    if not any(anything for _, anything in seen):
        return False
    common = set.intersection(*(worlds for worlds, _ in seen))
    if not common:
        blind = [rank for rank, (worlds, _) in enumerate(seen) if not worlds] or list(range(group.world))
        raise ConfigError(
            f"{folder}: ranks {blind} do not see the states that they need ({_path('', group, 0, group.world).name} and so on); "
            "allowed is a checkpoint with the file of every rank that saved"
        )
    saved_world = group.world if group.world in common else max(common)
    files: list[list[State]] = []

    def read() -> str:
        for rank in share(group.rank, group.world, saved_world):
            path = _path(folder, group, rank, saved_world)
            try:
                states = torch.load(path, map_location="cpu", weights_only=True)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise ConfigError(f"{path}: cannot be read ({error}); allowed is a whole file of gradcomp") from error
            if not isinstance(states, list) or len(states) != len(handles):
                raise ConfigError(f"{path}: allowed are the states of {len(handles)} model(s), as they were saved")
            files.append(states)
        return f"the state of {saved_world} ranks"

    group.agree(read, "reading gradcomp's state")
    for index, handle in enumerate(handles):
        handle.load_state_dict(states_for([states[index] for states in files]))
    return True


def _path(folder: str | os.PathLike[str], group: Group, rank: int | str, world: int | str) -> Path:
    lowest = min(dist.get_process_group_ranks(group.process_group))
    prefix = f"gradcomp_group{lowest}" if lowest else "gradcomp"  # several groups save into one folder
    return Path(folder, f"{prefix}_rank{rank}_of_{world}.pt")


def _saved_worlds(folder: str | os.PathLike[str], group: Group) -> set[int]:
    return {int(path.stem.rpartition("_")[2]) for path in Path(folder).glob(_path("", group, "*", "*").name)}


def _worlds_for(folder: str | os.PathLike[str], group: Group) -> set[int]:
    """The world sizes whose states this rank could load from here."""
    if _path(folder, group, group.rank, group.world).exists():
        return {group.world}  # on disks that are not shared, each rank sees only this
    worlds = _saved_worlds(folder, group) - {group.world}
    return {saved for saved in worlds if all(_path(folder, group, rank, saved).exists() for rank in range(saved))}
