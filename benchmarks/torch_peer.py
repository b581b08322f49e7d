"""The same training in PyTorch: same model, task, optimizer and diagnostics, four ways to run it.

Needs PyTorch, which nothing else here does: see requirements-benchmarks.txt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.nn import functional

from benchmarks.rounds import Work
from experiments.config import RunConfig
from experiments.metrics import HEAD_STATISTICS, STEP_SCALARS

LEARNING_RATE, SCALE = 1e-3, 0.125
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # Adam's, here and in optax
KERNELS = ("query", "key", "value", "output")

Numbers = dict[str, Tensor]
Norm = Callable[[Sequence[Tensor]], Tensor]
Step = Callable[[Tensor, Tensor], Tensor]  # (tokens, targets) to a row; trains on the way


class Layer(nn.Module):
    """Attention and feed-forward, each after its LayerNorm."""

    def __init__(self, c: RunConfig):
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

    def forward(self, x: Tensor, probe: Tensor) -> tuple[Tensor, Numbers]:
        """[B, T, D] to the same, and the statistics of each head."""
        normed = self.attention_norm(x)

        def heads(linear: nn.Linear) -> Tensor:  # [B, H, T, K]
            return linear(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)

        query, key, value = heads(self.query), heads(self.key), heads(self.value)
        logits = query @ key.transpose(-1, -2) * SCALE + probe
        weights = logits.softmax(-1)
        values = (weights @ value).transpose(1, 2).flatten(-2)
        x = x + self.output(values)
        x = x + self.feed_forward(functional.relu(self.hidden(self.feed_forward_norm(x))))
        return x, row_statistics(logits.detach())


def row_statistics(logits: Tensor) -> Numbers:
    """What `attention_statistics` and `head_means` give, by the same tail sums: each [H]."""
    maximum = logits.amax(-1, keepdim=True)
    shifted = logits - maximum
    below = shifted < 0
    tail = shifted.exp() * below
    ties = logits.shape[-1] - 1 - below.sum(-1)  # of the maximum, beside the one left out
    squares = tail * tail
    a1, a2, a3 = (power.sum(-1) + ties for power in (tail, squares, squares * tail))
    z = 1 + a1
    entropy = a1.log1p() - (tail * shifted).sum(-1) / z
    norm = a1**2 + 3 * a2 - 2 * a3 + 2 * a1 * (a2 - a3) + a1**2 * a2 + a2**2
    rows = {
        "dead_row_fraction": (norm.sqrt() / z**2 < 1e-3).float(),
        "entropy": entropy,
        "normalized_entropy": entropy / math.log(logits.shape[-1]),
        "max_weight": 1 / z,
        "saturation": (1 / z > 0.9).float(),
        "jacobian_trace": (2 * a1 + a1**2 - a2) / z**2,
        "logit_std": logits.std(-1, correction=0),
    }
    means = {name: values.mean((0, 2)) for name, values in rows.items()}
    return means | {"logit_max": maximum.amax((0, 2, 3))}


class Transformer(nn.Module):
    """Pre-norm, learned positions."""

    def __init__(self, c: RunConfig):
        super().__init__()
        self.token = nn.Embedding(c.vocab_size, c.d_model)
        self.position = nn.Embedding(c.sequence_length, c.d_model)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model, eps=1e-6)
        self.readout = nn.Linear(c.d_model, c.vocab_size)
        for linear in self.modules():
            if isinstance(linear, nn.Linear):
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def forward(self, tokens: Tensor, targets: Tensor, probes: Tensor) -> tuple[Tensor, Numbers]:
        """(loss, accuracy and the statistics [L, H])."""
        x = self.token(tokens) + self.position.weight
        statistics = []
        for layer, probe in zip(self.layers, probes, strict=True):
            x, rows = layer(x, probe)
            statistics.append(rows)
        logits = self.readout(self.norm(x))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        accuracy = (logits.argmax(-1) == targets).float().mean()
        heads = {name: torch.stack([rows[name] for rows in statistics]) for name in HEAD_STATISTICS}
        return loss, {"accuracy": accuracy, **heads}


def weights_of(params: Any) -> dict[str, Tensor]:
    """This project's weights (or the Flax peer's, which are named alike) as a state_dict."""

    def linear(part: Any) -> Numbers:
        kernel = np.asarray(part["kernel"])
        weights = {"weight": torch.tensor(kernel.reshape(kernel.shape[0], -1).T.copy())}
        return weights | (
            {"bias": torch.tensor(np.asarray(part["bias"]))} if "bias" in part else {}
        )

    def norm(part: Any) -> Numbers:
        return {
            "weight": torch.tensor(np.asarray(part["scale"])),
            "bias": torch.tensor(np.asarray(part["bias"])),
        }

    def embedding(part: Any) -> Numbers:
        return {"weight": torch.tensor(np.asarray(part["embedding"]))}

    modules = {name: embedding(params[name]) for name in ("token", "position")}
    modules |= {"norm": norm(params["final_norm"]), "readout": linear(params["readout"])}
    for i in range(sum(name.startswith("attention_norm_") for name in params)):
        feed_forward = params[f"feed_forward_{i}"]
        layer = {name: linear(params[f"attention_{i}"][name]) for name in KERNELS}
        layer |= {"hidden": linear(feed_forward["hidden"])}
        layer |= {"feed_forward": linear(feed_forward["output"])}
        layer |= {
            name: norm(params[f"{name}_{i}"]) for name in ("attention_norm", "feed_forward_norm")
        }
        modules |= {f"layers.{i}.{name}": part for name, part in layer.items()}
    return {f"{name}.{key}": x for name, part in modules.items() for key, x in part.items()}


class Way(NamedTuple):
    """One way to train it."""

    lanes: int = 0  # models in one batch by torch.func; 0: one plain nn.Module
    whole: bool = False  # gradients, norms and Adam by torch.func, in the program that is compiled
    compiled: bool = False  # torch.compile, fullgraph
    mode: str | None = None  # of torch.compile


def zero_probes(c: RunConfig) -> Tensor:
    """What the gradient with respect to the logits is taken at: [L, B, H, T, T]."""
    return torch.zeros(c.num_layers, c.batch_size, c.num_heads, *[c.sequence_length] * 2)


def make_step(c: RunConfig, way: Way, weights: Mapping[str, Tensor] | None = None) -> Step:
    """One update and everything that a row holds; weights to start from, or new ones."""
    models = [Transformer(c) for _ in range(max(way.lanes, 1))]
    for model in models if weights is not None else ():
        model.load_state_dict(weights)
    if way.whole:
        return _whole_step(c, way, models)
    return _usual_step(c, way, models)


def _usual_step(c: RunConfig, way: Way, models: Sequence[Transformer]) -> Step:
    """Forward and backward by autograd, PyTorch's fused Adam."""
    model, probes, norm = models[0], zero_probes(c), _norm
    parameters = dict(model.named_parameters())
    forward = model
    if way.lanes:
        norm = _norm_of_each
        parameters, _ = stack_module_state(list(models))
        probes = probes.repeat(way.lanes, 1, 1, 1, 1, 1)

        def forward(tokens, targets, probes):
            def one(*arguments):
                return functional_call(model, arguments[0], arguments[1:])

            return vmap(one)(parameters, tokens, targets, probes)

    probes.requires_grad_()
    optimizer = torch.optim.Adam(parameters.values(), lr=LEARNING_RATE, fused=True)
    if way.compiled:
        forward = torch.compile(forward, fullgraph=True, mode=way.mode)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss, row = forward(tokens, targets, probes)
        optimizer.zero_grad(set_to_none=True)
        probes.grad = None
        loss.sum().backward()
        with torch.no_grad():
            row |= _norms({n: p.grad for n, p in parameters.items()}, probes.grad, norm)
            before = [p.detach().clone() for p in parameters.values()]
            optimizer.step()
            change = torch._foreach_sub(list(parameters.values()), before)
            row |= {"loss": loss.detach(), "update_norm": norm(change)}
        return _flat(row, way.lanes)

    return step


