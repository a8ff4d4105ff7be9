"""What must not be lost under DeepSpeed: residuals through overflows, checkpoints, and another number of ranks."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import deepspeed_workers as ds
import pytest
import torch
import torch.distributed as dist
import workers
from deepspeed_workers import settings
from workers import Battery, Net

from gradcomp.testing import run

STAGES = (0, 1, 2, 3)
EF = "int8:error_feedback=true"
pytestmark = pytest.mark.timeout(300)


def residuals(handle: Any) -> dict[str, Any]:
    state = handle.state_dict()
    return {kind: state[kind] for kind in ("worker", "server", "factor")}


# ---------------------------------------------------------------- overflows
def overflow(rank: int, world: int, stage: int, spec: str, micro: int) -> dict[str, Any]:
    """Two steps in which rank 1 overflows, in the middle of a run."""
    engine = ds.make_engine(settings(stage, "fp16", gradient_accumulation_steps=micro))
    handle, _ = ds.attach(engine, spec)
    losses = ds.train(engine, range(4), rank)
    before, scale = residuals(handle), float(engine.optimizer.loss_scale)
    ds.train(engine, range(4, 6), rank, spikes=(4, 5))
    kept, skipped, after = ds.same(before, residuals(handle)), engine.skipped_steps, float(engine.optimizer.loss_scale)
    losses += ds.train(engine, range(6, 30), rank)
    return {
        "kept": kept,
        "held": bool(before["worker"]),
        "skipped": (skipped, engine.skipped_steps, handle.stats().skipped_steps),
        "scale": scale / after,
        "losses": losses,
        "finite": all(bool(v.isfinite().all()) for v in residuals(handle)["worker"].values()),
        "digest": ds.digest(engine),
        "steps": handle.stats().steps,
    }


def leftover(rank: int, world: int) -> dict[str, Any]:
    """Residuals of a compressor that is no longer used are sent once; if that step is skipped, they wait for the next."""
    engine = ds.make_engine(settings(2, "fp16", gradient_accumulation_steps=2))
    handle, _ = ds.attach(engine, EF)
    ds.train(engine, range(4), rank)
    before = residuals(handle)
    handle.set("none")
    ds.train(engine, range(4, 5), rank, spikes=(4,))  # finite in the first micro-batch, so they are sent there
    after = handle.stats().residual_norm
    ds.train(engine, range(5, 6), rank)
    norm = sum(float(v.norm() ** 2) for v in before["worker"].values()) ** 0.5
    return {
        "skipped": engine.skipped_steps, "before": norm, "after": after, "sent": handle.stats().residual_norm,
        "digest": ds.digest(engine),
    }  # fmt: skip


# ---------------------------------------------------------------- checkpoints
def shared_folder() -> Path:
    """A new folder that all ranks know."""
    where = [tempfile.mkdtemp(prefix="gradcomp-deepspeed-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, src=0)
    return Path(str(where[0]))


def discard(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def save(engine: Any, folder: Path, **options: Any) -> None:
    with ds.quiet():
        engine.save_checkpoint(str(folder), **options)


def load(engine: Any, folder: Path, **options: Any) -> list[str]:
    """Load, and return what gradcomp warned of."""
    with ds.quiet(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert engine.load_checkpoint(str(folder), **options)[0] is not None
    return [str(each.message) for each in caught if "gradcomp" in str(each.message)]


def resume(rank: int, world: int, config: dict[str, Any], spec: str) -> dict[str, Any]:
    folder = shared_folder()
    engine = ds.make_engine(config)
    stock = inspect.signature(engine.save_checkpoint), inspect.signature(engine.load_checkpoint)
    handle, _ = ds.attach(engine, spec, warmup_steps=2)
    ours = inspect.signature(engine.save_checkpoint), inspect.signature(engine.load_checkpoint)
    ds.train(engine, range(5), rank)
    save(engine, folder)
    saved = residuals(handle)
    ds.train(engine, range(5, 9), rank)
    expected = ds.digest(engine)

    engine = ds.make_engine(config, Net(seed=1))
    handle, _ = ds.attach(engine, spec, warmup_steps=2)
    said = load(engine, folder)
    restored, step = residuals(handle), handle.step
    ds.train(engine, range(5, 9), rank)
    files = sorted(path.name for path in (folder / "global_step5").glob("gradcomp*"))
    discard(folder)
    return {
        "exact": ds.digest(engine) == expected,
        "restored": ds.same(saved, restored),
        "held": bool(saved["worker"]),
        "step": step,
        "said": said,
        "signatures": stock == ours,
        "files": files,
    }


def damage(folder: Path, kind: str, rank: int) -> None:
    """Make rank 1's side-car useless."""
    path = folder / f"gradcomp_rank_{rank:05d}.pt"
    if rank != 1:
        return
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:300])
    elif kind == "foreign":
        torch.save({"step": 3}, path)
    elif kind == "of another model":
        content = torch.load(path)
        content["state"]["0"]["worker"]["somewhere.else"] = torch.zeros(3)
        torch.save(content, path)


