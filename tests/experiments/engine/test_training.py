"""One lane: its step against a plain loop, its streams, its guard against what is not finite."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attention import transformer
from experiments.arms import make_arm
from experiments.config import resolve
from experiments.engine import devices, lanes, training
from experiments.engine.training import LaneState
from experiments.tasks.samplers import Batch


def program_of(tiny, **changes):
    config = resolve(dataclasses.replace(tiny, **changes))
    return training.lane_program(config, config.arms()[0])


def make_lane(scale, learning_rate, seed, **query_key):
    """A lane of an arm that is a number."""
    return lanes.make_lane(make_arm(str(scale), 8), learning_rate, seed, **query_key)


def plain_losses(program, optimizer, lane, steps):
    """The same training by the usual Python loop around one jitted gradient."""
    params = training.initialize(program, lane).params
    state = optimizer.init(params)

    @jax.jit
    def gradient(params, batch):
        def loss(params):
            output = transformer.apply(program.model, params, batch.tokens_BT, lane.multiplier)
            labels = jax.nn.one_hot(batch.targets_BT, program.model.num_outputs)
            losses = -jnp.sum(labels * jax.nn.log_softmax(output.logits), axis=-1)
            return jnp.sum(losses * batch.answers_BT) / jnp.sum(batch.answers_BT)

        return jax.value_and_grad(loss)(params)

    losses, norms = [], []
    for step in range(steps):
        batch = training.sample_batch(program, training.stream_key(lane.seed, "data", step))
        loss, gradients = gradient(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(loss)
        leaves = jax.tree.leaves(gradients)
        norms.append(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in leaves)))
    return np.array(losses), np.array(norms), params


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        ({}, optax.adam(1e-2)),
        ({"optimizer": "adamw"}, optax.adamw(1e-2, weight_decay=0.01)),
        ({"optimizer": "sgd"}, optax.sgd(1e-2, momentum=0.9)),
        (
            {"warmup_steps": 4, "clip_norm": 0.1},
            optax.chain(
                optax.clip_by_global_norm(0.1),
                optax.adam(lambda count: 1e-2 * jnp.minimum(1, (count + 1) / 4)),
            ),
        ),
    ],
    ids=["adam", "adamw", "sgd", "warmup and clipping"],
)
def test_a_lane_trains_as_a_plain_loop_does(tiny, settings, optimizer):
    program, lane = program_of(tiny, **settings), make_lane(0.5, 1e-2, 3)
    state, rows, taken = training.advance(program, lane, training.initialize(program, lane), 6)
    losses, norms, params = plain_losses(program, optimizer, lane, 6)
    np.testing.assert_allclose(rows.loss[:6], losses, rtol=2e-5)
    np.testing.assert_allclose(rows.grad_norm[:6], norms, rtol=2e-4)
    chex.assert_trees_all_close(state.params, params, atol=2e-4)
    assert int(state.step) == int(taken) == 6
    assert int(state.diverged_at) == -1


def test_warmup_rises_to_the_rate_and_stays(tiny):
    program, lane = program_of(tiny, warmup_steps=4), make_lane(1.0, 1e-2, 0)
    _, rows, _ = training.advance(program, lane, training.initialize(program, lane), 6)
    expected = [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01]
    np.testing.assert_allclose(rows.applied_learning_rate[:6], expected, rtol=1e-6)


def test_kernel_norms_are_parts_of_the_global_norm(tiny):
    program, lane = program_of(tiny), make_lane(1.0, 1e-2, 0)
    state = training.initialize(program, lane)
    _, metrics = jax.jit(training.train_step, static_argnums=0)(program, lane, state)
    batch = training.sample_batch(program, training.stream_key(lane.seed, "data", 0))

    def loss(params):
        output = transformer.apply(program.model, params, batch.tokens_BT, lane.multiplier)
        return training.loss_and_accuracy(output.logits, batch)[0]

    gradients = jax.jit(jax.grad(loss))(state.params)["attention_0"]
    for name in ("query", "key", "value", "output"):
        expected = np.linalg.norm(np.asarray(gradients[name]["kernel"]).ravel())
        measured = getattr(metrics, f"grad_norm_{name}_kernel")
        np.testing.assert_allclose(measured, expected, rtol=1e-5)


def test_steps_do_not_depend_on_how_they_are_cut(tiny):
    program, lane = program_of(tiny, dropout_rate=0.1), make_lane(1.0, 1e-2, 0)
    whole, rows, _ = training.advance(program, lane, training.initialize(program, lane), 10)
    state, pieces = training.initialize(program, lane), []
    for steps in (1, 4, 5):
        state, piece, _ = training.advance(program, lane, state, steps)
        pieces.append(jax.tree.map(lambda row, n=steps: row[:n], piece))
    chex.assert_trees_all_equal(state, whole)
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *pieces)
    chex.assert_trees_all_equal(joined, jax.tree.map(lambda row: row[:10], rows))


def test_query_key_multipliers_change_queries_and_keys_only(tiny):
    program = program_of(tiny)
    plain, hot = make_lane(1.0, 1e-2, 0), make_lane(1.0, 1e-2, 0, query_key_init=2.0)
    start, hotter = (training.initialize(program, lane).params for lane in (plain, hot))
    doubled = jax.tree.map(
        lambda is_query_key, p: 2 * p if is_query_key else p,
        transformer.query_key_mask(start),
        start,
    )
    chex.assert_trees_all_equal(hotter, doubled)

    frozen = make_lane(1.0, 1e-2, 0, query_key_learning_rate=0.0)
    moved, _, _ = training.advance(program, frozen, training.initialize(program, frozen), 3)
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), moved.params, start)
    is_query_key = transformer.query_key_mask(start)
    assert jax.tree.map(lambda c, m: c != m, changed, is_query_key) == jax.tree.map(
        lambda m: True, is_query_key
    )


def test_a_gradient_that_is_not_finite_never_reaches_the_parameters():
    """SGD, rate 1, p = 0, gradients 1, nan, nan, nan, 1: p stays -1 from the first NaN on."""
    optimizer = optax.sgd(1.0)
    state = LaneState(jnp.float32(0), optimizer.init(jnp.float32(0)), jnp.int32(0), jnp.int32(-1))
    seen = []
    for gradient in (1.0, jnp.nan, jnp.nan, jnp.nan, 1.0):
        updates, optimizer_state = optimizer.update(jnp.float32(gradient), state.optimizer_state)
        state = training.guarded_update(
            state, updates, optimizer_state, jnp.float32(0), jnp.abs(jnp.float32(gradient))
        )
        seen.append((float(state.params), int(state.diverged_at)))
    assert seen == [(-1.0, -1)] + [(-1.0, 1)] * 4


def test_a_diverged_lane_is_frozen_and_its_later_rows_are_nan(tiny):
    program, lane = program_of(tiny, optimizer="sgd"), make_lane(1.0, 1e25, 0)
    state, rows, taken = training.advance(program, lane, training.initialize(program, lane), 12)
    at = int(state.diverged_at)
    assert 0 < at < 12
    assert int(state.step) == at
    assert int(taken) == at + 1  # the step that broke has a row
    chex.assert_tree_all_finite(state.params)
    written = lanes.rows_taken(rows, int(taken), 12)
    assert np.all(np.isfinite(written.loss[:at]))
    assert not np.isfinite(written.loss[at]) or not np.isfinite(written.grad_norm[at])
    for column in jax.tree.leaves(written):
        assert len(column) == 12 and np.all(np.isnan(column[at + 1 :]))
    again, _, none_taken = training.advance(program, lane, state, 5)
    chex.assert_trees_all_equal(again, state)
    assert int(none_taken) == 0


def test_no_answers_give_loss_zero_gradient_zero():
    batch = Batch(jnp.zeros((2, 3), int), jnp.zeros((2, 3), int), jnp.zeros((2, 3), bool))
    logits = jax.random.normal(jax.random.key(0), (2, 3, 4))
    value, gradient = jax.value_and_grad(lambda x: training.loss_and_accuracy(x, batch)[0])(logits)
    assert value == 0
    assert jnp.all(gradient == 0)
    assert training.loss_and_accuracy(logits, batch)[1] == 0


def test_only_answer_positions_count():
    logits = jnp.log(jnp.array([[[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]]]))
    batch = Batch(jnp.zeros((1, 3), int), jnp.array([[0, 0, 0]]), jnp.array([[False, True, True]]))
    loss, accuracy = training.loss_and_accuracy(logits, batch)
    np.testing.assert_allclose(loss, -(np.log(0.9) + np.log(0.2)) / 2, rtol=1e-6)
    assert accuracy == 0.5


def test_evaluation_has_no_dropout_and_repeats_exactly(tiny):
    with_dropout, without = program_of(tiny, dropout_rate=0.3), program_of(tiny)
    lane = make_lane(1.0, 1e-2, 0)
    state = training.initialize(without, lane)
    chex.assert_trees_all_equal(
        training.evaluate(with_dropout, lane, state), training.evaluate(without, lane, state)
    )
    other_seed = make_lane(1.0, 1e-2, 1)
    chex.assert_trees_all_equal(
        training.evaluate(without, other_seed, state), training.evaluate(without, lane, state)
    )


def test_streams_are_apart():
    seed = np.uint32(5)
    keys = [training.stream_key(seed, name, step) for name in training.STREAMS for step in (0, 1)]
    data = {tuple(jax.random.key_data(key).tolist()) for key in keys}
    assert len(data) == 2 * len(training.STREAMS)


def test_a_small_model_learns_a_small_task(tiny):
    program = program_of(tiny, batch_size=16)
    lane = make_lane("sqrt", 1e-2, 0)
    state, rows, _ = training.advance(program, lane, training.initialize(program, lane), 250)
    assert rows.loss[0] > 1.0
    assert training.evaluate(program, lane, state).accuracy > 0.95


def test_streaming_attention_trains_as_plain_attention_does(tiny):
    causal = {"task": "induction", "num_layers": 1}
    plain, streaming = (
        first_rows(program_of(tiny, **causal, attention=attention))
        for attention in ("plain", "streaming")
    )
    assert np.isnan(streaming.grad_norm_logits).all()  # never held, so not known
    assert np.isfinite(plain.grad_norm_logits).all()
    known = plain._replace(grad_norm_logits=streaming.grad_norm_logits)
    chex.assert_trees_all_close(streaming, known, rtol=2e-4, atol=1e-6)


def first_rows(program, steps=6):
    """Metrics of a lane's first steps, as they are written."""
    lane = make_lane(1.0, 1e-2, 0)
    _, rows, taken = training.advance(program, lane, training.initialize(program, lane), steps)
    return lanes.rows_taken(rows, int(taken), steps)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": "streaming", "dropout_rate": 0.1}, "attention: streaming has no dropout"),
        ({"attention": "fused"}, "attention: fused computes in half precision; give --dtype="),
        (
            {"attention": "fused", "dtype": "bfloat16", "d_v": 4},
            "attention: fused needs d_v equal to d_k, a multiple of 8, at most 256; they are 4 and",
        ),
        (
            {"attention": "flash"},
            "attention: unknown 'flash'.*choose from plain, streaming",
        ),
        ({"batch_shards": 3}, "batch_shards: 3 does not divide batch_size, 4"),
        ({"batch_shards": 4, "eval_size": 6}, "batch_shards: 4 does not divide eval_size, 6"),
        ({"batch_shards": 2, "vectorize_lanes": True}, "batch_shards: contradicts vectorize_lanes"),
    ],
)
def test_what_attention_and_batches_can_not_be_is_refused(tiny, settings, message):
    with pytest.raises(ValueError, match=message):
        program_of(tiny, **settings)


