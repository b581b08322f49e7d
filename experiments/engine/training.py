"""One lane: its initial state, its step, and a loop over steps, all pure and compiled.

A lane is one training run: one score rule, one learning rate, one seed. What differs between lanes
is traced (`Lane`), what they share is compiled in (`LaneProgram`), so all lanes of a run are calls
of the same compiled program, and a lane gives the same bits alone or beside others.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from attention import transformer
from attention.statistics import HeadStatistics
from attention.transformer import TransformerConfig
from experiments.config import TrainConfig
from experiments.tasks import Batch, Task, make_task

MOMENTUM = 0.9  # of SGD
WEIGHT_DECAY = 0.01  # of AdamW, decoupled (Loshchilov & Hutter 2019)
ADAM_EPSILON = 1e-8

BATCH_AXIS = "batch"  # of the mesh whose devices share a batch
CAPACITY = 256  # most steps one call of `advance` can record

# A random stream is named and folded in, so that a new one never shifts another's draws.
STREAMS = {"init": 0, "data": 1, "dropout": 2, "evaluation": 3}
EVALUATION_SEED = 0x5EED  # of the held-out set, the same one for every lane of every run


class LaneProgram(NamedTuple):
    """What all lanes of a run share; static, so one of these is one compiled program."""

    task: str
    sequence_length: int
    vocab_size: int
    batch_size: int
    eval_size: int
    model: TransformerConfig
    optimizer: str
    warmup_steps: int
    clip_norm: float | None
    batch_shards: int = 1  # devices that share a batch, see `lanes.Place`


class Lane(NamedTuple):
    """What one lane has of its own; traced numbers, so lanes share one program.

    The last four are what makes "unscaled" more than a scale: where W_q and W_k start, and how
    fast they move. All ones is ordinary training.
    """

    multiplier: Any  # of q·k
    learning_rate: Any
    seed: Any  # uint32
    query_key_init: Any = 1.0  # multiplies W_q and W_k at the start
    query_key_learning_rate: Any = 1.0  # multiplies their learning rate
    query_key_epsilon: Any = 1.0  # multiplies Adam's ε for them
    query_key_decay: Any = 1.0  # multiplies AdamW's decay for them


class LaneState(NamedTuple):
    """Where a lane stands, before update number `step`."""

    params: transformer.Params
    optimizer_state: optax.OptState
    step: jax.Array  # int32
    diverged_at: jax.Array  # int32: the step whose loss or gradient was not finite; -1 if none


class StepMetrics(NamedTuple):
    """What one step tells; step i describes the parameters before update i. float32 scalars."""

    loss: jax.Array  # mean cross-entropy over answer positions, nats
    accuracy: jax.Array  # fraction of answer positions that are right
    applied_learning_rate: jax.Array  # after warmup
    grad_norm: jax.Array  # of all parameters, before clipping
    grad_norm_query_kernel: jax.Array  # of W_q over all layers; likewise the next three
    grad_norm_key_kernel: jax.Array
    grad_norm_value_kernel: jax.Array
    grad_norm_output_kernel: jax.Array
    grad_norm_logits: jax.Array  # of ∂loss/∂logits, over all layers, heads and rows
    update_norm: jax.Array  # of the change to all parameters
    heads: HeadStatistics  # fields [L, H]


class Evaluation(NamedTuple):
    """A lane on the held-out set; float32 scalars."""

    loss: jax.Array
    accuracy: jax.Array


def lane_program(config: TrainConfig) -> LaneProgram:
    """The static part of a resolved config."""
    c: Any = config
    task = make_task(c.task, sequence_length=c.sequence_length, vocab_size=c.vocab_size)
    model = TransformerConfig(
        num_tokens=task.num_tokens,
        num_outputs=task.num_outputs,
        sequence_length=task.sequence_length,
        num_layers=c.num_layers,
        num_heads=c.num_heads,
        d_model=c.d_model,
        d_k=c.d_k,
        d_v=c.d_v,
        d_ff=c.d_ff,
        causal=task.causal,
        norm=c.norm,
        dropout_rate=c.dropout_rate,
        dtype=c.dtype,
        attention=c.attention,
    )
    return LaneProgram(
        task=c.task,
        sequence_length=c.sequence_length,
        vocab_size=c.vocab_size,
        batch_size=c.batch_size,
        eval_size=c.eval_size,
        model=model,
        optimizer=c.optimizer,
        warmup_steps=c.warmup_steps,
        clip_norm=c.clip_norm,
        batch_shards=c.batch_shards,
    )


def stream_key(seed: jax.Array | np.uint32, stream: str, step: jax.Array | int = 0) -> jax.Array:
    """The key of one named random stream of a seed, at one step."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), STREAMS[stream]), step)


