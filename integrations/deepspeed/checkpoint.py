"""Side-car files: each rank's residuals, in DeepSpeed's checkpoint folder.

DeepSpeed's own ``client_state`` is no place for them: below stage 3 every rank reads rank 0's. So ``save_checkpoint`` also
writes ``<dir>/<tag>/gradcomp_rank_00000.pt`` and so on, before anything of DeepSpeed's, so that a checkpoint that the file
``latest`` names is whole. ``load_checkpoint`` reads them afterwards: all ranks, or none. Whatever is missing, damaged or
foreign starts at zero, on all ranks, with one warning that says why.

In another number of ranks each old file is read by exactly one rank, which keeps the summed residual. DeepSpeed itself
resumes in another number of ranks at stage 0, and elsewhere from a universal checkpoint; the side-cars are then
looked for beside it, in the folder that it was made from.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from gradcomp.collectives import Group
from gradcomp.errors import GradcompError
from gradcomp.integrations.deepspeed.stages import Overrides
from gradcomp.registration import Handle

FORMAT = 1
_UNIVERSAL = "_universal"


class Stateful(Protocol):
    """What a side-car holds of this rank."""

    @property
    def group(self) -> Group:
        """The data-parallel ranks."""

    def before_save(self) -> None:
        """Called on all ranks before anything is saved."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: tensors, strings and plain numbers."""

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore from some of the old ranks' states. Collective; raises GradcompError on all ranks alike."""

    def reset(self) -> None:
        """Start at zero."""


class HandleState:
    """The residuals of the data-parallel handle and of those of experts."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles
        self.group = handles[0].group

    def before_save(self) -> None:
        """Residuals stand still between steps."""

    def state_dict(self) -> dict[str, Any]:
        """One entry per handle."""
        return {str(number): handle.state_dict() for number, handle in enumerate(self._handles)}

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """See :meth:`Stateful.load`."""
        problem = None
        for number, handle in enumerate(self._handles):
            try:
                handle.load_state_dict([state[str(number)] for state in states])
            except GradcompError as error:  # experts: perhaps not in every group
                problem = str(error)
        problems = [said for said in self.group.gather_object(problem, "load_checkpoint()") if said is not None]
        if problems:
            raise GradcompError(problems[0])

    def reset(self) -> None:
        """See :meth:`Stateful.reset`."""
        for handle in self._handles:
            handle.reset()


def replace_checkpoints(engine: Any, state: Stateful, overrides: Overrides) -> None:
    """Make ``save_checkpoint`` and ``load_checkpoint`` of the engine write and read side-cars; their signatures stay."""
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(save).bind(*args, **kwargs)
        given.apply_defaults()
        save_dir, tag = given.arguments["save_dir"], given.arguments["tag"]
        if save_dir:
            state.before_save()
            _write(engine, state, Path(save_dir) / str(f"global_step{engine.global_steps}" if tag is None else tag))
        return save(*args, **kwargs)

    @functools.wraps(load)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(load).bind(*args, **kwargs)
        given.apply_defaults()
        load_dir, tag = given.arguments["load_dir"], given.arguments["tag"]
        if tag is None:
            latest = Path(load_dir) / f"latest{_UNIVERSAL if engine.load_universal_checkpoint() else ''}"
            tag = latest.read_text().strip() if latest.is_file() else None
        result = load(*args, **kwargs)
        if result[0] is None or tag is None:
            return result
        if given.arguments["load_module_only"] or not given.arguments["load_optimizer_states"]:
            state.reset()
        else:
            _read(engine, state, Path(load_dir) / str(tag))
        return result

    overrides.set(engine, "save_checkpoint", save_checkpoint)
    overrides.set(engine, "load_checkpoint", load_checkpoint)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"gradcomp_rank_{rank:05d}.pt"


def _write(engine: Any, state: Stateful, folder: Path) -> None:
    content = {"format": FORMAT, "world": engine.world_size, "rank": engine.global_rank, "state": state.state_dict()}
    path, problem = _path(folder, engine.global_rank), None
    unfinished = path.with_suffix(".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(content, unfinished)
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as error:
        problem = f"rank {engine.global_rank}: {path}: {error}"
    problems = [said for said in state.group.gather_object(problem, "save_checkpoint()") if said is not None]
    if problems:  # on all ranks: nobody waits for one that has given up
        raise GradcompError("save_checkpoint: the residuals could not be written: " + "; ".join(problems))


def _read(engine: Any, state: Stateful, folder: Path) -> None:
    everywhere: Callable[[Any], list[Any]] = functools.partial(state.group.gather_object, purpose="load_checkpoint()")
    rank, world = engine.global_rank, engine.world_size
    if folder.name.endswith(_UNIVERSAL) and not _path(folder, 0).is_file():
        folder = folder.with_name(folder.name.removesuffix(_UNIVERSAL))

    # in how many ranks it was saved: every rank's own file says so, or rank 0's where there are more ranks now
    first = _open(_path(folder, rank if _path(folder, rank).is_file() else 0), engine.device)
    said = everywhere(first if isinstance(first, str) else first["world"])
    problems = [f"rank {number}: {answer}" for number, answer in enumerate(said) if isinstance(answer, str)]
    states: list[Mapping[str, Any]] = []
    if not problems:
        saved = set(said)
        if len(saved) > 1 or (saved != {world} and engine.mp_world_size > 1):
            problems = [f"{folder} holds files of {sorted(saved)} ranks, and this job has {world}"]
    if not problems:
        contents = [_open(_path(folder, old), engine.device) for old in _mine(rank, world, saved.pop())]
        states = [content["state"] for content in contents if not isinstance(content, str)]
        mine = "; ".join(content for content in contents if isinstance(content, str))
        problems = [f"rank {number}: {answer}" for number, answer in enumerate(everywhere(mine)) if answer]
    if not problems:
        try:
            state.load(states)
        except GradcompError as error:
            problems = [str(error)]
    if problems:
        state.reset()
        warnings.warn("gradcomp: residuals start at zero after load_checkpoint: " + "; ".join(problems), stacklevel=3)


def _mine(rank: int, world: int, saved: int) -> Sequence[int]:
    """Which old ranks' files a rank reads: its own, or in another world size its share of them."""
    return [rank] if saved == world else range(rank, saved, world)


def _open(path: Path, device: torch.device) -> dict[str, Any] | str:
    """The content of a side-car, or what is wrong with it."""
    if not path.is_file():
        return f"there is no file {path}"
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # truncated, not readable, or not of torch: many types, all the same to the user
        return f"{path} is damaged ({type(error).__name__})"
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return f"{path} was not written by this version of gradcomp"
    return content
