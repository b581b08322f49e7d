"""One lane: its initial state, its step, and a loop over steps, all pure and compiled.

A lane is one training run: one arm, one learning rate, one seed. What differs between lanes is
traced (`Lane`), what they share is compiled in (`LaneProgram`), so lanes whose arms are numbers are
calls of one compiled program, arms with parameters of their own get a program a kind, and a lane
gives the same bits alone or beside others.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Generator, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from attention import transformer
from attention.transformer import TransformerConfig
from experiments.arms import Arm
from experiments.config import RunConfig
from experiments.metrics import Evaluation, StepMetrics
from experiments.tasks import Task
from experiments.tasks.samplers import Batch, sample

MOMENTUM = 0.9  # of SGD
WEIGHT_DECAY = 0.01  # of AdamW, decoupled (Loshchilov & Hutter 2019)
ADAM_EPSILON = 1e-8

BATCH_AXIS = "batch"  # of the mesh whose devices share a batch
CAPACITY = 256  # most steps one call of `advance` can record

# A random stream is named and folded in, so that a new one never shifts another's draws.
STREAMS = {"init": 0, "data": 1, "dropout": 2, "evaluation": 3}
EVALUATION_SEED = 0x5EED  # of the held-out set, the same one for every lane of every run

# Groups of parameters in the optimizer; the first two as checkpoints of every version name them.
QUERY_KEY, REST, UNDECAYED = True, False, 2


class LaneProgram(NamedTuple):
    """What lanes of a kind share; static, so one of these is one compiled program."""

    task: Task
    batch_size: int
    eval_size: int
    model: TransformerConfig
    optimizer: str
    warmup_steps: int
    clip_norm: float  # inf: off
    matmul_precision: str
    batch_shards: int = 1  # devices that share a batch, see `devices.Place`

    @property
    def kind(self) -> str:
        """What the arms of these lanes have in common; "" where they are numbers."""
        return "" if self.model.hooks is None else self.model.hooks.kind


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


def lane_program(config: RunConfig, arm: Arm) -> LaneProgram:
    """The static part of a config, for an arm of it and all others of the same kind."""
    task = config.make_task()
    model = TransformerConfig(
        num_tokens=task.num_tokens,
        num_outputs=task.num_outputs,
        sequence_length=task.sequence_length,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        d_model=config.d_model,
        d_k=config.d_k,
        d_v=config.d_v,
        d_ff=config.d_ff,
        causal=task.causal,
        norm=config.norm,
        dropout_rate=config.dropout_rate,
        dtype=config.dtype,
        attention=config.attention,
        hooks=arm.rule.hooks,
    )
    return LaneProgram(
        task=task,
        batch_size=config.batch_size,
        eval_size=config.eval_size,
        model=model,
        optimizer=config.optimizer,
        warmup_steps=config.warmup_steps,
        clip_norm=config.clip_norm,
        matmul_precision=config.matmul_precision,
        batch_shards=config.batch_shards,
    )


@contextlib.contextmanager
def pinned(program: LaneProgram) -> Generator[None]:
    """Trace with what decides numbers as the program says, whatever the process has set."""
    with (
        jax.default_matmul_precision(program.matmul_precision),
        jax.enable_x64(False),
        jax.threefry_partitionable(True),
        jax.numpy_dtype_promotion("standard"),
    ):
        yield


def stream_key(seed: jax.Array | np.uint32, stream: str, step: jax.Array | int = 0) -> jax.Array:
    """The key of one named random stream of a seed, at one step."""
    return jax.random.fold_in(
        jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), STREAMS[stream]), step
    )


@functools.partial(jax.jit, static_argnames="program")
def initialize(program: LaneProgram, lane: Lane) -> LaneState:
    """The state before the first update; weights depend on the seed and query_key_init only."""
    with pinned(program):
        params = transformer.init(program.model, stream_key(lane.seed, "init"))
        params = jax.tree.map(
            lambda is_query_key, p: p * lane.query_key_init if is_query_key else p,
            transformer.query_key_mask(params),
            params,
        )
        optimizer_state = make_optimizer(program, lane, lane.learning_rate).init(params)
        return LaneState(params, optimizer_state, jnp.int32(0), jnp.int32(-1))


class Advanced(NamedTuple):
    """A lane after a call of `advance`."""

    state: LaneState
    rows: StepMetrics  # leading axis [CAPACITY], of which the first `taken` mean something
    taken: jax.Array  # int32: steps taken; fewer than asked for where the lane diverged


@functools.partial(jax.jit, static_argnames="program")
def advance(
    program: LaneProgram, lane: Lane, state: LaneState, num_steps: jax.Array | int
) -> Advanced:
    """Take num_steps (traced, at most CAPACITY) updates.

    A step whose loss or gradient is not finite is recorded, but its update never reaches the
    parameters: the lane is frozen there and takes no further step.
    """
    with pinned(program):
        row = jax.eval_shape(functools.partial(train_step, program), lane, state)[1]
        rows = jax.tree.map(lambda m: jnp.zeros((CAPACITY, *m.shape), m.dtype), row)

        def unfinished(carry: Advanced) -> jax.Array:
            return (carry.taken < num_steps) & (carry.state.diverged_at < 0)

        def body(carry: Advanced) -> Advanced:
            state, row = train_step(program, lane, carry.state)
            rows = jax.tree.map(
                lambda all_rows, m: all_rows.at[carry.taken].set(m), carry.rows, row
            )
            return Advanced(state, rows, carry.taken + 1)

        return jax.lax.while_loop(unfinished, body, Advanced(state, rows, jnp.int32(0)))


@functools.partial(jax.jit, static_argnames="program")
def advance_together(
    program: LaneProgram, lanes: Lane, states: LaneState, num_steps: jax.Array | int
) -> Advanced:
    """`advance` for several lanes in one computation: every field has a leading axis of lanes.

    Accelerators need it to be busy. The numbers may differ from `advance` in the last bits.
    """
    return jax.vmap(lambda lane, state: advance(program, lane, state, num_steps))(lanes, states)


def train_step(program: LaneProgram, lane: Lane, state: LaneState) -> tuple[LaneState, StepMetrics]:
    """One update and everything measured on the way.

    Attention that never holds its logits has no gradient with respect to them to measure: None.
    """
    batch = sample_batch(program, stream_key(lane.seed, "data", state.step))
    dropout_key = None
    if program.model.dropout_rate > 0:
        dropout_key = stream_key(lane.seed, "dropout", state.step)
    c = program.model
    probe = None
    if c.attention == "plain":
        rows = (c.num_heads, c.sequence_length, c.sequence_length)
        probe = jnp.zeros((c.num_layers, program.batch_size, *rows))

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
        grad_norm_logits=None if probe is None else optax.tree.norm(probe_gradient),
        update_norm=optax.tree.norm(updates),
        heads=heads,
        parameters=transformer.rule_parameters(state.params),
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
    with pinned(program):
        batch = evaluation_batch(program)
        output = transformer.apply(program.model, state.params, batch.tokens_BT, lane.multiplier)
        numbers = loss_and_accuracy(output.logits, batch)
        return Evaluation(*(jnp.where(state.diverged_at < 0, n, jnp.nan) for n in numbers))


def evaluation_batch(program: LaneProgram) -> Batch:
    """The held-out sequences: eval_size of them, from a stream that training never draws from."""
    key = stream_key(np.uint32(EVALUATION_SEED), "evaluation")
    return _shard(program, sample(program.task, key, program.eval_size))


def sample_batch(program: LaneProgram, key: jax.Array) -> Batch:
    """One training batch of the program's task."""
    return _shard(program, sample(program.task, key, program.batch_size))


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
    if program.clip_norm < math.inf:
        clip = optax.clip_by_global_norm(program.clip_norm)
    groups: dict[Hashable, optax.GradientTransformation] = {
        QUERY_KEY: base(
            rate * lane.query_key_learning_rate,
            ADAM_EPSILON * lane.query_key_epsilon,
            WEIGHT_DECAY * lane.query_key_decay,
        ),
        REST: base(rate, ADAM_EPSILON, WEIGHT_DECAY),
    }
    if program.model.hooks is not None:
        groups[UNDECAYED] = base(rate, ADAM_EPSILON, 0.0)
    return optax.chain(clip, optax.partition(groups, functools.partial(_groups, program)))


def _groups(program: LaneProgram, params: transformer.Params) -> Any:
    """The group of each parameter."""
    hooks = program.model.hooks
    groups = transformer.query_key_mask(params)
    if hooks is None:
        return groups
    own = jax.tree_util.tree_map_with_path(
        lambda path, _: REST if path[-1].key in hooks.decayed else UNDECAYED,
        params[transformer.SCORE_RULE],
    )
    return {**groups, transformer.SCORE_RULE: own}


def _kernel_norm(gradients: transformer.Params, name: str) -> jax.Array:
    attentions = [part for part in gradients.values() if "query" in part]
    return optax.tree.norm([part[name] for part in attentions])
