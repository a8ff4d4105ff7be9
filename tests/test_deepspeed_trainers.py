"""Accelerate and the Transformers Trainer with a DeepSpeed configuration, through the patched ``deepspeed.initialize``."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed_workers as ds
import pytest
import torch
import torch.distributed as dist
from deepspeed_workers import settings
from workers import Battery, Net

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers 5.24 needs Python 3.11"),
]
BLOCK = {"compressor": "int8"}


def start(rank: int, world: int) -> None:
    # on the path, the root's folder `kernels` would shadow the package that transformers looks for
    root = Path(__file__).parent.parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != root]
    ds.start(rank, world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577", LOCAL_WORLD_SIZE=str(world), HF_HUB_OFFLINE="1")
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"


def fresh() -> None:
    """Accelerate keeps its state for the process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def accelerated(rank: int, world: int, stage: int, patched: bool, registered: bool = False) -> dict[str, Any]:
    from accelerate import Accelerator, DeepSpeedPlugin

    from gradcomp.integrations.accelerate import register
    from gradcomp.integrations.deepspeed import patched_initialize

    fresh()
    config = {**settings(stage), "gradcomp": BLOCK} if patched else settings(stage)
    with ds.quiet(), patched_initialize() if patched else nullcontext():
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        compression = register(accelerator, "int8") if registered else None
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
        engine, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        for step in range(20):
            loss = ds.loss_of(engine, step, rank)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    handle = getattr(engine, "gradcomp", None)
    assert compression is None or compression.handle is handle
    return {"losses": losses, "digest": ds.digest(engine), "stats": handle.stats().as_dict() if handle else None}


def tokens(rows: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    starts = torch.randint(0, 40, (rows, 1), generator=generator)
    ids = (starts + torch.arange(24)) % 40  # predictable
    return [{"input_ids": row, "labels": row} for row in ids]


def language_model(rank: int, world: int, stage: int, patched: bool, resume: bool = False) -> dict[str, Any]:
    import transformers

    from gradcomp.integrations.deepspeed import patched_initialize

    where = [tempfile.mkdtemp(prefix="gradcomp-trainer-") if rank == 0 else None]
    dist.broadcast_object_list(where, src=0)
    folder = Path(str(where[0]))
    config = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
    }  # fmt: skip
    if patched:
        config["gradcomp"] = {"compressor": "int8:error_feedback=true"}

    def train(steps: int, load: bool) -> Any:
        fresh()
        transformers.set_seed(0)
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
            )
        )
        arguments = transformers.TrainingArguments(
            str(folder), per_device_train_batch_size=8, max_steps=steps, learning_rate=3e-3, max_grad_norm=1.0,
            lr_scheduler_type="constant", save_strategy="steps" if resume else "no", save_steps=4, report_to="none",
            disable_tqdm=True, logging_strategy="no", deepspeed=config, optim="adamw_torch",
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=tokens(512))
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer, trainer.train(resume_from_checkpoint=load)

    with ds.quiet(), patched_initialize() if patched else nullcontext():
        warnings.filterwarnings("ignore", message="gradcomp: error feedback")
        trainer, output = train(8, False)
        first = ds.parameters(trainer.model_wrapped)
        files, again = sorted(p.name for p in folder.glob("checkpoint-4/**/gradcomp_rank*")), None
        if resume:
            for path in folder.glob("checkpoint-8"):
                dist.barrier()
                if rank == 0:
                    shutil.rmtree(path)
            dist.barrier()
            trainer, output = train(8, True)
            again = torch.equal(first, ds.parameters(trainer.model_wrapped))
    handle = getattr(trainer.model_wrapped, "gradcomp", None)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return {
        "loss": output.training_loss,
        "digest": ds.digest(trainer.model_wrapped),
        "stats": handle.stats().as_dict() if handle else None,
        "files": files,
        "again": again,
    }


RUN = Battery(
    2,
    {
        "start": (start, ()),
        **{("accelerate", s, patched): (accelerated, (s, patched)) for s in (0, 2, 3) for patched in (False, True)},
        "registered": (accelerated, (2, False, True)),
        **{("trainer", s, patched): (language_model, (s, patched)) for s in (2, 3) for patched in (False, True)},
        "resume": (language_model, (1, True, True)),
    },
    timeout=280,
)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_accelerate(stage: int) -> None:
    ours, theirs = RUN["accelerate", stage, True], RUN["accelerate", stage, False]
    assert theirs[0]["stats"] is None
    assert ours[0]["digest"] == ours[1]["digest"] != theirs[0]["digest"]
    assert ours[0]["stats"]["steps"] == ours[0]["stats"]["compressed_steps"] == 20
    assert ours[0]["stats"]["ratio"] > 3
    assert sum(ours[0]["losses"][-5:]) == pytest.approx(sum(theirs[0]["losses"][-5:]), rel=0.01)
    assert sum(ours[0]["losses"][-5:]) < 0.5 * sum(ours[0]["losses"][:5])


def test_accelerate_with_register() -> None:
    """``gradcomp.integrations.accelerate.register`` before ``prepare`` does what the configuration's block does."""
    for registered, patched in zip(RUN["registered"], RUN["accelerate", 2, True], strict=True):
        assert registered["digest"] == patched["digest"]
        assert registered["losses"] == patched["losses"]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_transformers_trainer(stage: int) -> None:
    ours, theirs = RUN["trainer", stage, True], RUN["trainer", stage, False]
    assert theirs[0]["stats"] is None
    assert ours[0]["digest"] == ours[1]["digest"] != theirs[0]["digest"]
    assert ours[0]["stats"]["steps"] == 8
    assert ours[0]["stats"]["ratio"] > 3
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=0.01)


def test_the_transformers_trainer_resumes_with_its_residuals() -> None:
    for result in RUN["resume"]:
        assert result["files"] == ["gradcomp_rank_00000.pt", "gradcomp_rank_00001.pt"]
        assert result["again"]
        assert result["stats"]["memory_bytes"] > 0