@functools.partial(jax.jit, static_argnames="program")
def initialize(program: LaneProgram, lane: Lane) -> LaneState:
    """The state before the first update; weights depend on the seed and query_key_init only."""
    params = transformer.init(program.model, stream_key(lane.seed, "init"))
    params = jax.tree.map(
        lambda is_query_key, p: p * lane.query_key_init if is_query_key else p,
        transformer.query_key_mask(params),
        params,
    )
    optimizer_state = make_optimizer(program, lane, lane.learning_rate).init(params)
    return LaneState(params, optimizer_state, jnp.int32(0), jnp.int32(-1))


@functools.partial(jax.jit, static_argnames="program")
def advance(
    program: LaneProgram, lane: Lane, state: LaneState, num_steps: jax.Array | int
) -> tuple[LaneState, StepMetrics]:
    """Take num_steps (traced, at most CAPACITY) updates.

    Returns:
      The state after them, and StepMetrics with a leading axis [CAPACITY], of which the first
      num_steps are meaningful. A step whose loss or gradient is not finite is recorded, but its
      update never reaches the parameters; the lane is frozen there and its later rows are NaN.
    """
    row = jax.eval_shape(functools.partial(train_step, program), lane, state)[1]
    rows = jax.tree.map(lambda m: jnp.full((CAPACITY, *m.shape), jnp.nan, m.dtype), row)

    def unfinished(carry):
        taken, state, _ = carry
        return (taken < num_steps) & (state.diverged_at < 0)

    def body(carry):
        taken, state, rows = carry
        state, metrics = train_step(program, lane, state)
        rows = jax.tree.map(lambda all_rows, row: all_rows.at[taken].set(row), rows, metrics)
        return taken + 1, state, rows

    _, state, rows = jax.lax.while_loop(unfinished, body, (jnp.int32(0), state, rows))
    return state, rows


@functools.partial(jax.jit, static_argnames="program")
def advance_together(
    program: LaneProgram, lanes: Lane, states: LaneState, num_steps: jax.Array | int
) -> tuple[LaneState, StepMetrics]:
    """`advance` for several lanes in one computation: every field has a leading axis of lanes.

    Accelerators need it to be busy. The numbers may differ from `advance` in the last bits.
    """
    return jax.vmap(lambda lane, state: advance(program, lane, state, num_steps))(lanes, states)


def train_step(program: LaneProgram, lane: Lane, state: LaneState) -> tuple[LaneState, StepMetrics]:
    """One update and everything measured on the way.

    Attention that never holds its logits has no gradient with respect to them to measure: NaN.
    """
    batch = sample_batch(program, stream_key(lane.seed, "data", state.step))
    dropout_key = None
    if program.model.dropout_rate > 0:
        dropout_key = stream_key(lane.seed, "dropout", state.step)
    c = program.model
    positions = program.sequence_length
    probe = None
    if c.attention == "plain":
        probe = jnp.zeros((c.num_layers, program.batch_size, c.num_heads, positions, positions))

    def loss_fn(params, probe):
        output = transformer.apply(
            program.model,
            params,
            batch.tokens_BT,
            lane.multiplier,
            dropout_key=dropout_key,
            logit_probe_LBHTS=probe,
        )
        loss, accuracy = loss_and_accuracy(output.logits, batch)
        return loss, (accuracy, output.statistics)

    (loss, (accuracy, heads)), (gradients, probe_gradient) = jax.value_and_grad(
        loss_fn, argnums=(0, 1), has_aux=True
    )(state.params, probe)
    grad_norm = optax.tree.norm(gradients)
    rate = lane.learning_rate
    if program.warmup_steps:
        rate = rate * jnp.minimum(1.0, (state.step + 1) / program.warmup_steps)
    updates, optimizer_state = make_optimizer(program, lane, rate).update(
        gradients, state.optimizer_state, state.params
    )
    metrics = StepMetrics(
        loss=loss,
        accuracy=accuracy,
        applied_learning_rate=jnp.asarray(rate, jnp.float32),
        grad_norm=grad_norm,
        **{
            f"grad_norm_{name}_kernel": _kernel_norm(gradients, name)
            for name in ("query", "key", "value", "output")
        },
        grad_norm_logits=jnp.float32(jnp.nan) if probe is None else optax.tree.norm(probe_gradient),
        update_norm=optax.tree.norm(updates),
        heads=heads,
    )
    return guarded_update(state, updates, optimizer_state, loss, grad_norm), metrics


