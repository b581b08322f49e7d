"""The same training in PyTorch, eager and compiled: same model, task, optimizer and diagnostics.

    python -m benchmarks.torch_peer

Needs PyTorch, which nothing else here does: see requirements-benchmarks.txt.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rounds import Work, measure, spread
from experiments.config import TrainConfig, resolve


class Layer(nn.Module):
    """Attention and feed-forward, each after its LayerNorm."""

    def __init__(self, c: Any):
        super().__init__()
        self.heads = c.num_heads
        self.attention_norm = nn.LayerNorm(c.d_model, eps=1e-6)
        self.feed_forward_norm = nn.LayerNorm(c.d_model, eps=1e-6)
        self.query, self.key = (
            nn.Linear(c.d_model, c.num_heads * c.d_k, bias=False) for _ in range(2)
        )
        self.value = nn.Linear(c.d_model, c.num_heads * c.d_v, bias=False)
        self.output = nn.Linear(c.num_heads * c.d_v, c.d_model, bias=False)
        self.hidden = nn.Linear(c.d_model, c.d_ff)
        self.feed_forward = nn.Linear(c.d_ff, c.d_model)
        for linear in (self.query, self.key, self.value):
            nn.init.normal_(linear.weight, std=c.d_model**-0.5)

    def forward(self, x: Tensor, scale: float, probe: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """[B, T, D] to the same, and the statistics of each head."""
        normed = self.attention_norm(x)

        def heads(linear: nn.Linear) -> Tensor:  # [B, H, T, K]
            return linear(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)

        query, key, value = heads(self.query), heads(self.key), heads(self.value)
        logits = query @ key.transpose(-1, -2) * scale + probe
        weights = logits.softmax(-1)
        values = (weights @ value).transpose(1, 2).flatten(-2)
        x = x + self.output(values)
        x = x + self.feed_forward(functional.relu(self.hidden(self.feed_forward_norm(x))))
        return x, row_statistics(logits.detach())


def row_statistics(logits: Tensor) -> dict[str, Tensor]:
    """What `attention_statistics` and `head_means` give, by the same tail sums: each [H]."""
    maximum, place = logits.max(-1, keepdim=True)
    shifted = logits - maximum
    tail = shifted.exp().scatter(-1, place, 0.0)
    a1, a2, a3 = tail.sum(-1), (tail**2).sum(-1), (tail**3).sum(-1)
    z = 1 + a1
    entropy = a1.log1p() - (tail * shifted).sum(-1) / z
    norm = a1**2 + 3 * a2 - 2 * a3 + 2 * a1 * (a2 - a3) + a1**2 * a2 + a2**2
    rows = {
        "entropy": entropy,
        "normalized_entropy": entropy / math.log(logits.shape[-1]),
        "max_weight": 1 / z,
        "saturation": (1 / z > 0.9).float(),
        "jacobian_trace": (2 * a1 + a1**2 - a2) / z**2,
        "dead_row_fraction": (norm.sqrt() / z**2 < 1e-3).float(),
        "logit_std": logits.std(-1, correction=0),
    }
    means = {name: values.mean((0, 2)) for name, values in rows.items()}
    return means | {"logit_max": maximum.amax((0, 2, 3))}


class Transformer(nn.Module):
    """Pre-norm, learned positions."""

    def __init__(self, c: Any, vocab: int):
        super().__init__()
        self.token = nn.Embedding(vocab, c.d_model)
        self.position = nn.Embedding(c.sequence_length, c.d_model)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model, eps=1e-6)
        self.readout = nn.Linear(c.d_model, vocab)

    def forward(self, tokens: Tensor, targets: Tensor, scale: float, probes: list[Tensor]):
        """(loss, accuracy, the statistics of each layer)."""
        x = self.token(tokens) + self.position.weight
        statistics = []
        for layer, probe in zip(self.layers, probes, strict=True):
            x, rows = layer(x, scale, probe)
            statistics.append(rows)
        logits = self.readout(self.norm(x))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss, (logits.argmax(-1) == targets).float().mean(), statistics


def norm(tensors: list[Tensor]) -> Tensor:
    """The norm of all entries together."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


def contender(config: TrainConfig, steps: int, compiled: bool) -> Work:
    """One model; task sort, drawn anew at every step."""
    c: Any = resolve(config)
    torch.manual_seed(0)
    model = Transformer(c, c.vocab_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    forward = torch.compile(model) if compiled else model
    parameters = list(model.parameters())
    shape = (c.batch_size, c.num_heads, c.sequence_length, c.sequence_length)
    probes = [torch.zeros(shape, requires_grad=True) for _ in range(c.num_layers)]
    kernels = {
        name: [getattr(layer, name).weight for layer in model.layers]
        for name in ("query", "key", "value", "output")
    }

    def step() -> list[float]:
        tokens = torch.randint(c.vocab_size, (c.batch_size, c.sequence_length))
        loss, accuracy, statistics = forward(tokens, tokens.sort(-1).values, 0.125, probes)
        optimizer.zero_grad(set_to_none=True)
        for probe in probes:
            probe.grad = None
        loss.backward()
        with torch.no_grad():
            norms = [norm([p.grad for p in parameters]), norm([p.grad for p in probes])]
            norms += [norm([p.grad for p in kernel]) for kernel in kernels.values()]
            before = [p.detach().clone() for p in parameters]
            optimizer.step()
            norms.append(norm(torch._foreach_sub(before, parameters)))
            by_head = [value for rows in statistics for value in rows.values()]
            numbers = torch.cat([torch.stack([loss.detach(), accuracy, *norms]), *by_head])
        return numbers.tolist()

    def work() -> tuple[float, float]:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return steps, time.perf_counter() - start

    for _ in range(3):
        step()
    return work


def main() -> None:
    """Print model-steps per second."""
    contenders = {
        name: (contender, (TrainConfig(), 200, compiled))
        for name, compiled in (("eager", False), ("torch.compile", True))
    }
    for name, rates in measure(contenders, rounds=3).items():
        print(f"{name}: {spread(rates, '.0f')} model-steps/s")


if __name__ == "__main__":
    main()
