"""The Transformers ``Trainer``: a mixin that compresses, keeps the state in the Trainer's checkpoints and logs numbers.

The model is wrapped by Accelerate inside ``train()``, where callbacks see only the unwrapped model, and a checkpoint is loaded
before the first callback runs. So this is a mixin: it registers with the Trainer's ``Accelerator``, and saves and loads where
the Trainer saves and loads its optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradcomp.errors import UnsupportedError
from gradcomp.integrations.accelerate import Compression
from gradcomp.integrations.accelerate import register as register_accelerator
from gradcomp.integrations.trainers import required
from gradcomp.registration import SpecLike

with required("transformers", "transformers"):
    import transformers

_NEEDED = (
    "create_accelerator_and_postprocess",
    "_prepare_for_training",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
)


class GradcompMixin:
    """For any subclass of ``transformers.Trainer``: ``class MyTrainer(GradcompMixin, Seq2SeqTrainer): ...``.

    ``self.gradcomp.handle`` is the handle, from the start of ``train()`` on.

    Args:
        compression: as ``spec`` of :func:`gradcomp.register`.
        compression_options: the options of :func:`gradcomp.register`, such as ``{"warmup_steps": 200}``; ``scaler`` and
            ``optimizer`` are the Trainer's own, if not given.

    Raises:
        UnsupportedError: a way of distribution in which it cannot work, or a Trainer without the methods that it extends.
    """

    gradcomp: Compression

    def __init__(
        self,
        *args: Any,
        compression: SpecLike = "int8",
        compression_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        trainer = super()
        lacking = [name for name in _NEEDED if not hasattr(trainer, name)]
        if lacking:
            raise UnsupportedError(
                f"GradcompMixin goes before a transformers.Trainer and extends its {', '.join(lacking)}, which "
                f"{type(self).__name__} with transformers {transformers.__version__} lacks"
            )
        self._compression = compression
        self._compression_options = dict(compression_options or {})
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's; then its models-to-be are registered."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator, args = self.accelerator, self.args  # type: ignore[attr-defined]
        if args.n_gpu > 1:
            raise UnsupportedError(
                f"one process with {args.n_gpu} GPUs uses DataParallel, which exchanges no gradients between processes: start "
                "one process per GPU (torchrun)"
            )
        self.gradcomp = register_accelerator(accelerator, self._compression, **self._compression_options)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]
        self.gradcomp.require()
        return result

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        self.gradcomp.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            self.gradcomp.load(checkpoint)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The Trainer's, with the numbers of compression beside the training loss."""
        if "loss" in logs:
            logs.update(self.gradcomp.metrics())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class GradcompTrainer(GradcompMixin, transformers.Trainer):
    """``transformers.Trainer`` with compression: ``GradcompTrainer(model, args, ..., compression="int8")``."""