def guarded_update(
    state: LaneState,
    updates: optax.Updates,
    optimizer_state: optax.OptState,
    loss: jax.Array,
    grad_norm: jax.Array,
) -> LaneState:
    """Apply updates where loss and gradient are finite; otherwise freeze the lane as it is."""
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & (state.diverged_at < 0)
    new = (optax.apply_updates(state.params, updates), optimizer_state, state.step + 1)
    old = (state.params, state.optimizer_state, state.step)
    params, optimizer_state, step = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    newly_diverged = ~finite & (state.diverged_at < 0)
    diverged_at = jnp.where(newly_diverged, state.step, state.diverged_at)
    return LaneState(params, optimizer_state, step, diverged_at)


@functools.partial(jax.jit, static_argnames="program")
def evaluate(program: LaneProgram, lane: Lane, state: LaneState) -> Evaluation:
    """Loss and accuracy on the fixed held-out set, without dropout; NaN for a diverged lane."""
    batch = evaluation_batch(program)
    output = transformer.apply(program.model, state.params, batch.tokens_BT, lane.multiplier)
    numbers = loss_and_accuracy(output.logits, batch)
    return Evaluation(*(jnp.where(state.diverged_at < 0, number, jnp.nan) for number in numbers))


def evaluation_batch(program: LaneProgram) -> Batch:
    """The held-out sequences: eval_size of them, from a stream that training never draws from."""
    key = stream_key(np.uint32(EVALUATION_SEED), "evaluation")
    return _shard(program, _task(program).sample(key, program.eval_size))


def sample_batch(program: LaneProgram, key: jax.Array) -> Batch:
    """One training batch of the program's task."""
    return _shard(program, _task(program).sample(key, program.batch_size))


def _shard(program: LaneProgram, batch: Batch) -> Batch:
    """Split a batch over the devices that share it; XLA then splits what is computed from it."""
    if program.batch_shards == 1:
        return batch
    return jax.lax.with_sharding_constraint(batch, PartitionSpec(BATCH_AXIS))


def loss_and_accuracy(logits_BTO: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy (nats) and accuracy over answer positions; 0 and 0 if there are none."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_BTO, batch.targets_BT)
    right = jnp.argmax(logits_BTO, axis=-1) == batch.targets_BT
    count = jnp.maximum(jnp.sum(batch.answers_BT), 1)
    return (
        jnp.sum(jnp.where(batch.answers_BT, losses, 0)) / count,
        jnp.sum(batch.answers_BT & right) / count,
    )


def make_optimizer(
    program: LaneProgram, lane: Lane, rate: jax.Array
) -> optax.GradientTransformation:
    """The program's optimizer at one learning rate; queries' and keys' kernels may differ."""

    def base(rate, epsilon, decay) -> optax.GradientTransformation:
        match program.optimizer:
            case "adam":
                return optax.adam(rate, eps=epsilon)
            case "adamw":
                return optax.adamw(rate, eps=epsilon, weight_decay=decay)
            case "sgd":
                return optax.sgd(rate, momentum=MOMENTUM)
        raise ValueError(f"optimizer: unknown {program.optimizer!r}")

    clip = optax.identity()
    if program.clip_norm is not None:
        clip = optax.clip_by_global_norm(program.clip_norm)
    groups: dict[Hashable, optax.GradientTransformation] = {
        True: base(
            rate * lane.query_key_learning_rate,
            ADAM_EPSILON * lane.query_key_epsilon,
            WEIGHT_DECAY * lane.query_key_decay,
        ),
        False: base(rate, ADAM_EPSILON, WEIGHT_DECAY),
    }
    return optax.chain(clip, optax.partition(groups, transformer.query_key_mask))


def _kernel_norm(gradients: transformer.Params, name: str) -> jax.Array:
    attentions = [part for part in gradients.values() if "query" in part]
    return optax.tree.norm([part[name] for part in attentions])


def _task(program: LaneProgram) -> Task:
    return make_task(
        program.task, sequence_length=program.sequence_length, vocab_size=program.vocab_size
    )