def bad_resume(rank: int, world: int, kind: str) -> dict[str, Any]:
    folder, config = shared_folder(), settings(1)
    engine = ds.make_engine(config)
    if kind != "none at all":
        ds.attach(engine, EF)
    ds.train(engine, range(3), rank)
    save(engine, folder, tag="mine")
    dist.barrier()
    damage(folder / "mine", kind, rank)
    dist.barrier()

    engine = ds.make_engine(config, Net(seed=1))
    handle, _ = ds.attach(engine, EF)
    ds.train(engine, range(2), rank)
    said = load(engine, folder, tag="mine")
    norm = handle.stats().residual_norm
    ds.train(engine, range(3, 5), rank)
    discard(folder)
    return {"said": said, "norm": norm, "digest": ds.digest(engine), "later": handle.stats().residual_norm}


def module_only(rank: int, world: int) -> dict[str, Any]:
    """Only weights are asked for, so residuals of something else must not stay, and nothing is warned of."""
    folder, config = shared_folder(), settings(1)
    engine = ds.make_engine(config)
    handle, _ = ds.attach(engine, EF)
    ds.train(engine, range(3), rank)
    save(engine, folder)
    said = load(engine, folder, load_module_only=True)
    discard(folder)
    return {"said": said, "norm": handle.stats().residual_norm}


def unwritable(rank: int, world: int) -> str:
    """A full disk on one rank is an error on all of them."""
    folder, engine = shared_folder(), ds.make_engine(settings(1))
    ds.attach(engine, EF)
    ds.train(engine, range(1), rank)
    if rank == 1:
        (folder / "mine").write_text("a file where the folder should be")
    dist.barrier()
    try:
        save(engine, folder, tag="mine")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        discard(folder)
    return ""


KINDS = ["missing", "truncated", "foreign", "of another model", "none at all"]
RESUMED: dict[str, Any] = {
    **{f"zero{stage}": (settings(stage), EF) for stage in STAGES},
    **{f"zero{stage} fp16": (settings(stage, "fp16"), EF) for stage in (0, 2)},
    "zero3 bf16 accumulating": (settings(3, "bf16", gradient_accumulation_steps=2), EF),
    "zero1 powersgd": (settings(1), "powersgd"),
    "BF16_Optimizer": (settings(1, "bf16", data_types={"grad_accum_dtype": "fp32"}), EF),
}
RUN = Battery(
    2,
    {
        "start": (ds.start, ()),
        **{("overflow", stage, 1): (overflow, (stage, EF, 1)) for stage in STAGES},
        **{("overflow", stage, 3): (overflow, (stage, EF, 3)) for stage in (2, 3)},
        "leftover": (leftover, ()),
        **{("resume", name): (resume, arguments) for name, arguments in RESUMED.items()},
        **{("bad", kind): (bad_resume, (kind,)) for kind in KINDS},
        "module only": (module_only, ()),
        "unwritable": (unwritable, ()),
    },
    timeout=280,
)


@pytest.mark.parametrize(("stage", "micro"), [(0, 1), (1, 1), (2, 1), (3, 1), (2, 3), (3, 3)])
def test_overflows_skip_their_steps_and_move_no_residual(stage: int, micro: int) -> None:
    results = RUN["overflow", stage, micro]
    for result in results:
        assert result["skipped"] == (2, 2, 2), "two steps, then no more"
        assert result["held"]
        assert result["kept"]
        assert result["finite"]
        assert result["scale"] == 4.0
        assert result["steps"] == 30
        assert sum(result["losses"][-8:]) < 0.5 * sum(result["losses"][:8]), "training goes on"
    assert results[0]["digest"] == results[1]["digest"]


