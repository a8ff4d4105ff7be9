"""The demo's models: small, but of the shapes that compression is about (matrices, convolutions, an embedding, norms)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcomp.demo.data import CONTEXT

HEADS = 4


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class ByteTransformer(nn.Module):
    """A decoder-only transformer over bytes, by default of 1.4 M parameters."""

    def __init__(self, width: int = 192, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length, 256] for ``tokens`` int64 [batch, length]."""
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class ConvNet(nn.Module):
    """Two convolutions and a perceptron, for images of ``side`` x ``side`` in 10 classes; 0.8 to 1.4 M parameters."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        features = 64 * (side // 4) ** 2
        # small images leave few features: a wider perceptron keeps the model large enough to be worth compressing
        hidden = 256 if side >= 28 else 1024
        self.hidden1 = nn.Linear(features, hidden)
        self.hidden2 = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, 10] for ``images`` fp32 [batch, 1, side, side]."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.hidden2(F.relu(self.hidden1(x.flatten(1)))))
        logits: Tensor = self.head(x)
        return logits


def build(task: str, side: int) -> nn.Module:
    """The model of ``task``; ``side`` of the images, if it is about images."""
    return ByteTransformer() if task == "text" else ConvNet(side)
