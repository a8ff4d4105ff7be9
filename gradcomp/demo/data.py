"""Real data that needs no download: source code of the standard library, Fashion-MNIST from Debian, scikit-learn's digits.

Every rank trains on its own share; evaluation data is held out and the same for all.
"""

from __future__ import annotations

import gzip
import struct
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradcomp.errors import ConfigError

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's and Ubuntu's package ``dataset-fashion-mnist`` puts it."""

CONTEXT = 64
"""Bytes that the text model sees at once."""

_HOLD_OUT_EVERY = 20  # every 20th file of the standard library is for evaluation
_SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Dataset:
    """One rank's training data and everyone's evaluation data.

    Text: ``train`` uint8 [bytes], ``evaluation`` int64 [windows, CONTEXT + 1], no labels. Images: ``train`` and
    ``evaluation`` fp32 [images, 1, side, side], labels int64 [images]. ``source`` says what it is.
    """

    source: str
    train: Tensor
    train_labels: Tensor | None
    evaluation: Tensor
    evaluation_labels: Tensor | None

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A random batch of inputs and targets; the same for the same state of ``generator``."""
        if self.train_labels is None:
            starts = torch.randint(self.train.numel() - CONTEXT - 1, (size,), generator=generator)
            windows = self.train[starts[:, None] + torch.arange(CONTEXT + 1)].long()
            return windows[:, :-1], windows[:, 1:]
        chosen = torch.randint(len(self.train), (size,), generator=generator)
        return self.train[chosen], self.train_labels[chosen]

    def evaluation_share(self, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """The part of the evaluation data that ``rank`` evaluates; the parts make up the whole."""
        if self.evaluation_labels is None:
            windows = self.evaluation[rank::ranks]
            return windows[:, :-1], windows[:, 1:]
        return self.evaluation[rank::ranks], self.evaluation_labels[rank::ranks]


def load(task: str, rank: int, ranks: int, *, full: bool = False) -> Dataset:
    """The data of ``task`` (text or images) as ``rank`` of ``ranks`` sees it.

    Evaluation data is 128 windows of text or 2000 images, which is enough for a curve; ``full``: 512 windows, or all of
    Fashion-MNIST's 10000 test images.

    Raises:
        ConfigError: this machine has no data for the task; the message says what to install.
    """
    return _text(rank, ranks, 512 if full else 128) if task == "text" else _images(rank, ranks, 1 if full else 5)


def describe(task: str) -> str:
    """What :func:`load` would use, without loading it.

    Raises:
        ConfigError: as :func:`load`.
    """
    if task == "text":
        files = _stdlib_files()
        megabytes = sum(path.stat().st_size for path in files) / 1e6
        version = ".".join(map(str, sys.version_info[:3]))
        return f"source code of Python {version}'s standard library, {len(files)} files, {megabytes:.1f} MB"
    if FASHION_MNIST.is_dir():
        return "Fashion-MNIST (Debian's dataset-fashion-mnist), 60000 images 28x28"
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise ConfigError(
            "task='images': allowed where there are images; install Debian's with 'apt install dataset-fashion-mnist' or "
            "scikit-learn's digits with: pip install 'gradcomp[bench]'"
        ) from None
    return "scikit-learn's digits, 1797 images 8x8 (no Fashion-MNIST: 'apt install dataset-fashion-mnist')"


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not _SKIP.intersection(path.relative_to(root).parts))
    if len(files) < 100:
        raise ConfigError(
            f"task='text': allowed where Python's standard library is installed as source; {root} holds {len(files)} files. "
            "Use --task images"
        )
    return files


def _text(rank: int, ranks: int, shown: int) -> Dataset:
    files = _stdlib_files()
    held_out = files[::_HOLD_OUT_EVERY]
    training = [path for i, path in enumerate(files) if i % _HOLD_OUT_EVERY]
    # whole files, dealt out in turn: the ranks see different text of the same kind
    train = _read(training[rank::ranks])
    evaluation = _read(held_out)
    windows = evaluation.numel() // (CONTEXT + 1)
    spread = torch.linspace(0, windows - 1, min(shown, windows)).long()
    chosen = evaluation[: windows * (CONTEXT + 1)].view(windows, CONTEXT + 1)[spread].long()
    return Dataset(describe("text"), train, None, chosen, None)


def _read(paths: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)


def _images(rank: int, ranks: int, every: int) -> Dataset:
    source = describe("images")
    if FASHION_MNIST.is_dir():
        train, train_labels, evaluation, evaluation_labels = (
            read_idx(FASHION_MNIST / f"{part}-{kind}.gz")
            for part in ("train", "t10k")
            for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
        )
        top = 255.0
        evaluation, evaluation_labels = evaluation[::every], evaluation_labels[::every]
    else:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels = digits.images, digits.target
        order = np.random.default_rng(0).permutation(len(images))
        held_out, training = order[:360], order[360:]
        train, train_labels = images[training], labels[training]
        evaluation, evaluation_labels = images[held_out], labels[held_out]
        top = 16.0
    mean, deviation = train.mean() / top, train.std() / top

    def prepared(images: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy((images[:, None] / top - mean) / deviation).float()

    def labelled(labels: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(labels.astype(np.int64))

    return Dataset(
        source,
        prepared(train[rank::ranks]),
        labelled(train_labels[rank::ranks]),
        prepared(evaluation),
        labelled(evaluation_labels),
    )


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read an array in the MNIST files' format (gzip, IDX, unsigned bytes).

    Raises:
        ConfigError: the file is missing or something else.
    """
    try:
        data = gzip.decompress(path.read_bytes())
        kind, dimensions = struct.unpack(">HBB", data[:4])[1:]
        shape = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
        if kind != 8:
            raise ValueError(f"element type {kind:#x} instead of unsigned bytes")
        return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"{path}: cannot be read as an IDX file: {error}") from error
