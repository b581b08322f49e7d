"""Lanes: named in order, paired by their seed, the same bits alone or beside others."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from experiments.config import LaneName, resolve
from experiments.engine import lanes, training
from experiments.engine.devices import Place, start_places
from experiments.engine.lanes import Chunk
from experiments.runs.record import train


def test_lanes_are_the_product_of_scale_rate_and_seed(tiny):
    config = resolve(
        dataclasses.replace(tiny, scale=("none", "0.5"), learning_rate=(1e-3, 1e-2), seed=7)
    )
    names = config.lane_names()
    assert len(names) == 8
    assert names[0] == LaneName("none", 1e-3, 7)
    assert names[-1] == LaneName("0.5", 1e-2, 8)
    planned = lanes.plan_lanes(config)
    assert [one.lane.multiplier.item() for one in planned] == [1.0] * 4 + [0.5] * 4
    assert [one.lane.seed.item() for one in planned] == [name.seed for name in names]
    assert len({one.program for one in planned}) == 1  # numbers share one compiled program


@pytest.mark.parametrize("start", [0, 3, 40])
@pytest.mark.parametrize(("stop", "evaluate_every", "end_every"), [(41, 10, 7), (600, 1000, 300)])
def test_a_plan_covers_each_step_once_and_evaluates_on_schedule(
    start, stop, evaluate_every, end_every
):
    plan = lanes.plan_chunks(start, stop, evaluate_every=evaluate_every, end_every=end_every)
    chunks = list(plan)
    steps = [step for chunk in chunks for step in range(chunk.start, chunk.stop)]
    assert steps == list(range(start, stop))
    evaluated = [chunk.stop for chunk in chunks if chunk.evaluate]
    due = [s for s in range(start + (start > 0), stop) if s % evaluate_every == 0]
    assert evaluated == [*due, stop]
    ends = {chunk.stop for chunk in chunks}
    assert {s for s in range(start + 1, stop) if s % end_every == 0} <= ends
    assert all(chunk.stop - chunk.start <= training.CAPACITY for chunk in chunks)


def test_a_finished_run_needs_no_chunk():
    assert list(lanes.plan_chunks(12, 12, evaluate_every=4, end_every=4)) == []
    assert list(lanes.plan_chunks(0, 1, evaluate_every=4, end_every=4)) == [
        Chunk(0, 0, True),
        Chunk(0, 1, True),
    ]


def results(config, devices, vectorize=False):
    config, places = resolve(config), [Place((device,)) for device in devices]
    chunks = lanes.plan_chunks(0, config.steps, evaluate_every=5, end_every=config.steps)
    planned = lanes.plan_lanes(config)
    return list(lanes.run_chunks(planned, chunks, places=places, vectorize=vectorize))


def test_a_lane_has_the_same_bits_alone_beside_others_and_on_any_device(tiny):
    both = dataclasses.replace(tiny, dropout_rate=0.1)
    alone = dataclasses.replace(both, scale=("none",), num_seeds=1, seed=1)
    first, second = jax.devices()[:2]
    reference = results(both, [first])
    for chunk, on_two in zip(reference, results(both, [first, second]), strict=True):
        chex.assert_trees_all_equal(chunk.metrics, on_two.metrics)
        chex.assert_trees_all_equal(chunk.evaluation, on_two.evaluation)
    for chunk, single in zip(reference, results(alone, [second]), strict=True):
        one = jax.tree.map(lambda rows: rows[1:2], (chunk.metrics, chunk.evaluation))
        chex.assert_trees_all_equal(one, (single.metrics, single.evaluation))


def test_arms_are_paired_by_seed(tiny):
    """Same weights and batches in both arms: step 0 differs by the scale alone."""
    result = train(dataclasses.replace(tiny, scale=("power:0", "none"), steps=4))  # both ×1
    for field in jax.tree.leaves(result.metrics):
        np.testing.assert_array_equal(field[:2], field[2:])
    different = train(dataclasses.replace(tiny, steps=4))
    assert np.all(different.metrics.loss[:2, 0] != different.metrics.loss[2:, 0])


def test_numbers_do_not_depend_on_when_they_are_looked_at(tiny):
    often = train(dataclasses.replace(tiny, eval_every=1, checkpoint_every=3, log_every=5))
    seldom = train(dataclasses.replace(tiny, eval_every=100, checkpoint_every=100))
    chex.assert_trees_all_equal(often.metrics, seldom.metrics)
    chex.assert_trees_all_equal(often.states, seldom.states)
    assert list(seldom.evaluation_steps) == [0, 12]
    assert list(often.evaluation_steps) == list(range(13))
    np.testing.assert_array_equal(often.evaluation.loss[:, [0, 12]], seldom.evaluation.loss)


def test_vectorized_lanes_train_alike_within_rounding(tiny):
    """Two arms with a rate that learns and one that breaks; three chunks of 5, 5 and 2 steps."""
    config = dataclasses.replace(tiny, optimizer="sgd", learning_rate=(1e-2, 1e25), num_seeds=1)
    runs = [results(config, jax.devices()[:1], vectorize=v) for v in (False, True)]
    diverged: list[list[int]] = []
    for alone, together in zip(*runs, strict=True):
        np.testing.assert_allclose(
            alone.metrics.loss[::2], together.metrics.loss[::2], rtol=1e-4, atol=1e-6
        )
        np.testing.assert_array_equal(*(np.isnan(r.metrics.loss) for r in (alone, together)))
        diverged = [[int(s.diverged_at) for s in r.states] for r in (alone, together)]
        assert diverged[0] == diverged[1]
        assert diverged[0][::2] == [-1, -1]
    assert min(diverged[0][1::2]) > 0


def test_devices_that_share_a_batch_train_alike_within_rounding(tiny):
    config = dataclasses.replace(tiny, num_seeds=1, dropout_rate=0.1)
    alone, shared, again = (
        train(dataclasses.replace(config, batch_shards=shards)) for shards in (1, 2, 2)
    )
    chex.assert_trees_all_equal(shared.metrics, again.metrics)
    np.testing.assert_allclose(alone.metrics.loss, shared.metrics.loss, rtol=1e-4)
    np.testing.assert_allclose(alone.evaluation.loss, shared.evaluation.loss, rtol=1e-4)
    np.testing.assert_array_equal(
        alone.metrics.applied_learning_rate, shared.metrics.applied_learning_rate
    )
    for state in shared.states:
        assert state is not None
        for leaf in jax.tree.leaves(state):  # whole on both
            assert leaf.sharding.is_fully_replicated and len(leaf.devices()) == 2


def test_a_shared_batch_is_really_split(tiny):
    program = lanes.plan_lanes(resolve(dataclasses.replace(tiny, batch_shards=2)))[0].program
    place = start_places(1, 2)[0]
    with place.current():
        key = place.put(training.stream_key(np.uint32(0), "data"))
        batch = jax.jit(training.sample_batch, static_argnames="program")(program, key)
    whole = training.sample_batch(program._replace(batch_shards=1), key)
    chex.assert_trees_all_equal(batch, whole)
    for shard in batch.tokens_BT.addressable_shards:
        assert shard.data.shape == (tiny.batch_size // 2, tiny.sequence_length)


def test_places_that_devices_can_not_make_are_refused():
    devices = len(jax.devices())
    message = rf"batch_shards: {devices + 1}, but a process has {devices} devices \(cpu\)"
    with pytest.raises(ValueError, match=message):
        start_places(4, devices + 1)