def test_fused_attention_wants_a_gpu():
    with pytest.raises(ValueError, match="attention: fused needs an NVIDIA GPU, but this is cpu"):
        devices.start_places(1, attention="fused")


# Arms with parameters of their own


def test_what_a_rule_learns_moves_with_its_own_gradient(tiny):
    """One step of plain SGD's first update: s -= rate · ∂loss/∂s, head by head."""
    program = program_of(tiny, scale="learned", optimizer="sgd")
    lane = lanes.make_lane(make_arm("learned", 8), 1e-2, 3)
    start = training.initialize(program, lane)
    batch = training.sample_batch(program, training.stream_key(lane.seed, "data", 0))

    @jax.jit
    def gradient(params):
        def loss(params):
            output = transformer.apply(program.model, params, batch.tokens_BT, lane.multiplier)
            return training.loss_and_accuracy(output.logits, batch)[0]

        return jax.grad(loss)(params)

    state, rows, _ = training.advance(program, lane, start, 2)
    slopes = transformer.rule_parameters(gradient(start.params))["log_scale"]
    assert slopes.shape == (1, 2) and np.all(slopes != 0)
    own = rows.parameters["log_scale"][:2]
    np.testing.assert_array_equal(own[0], np.zeros((1, 2)))  # row i is before update i
    np.testing.assert_allclose(own[1], -1e-2 * slopes, rtol=1e-4)
    assert np.all(transformer.rule_parameters(state.params)["log_scale"] != own[1])


