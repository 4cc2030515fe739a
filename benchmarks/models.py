"""A small transformer that learns to count: the model of the training benchmarks."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256


class Block(nn.Module):
    """An attention layer and a perceptron; their matrices are larger than the smallest tensors that DeepSpeed swaps."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.perceptron_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part.unsqueeze(1) for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True).squeeze(1)
        x = x + self.projection(attended)
        return x + self.down(nn.functional.gelu(self.up(self.perceptron_norm(x))))


class Transformer(nn.Module):
    """A transformer that learns to count; with ``checkpoint_activations`` the backward pass recomputes its blocks."""

    def __init__(self, layers: int, hidden: int, *, checkpoint_activations: bool = False) -> None:
        super().__init__()
        self._checkpoint_activations = checkpoint_activations
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.Sequential(*(Block(hidden) for _ in range(layers)))
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        if self._checkpoint_activations:
            for block in self.blocks:
                # With use_reentrant=False, DeepSpeed 0.19.8's ZeRO-3 trains with wrong gradients.
                x = checkpoint(block, x, use_reentrant=True)
        else:
            x = self.blocks(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, sequence: int, rank: int = 0) -> torch.Tensor:
    """Return the tokens of a step: two sequences, which differ between ranks."""
    starts = torch.tensor([[7 * step + rank], [11 * step + rank]])
    return (starts + torch.arange(sequence)) % VOCABULARY