def _whole_step(c: RunConfig, way: Way, models: Sequence[Transformer]) -> Step:
    """The whole update as one function of tensors, mapped over lanes and compiled as one graph."""
    model, probes = models[0], zero_probes(c)

    def loss_fn(parameters, probes, tokens, targets):
        return functional_call(model, parameters, (tokens, targets, probes))

    def update(parameters, moments, count, tokens, targets):
        (gradients, of_logits), (loss, row) = grad_and_value(loss_fn, (0, 1), has_aux=True)(
            parameters, probes, tokens, targets
        )
        new, change, new_moments = {}, [], {}
        for name, g in gradients.items():
            m, v = moments[name]
            m, v = m + (1 - BETA_1) * (g - m), v + (1 - BETA_2) * (g * g - v)
            root = (v / (1 - BETA_2**count)).sqrt() + EPSILON
            change.append(-LEARNING_RATE * (m / (1 - BETA_1**count)) / root)
            new[name], new_moments[name] = parameters[name] + change[-1], (m, v)
        row |= _norms(gradients, of_logits, _norm_of_one)
        row |= {"loss": loss, "update_norm": _norm_of_one(change)}
        return new, new_moments, _flat(row, 0)

    if way.lanes:
        parameters, _ = stack_module_state(list(models))
        update = vmap(update, in_dims=(0, 0, None, 0, 0))
    else:
        parameters = dict(model.named_parameters())
    parameters = {name: p.detach() for name, p in parameters.items()}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in parameters.items()}
    count = torch.zeros(())
    if way.compiled:
        update = torch.compile(update, fullgraph=True, mode=way.mode)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        nonlocal parameters, moments, count
        with torch.no_grad():
            count = count + 1
            parameters, moments, row = update(parameters, moments, count, tokens, targets)
        return row

    return step


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of all entries together."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