@pytest.mark.parametrize(("decayed", "decay"), [((), 0.0), (("log_scale",), 0.01)])
def test_weight_decay_leaves_a_rules_parameters_alone_unless_it_says_otherwise(
    tiny, decayed, decay
):
    program = program_of(tiny, scale="learned", optimizer="adamw")
    hooks = program.model.hooks
    assert hooks is not None and hooks.decayed == ()
    program = program._replace(model=program.model._replace(hooks=hooks._replace(decayed=decayed)))
    lane = make_lane("sqrt", 1e-2, 0, query_key_decay=3.0)
    params = jax.tree.map(jnp.ones_like, training.initialize(program, lane).params)

    @jax.jit
    def updates(params):
        optimizer = training.make_optimizer(program, lane, lane.learning_rate)
        return optimizer.update(
            jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
        )[0]

    found = updates(params)
    rule = found.pop(transformer.SCORE_RULE)
    np.testing.assert_allclose(rule["layer_0"]["log_scale"], [-1e-2 * decay] * 2, rtol=1e-6)
    for is_query_key, update in zip(
        jax.tree.leaves(transformer.query_key_mask(found)), jax.tree.leaves(found), strict=True
    ):
        expected = np.full(update.shape, -1e-2 * 0.01 * (3 if is_query_key else 1))
        np.testing.assert_allclose(update, expected, rtol=1e-6)


def test_a_learned_scale_streams_to_the_same_numbers(tiny):
    plain, streaming = (
        first_rows(program_of(tiny, scale="learned", attention=attention), 4)
        for attention in ("plain", "streaming")
    )
    known = plain._replace(grad_norm_logits=streaming.grad_norm_logits)
    chex.assert_trees_all_close(streaming, known, rtol=2e-4, atol=1e-6)
    assert np.all(streaming.parameters["log_scale"][1:] != 0)


def test_arms_that_are_numbers_share_a_program_and_others_have_one_a_kind(tiny):
    config = resolve(
        dataclasses.replace(tiny, scale=("none", "mup", "power:0.1", "3", "hot", "fold", "learned"))
    )
    programs = [one.program for one in lanes.plan_lanes(config)][::2]
    assert [program.kind for program in programs] == [""] * 6 + ["learned"]
    assert len(set(programs)) == 2
    assert lanes.own_columns(lanes.plan_lanes(config)) == {"log_scale": (1, 2)}