def test_residuals_that_were_sent_in_a_skipped_step_come_back() -> None:
    results = RUN["leftover"]
    for result in results:
        assert result["skipped"] == 1
        assert result["before"] > 0
        assert result["after"] >= result["before"] * 0.5, "the owners' residuals were folded in"
        assert result["sent"] == 0.0
    assert results[0]["digest"] == results[1]["digest"]


@pytest.mark.parametrize("name", list(RESUMED))
def test_resume_continues_bit_for_bit(name: str) -> None:
    for result in RUN["resume", name]:
        assert result["held"]
        assert result["restored"]
        assert result["exact"]
        assert result["step"] == 5, "so that a warm-up is not repeated"
        assert result["said"] == []
        assert result["signatures"]
        assert result["files"] == ["gradcomp_rank_00000.pt", "gradcomp_rank_00001.pt"]


@pytest.mark.parametrize("kind", KINDS)
def test_useless_side_cars_are_a_warning_and_a_reset_on_all_ranks(kind: str) -> None:
    results = RUN["bad", kind]
    reason = {
        "missing": "there is no file", "truncated": "is damaged", "foreign": "was not written by",
        "of another model": "unknown parameters ['somewhere.else']", "none at all": "there is no file",
    }[kind]  # fmt: skip
    for result in results:
        assert len(result["said"]) == 1
        assert "residuals start at zero after load_checkpoint" in result["said"][0]
        assert "rank 1" in result["said"][0]
        assert reason in result["said"][0]
        assert result["norm"] == 0.0
        assert result["later"] > 0.0
    assert results[0]["digest"] == results[1]["digest"]
    assert results[0]["said"] == results[1]["said"]


def test_weights_alone_bring_no_residuals() -> None:
    for result in RUN["module only"]:
        assert result == {"said": [], "norm": 0.0}


def test_a_side_car_that_cannot_be_written_is_an_error_on_all_ranks() -> None:
    first, second = RUN["unwritable"]
    assert first == second
    assert first.startswith("GradcompError: save_checkpoint: the residuals could not be written: rank ")


# ---------------------------------------------------------------- another number of ranks
def leave(rank: int, world: int, folder: str) -> None:
    """Three ranks save, at several stages."""
    ds.start(rank, world)
    for stage in (0, 2, 3):
        engine = ds.make_engine(settings(stage))
        handle, _ = ds.attach(engine, EF)
        ds.train(engine, range(3), rank)
        save(engine, Path(folder) / f"zero{stage}", tag="three")
        torch.save(handle.state_dict(), Path(folder) / f"before-{stage}-{rank}.pt")


def arrive(rank: int, world: int, folder: str) -> dict[int, Any]:
    """Two ranks load: at stage 0 as it is, at others from the universal checkpoint."""
    ds.start(rank, world)
    found = {}
    for stage in (0, 2, 3):
        tag, universal = ("three_universal", {"load_universal": True}) if stage else ("three", {})
        engine = ds.make_engine(settings(stage, checkpoint=universal), Net(seed=1))
        handle, _ = ds.attach(engine, EF)
        said = load(engine, Path(folder) / f"zero{stage}", tag=tag)
        torch.save(handle.state_dict(), Path(folder) / f"after-{stage}-{rank}.pt")
        ds.train(engine, range(3, 5), rank)
        found[stage] = (said, ds.digest(engine))
    return found


def test_fewer_ranks_keep_the_summed_residual(tmp_path: Path) -> None:
    run(leave, 3, str(tmp_path), timeout=140)
    for stage in (2, 3):
        command = [
            *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
            *("--num_extract_workers", "1", "--num_merge_workers", "1"),
            *("--input_folder", str(tmp_path / f"zero{stage}" / "three")),
            *("--output_folder", str(tmp_path / f"zero{stage}" / "three_universal")),
        ]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
        subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment)
    loaded = run(arrive, 2, str(tmp_path), timeout=140)
    for stage in (0, 2, 3):
        before, after = (
            workers.total_residual([torch.load(tmp_path / f"{when}-{stage}-{rank}.pt") for rank in range(world)], Net())
            for when, world in (("before", 3), ("after", 2))
        )
        size = max(float(value.abs().max()) for value in before.values())
        assert size > 0
        assert workers.worst(before, after) < 1e-6 * size
        assert all(found[stage][0] == [] for found in loaded)
        assert loaded[0][stage][1] == loaded[1][stage][1]