def _norm_of_one(tensors: Sequence[Tensor]) -> Tensor:
    """The same of operations that torch.func knows."""
    return torch.stack([t.square().sum() for t in tensors]).sum().sqrt()


def _norm_of_each(tensors: Sequence[Tensor]) -> Tensor:
    """The same for every lane of tensors with a leading axis of lanes."""
    return torch.stack([t.flatten(1).square().sum(1) for t in tensors]).sum(0).sqrt()


def _norms(gradients: Mapping[str, Tensor], of_logits: Tensor, norm: Norm) -> Numbers:
    kernels = {
        f"grad_norm_{kernel}_kernel": norm(
            [g for name, g in gradients.items() if name.endswith(f".{kernel}.weight")]
        )
        for kernel in KERNELS
    }
    return {
        "grad_norm": norm(list(gradients.values())),
        "grad_norm_logits": norm([of_logits]),
        **kernels,
    }


def _flat(row: Numbers, lanes: int) -> Tensor:
    """The numbers of a row in order: [N] or [lanes, N]."""
    row["applied_learning_rate"] = torch.full_like(row["loss"], LEARNING_RATE)
    ordered = [row[name] for name in (*STEP_SCALARS, *HEAD_STATISTICS)]
    if lanes:
        return torch.cat([numbers.reshape(lanes, -1) for numbers in ordered], dim=1)
    return torch.cat([numbers.reshape(-1) for numbers in ordered])


def contender(c: RunConfig, way: Way) -> Work:
    """Task sort, drawn anew at every step; every row is read."""
    torch.set_flush_denormal(True)  # as XLA does
    step = make_step(c, way)
    shape = (*([way.lanes] if way.lanes else []), c.batch_size, c.sequence_length)

    def work(seconds: float) -> tuple[float, float]:
        steps, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            tokens = torch.randint(c.vocab_size, shape)
            step(tokens, tokens.sort(-1).values).tolist()
            steps += 1
        return steps * max(way.lanes, 1), time.perf_counter() - start

    for _ in range(3):
        work(0.01)
    return work
