"""The transformer: its shapes, where its queries and keys start, what it may see."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import score_rule, transformer
from attention.transformer import TransformerConfig

SMALL = TransformerConfig(
    num_tokens=7, num_outputs=5, sequence_length=6, num_layers=2, d_model=16, d_k=8, d_v=4, d_ff=24
)


def run(config, params, tokens, scale=1.0, **kwargs):
    return jax.jit(
        lambda params, tokens, scale, kwargs: transformer.apply(
            config, params, tokens, scale, **kwargs
        )
    )(params, tokens, scale, kwargs)


def tokens_for(config, batch=3, seed=0):
    return jax.random.randint(
        jax.random.key(seed), (batch, config.sequence_length), 0, config.num_tokens
    )


def initialize(config, seed=0):
    return jax.jit(lambda key: transformer.init(config, key))(jax.random.key(seed))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_shapes_and_statistics_have_layer_and_head_axes(norm):
    config = SMALL._replace(norm=norm)
    output = run(config, initialize(config), tokens_for(config))
    chex.assert_shape(output.logits, (3, 6, 5))
    chex.assert_shape(output.weights, (2, 3, 2, 6, 6))
    for field in output.statistics:
        chex.assert_shape(field, (2, 2))
    chex.assert_tree_all_finite(output)
    # The statistics are those of the weights that are returned.
    expected = np.mean(np.max(output.weights, axis=-1), axis=(1, 3))
    np.testing.assert_allclose(output.statistics.max_weight, expected, rtol=1e-5)


@pytest.mark.parametrize(("norm", "d_k"), [("pre", 64), ("post", 16)])
def test_logits_start_with_standard_deviation_sqrt_d_k(norm, d_k):
    """√d_k unscaled, 1 scaled by 1/√d_k, measured through the whole model."""
    config = SMALL._replace(
        norm=norm, num_layers=1, d_model=64, d_k=d_k, num_heads=4, sequence_length=16
    )
    tokens, keys = tokens_for(config, batch=4), jax.random.split(jax.random.key(1), 24)

    @jax.jit
    def logit_std(scale):
        def one(key):
            params = transformer.init(config, key)
            output = transformer.apply(config, params, tokens, scale)
            return output.statistics.logit_std, params["attention_0"]

        return jax.vmap(one)(keys)

    for scale, expected in ((1.0, d_k**0.5), (d_k**-0.5, 1.0)):
        stds, kernels = logit_std(scale)
        # The keys of a row share tokens and are few, which takes some 10 % off.
        assert 0.85 < np.sqrt(np.mean(np.square(stds))) / expected < 1.02
    for name in ("query", "key"):  # unit variance in, unit variance out
        np.testing.assert_allclose(np.var(kernels[name]["kernel"]) * 64, 1, rtol=0.03)


def test_widths_are_independent():
    """d_k changes the shapes of W_q and W_k, and nothing else of the initial weights."""
    small, large = initialize(SMALL), initialize(SMALL._replace(d_k=32))
    mask = transformer.query_key_mask(small)
    same = jax.tree.map(
        lambda a, b: a.shape == b.shape and bool(jnp.array_equal(a, b)), small, large
    )
    assert jax.tree.map(lambda m, s: m != s, mask, same) == jax.tree.map(lambda m: True, mask)


def test_another_layer_shifts_no_draw():
    one, two = initialize(SMALL._replace(num_layers=1)), initialize(SMALL)
    chex.assert_trees_all_equal(one, {name: two[name] for name in one})


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_causality_through_gradients(norm):
    """Output t has zero gradient on token embeddings after t, and a non-zero one before."""
    config = SMALL._replace(causal=True, norm=norm)
    params = initialize(config)
    tokens = jnp.arange(6)[None, :]  # all different, so embedding rows are positions

    @jax.jit
    def reach(embedding):
        changed = {**params, "token": {"embedding": embedding}}
        return jnp.sum(transformer.apply(config, changed, tokens, 1.0).logits[0] ** 2, axis=-1)

    jacobian = jax.jit(jax.jacobian(reach))(params["token"]["embedding"])[:, :6]  # [T, tokens, D]
    size = np.abs(jacobian).sum(-1)
    assert np.all(size[np.triu_indices(6, 1)] == 0)
    assert np.all(size[np.tril_indices(6)] > 0)


def test_probe_gradient_is_the_gradient_with_respect_to_the_logits():
    """Through scale: d loss / d scale = Σ (∂loss/∂logits) · (q·k), with q·k = logits at scale 1."""
    config = SMALL._replace(num_layers=1)
    params, tokens = initialize(config), tokens_for(config)
    shape = (1, 3, 2, 6, 6)

    def loss(scale, probe):
        output = transformer.apply(config, params, tokens, scale, logit_probe_LBHTS=probe)
        return jnp.sum(output.logits**3), output.weights

    probe = jnp.zeros(shape)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (by_scale, by_logits), weights = gradient(0.3, probe)
    # softmax(0.3 q·k): logits up to a constant per row, which Jᵀ removes from the product.
    raw = jnp.log(weights) / 0.3
    np.testing.assert_allclose(by_scale, jnp.sum(by_logits * raw), rtol=1e-3)


def test_dropout_changes_outputs_but_not_without_a_key():
    config = SMALL._replace(dropout_rate=0.5)
    params, tokens = initialize(config), tokens_for(config)
    evaluated = run(config, params, tokens)
    plain = run(SMALL, params, tokens)
    chex.assert_trees_all_equal(evaluated.logits, plain.logits)
    dropped = [run(config, params, tokens, dropout_key=jax.random.key(i)) for i in (0, 0, 1)]
    chex.assert_trees_all_equal(dropped[0].logits, dropped[1].logits)
    assert not np.array_equal(dropped[0].logits, dropped[2].logits)
    # The first layer sees the same input, and its weights are those before dropout.
    np.testing.assert_array_equal(dropped[0].weights[0], plain.weights[0])


def test_half_precision_keeps_float32_parameters_and_statistics():
    config = SMALL._replace(dtype="bfloat16")
    params = initialize(config)
    chex.assert_trees_all_equal_dtypes(params, initialize(SMALL))
    output = run(config, params, tokens_for(config))
    assert output.logits.dtype == output.statistics.entropy.dtype == jnp.float32
    np.testing.assert_allclose(
        output.logits, run(SMALL, params, tokens_for(SMALL)).logits, atol=0.3
    )


# Score rules with parameters of their own

LEARNED = SMALL._replace(hooks=score_rule("learned", SMALL.d_k).hooks)


def with_rule(params, log_scale):
    """params with a log temperature for each layer and head, [L, H]."""
    layers = {f"layer_{i}": {"log_scale": jnp.asarray(own)} for i, own in enumerate(log_scale)}
    return {**params, transformer.SCORE_RULE: layers}


def test_a_rules_parameters_stand_beside_the_model_and_shift_none_of_its_draws():
    plain, learned = initialize(SMALL), initialize(LEARNED)
    rule = transformer.rule_parameters(learned)
    np.testing.assert_array_equal(rule["log_scale"], np.zeros((2, 2)))
    assert transformer.rule_parameters(plain) == {}
    model = {name: part for name, part in learned.items() if name != transformer.SCORE_RULE}
    chex.assert_trees_all_equal(model, plain)
    # At its start it is the number that it starts from.
    tokens = tokens_for(SMALL)
    chex.assert_trees_all_equal(run(LEARNED, learned, tokens, 0.3), run(SMALL, plain, tokens, 0.3))


@pytest.mark.parametrize("attention", ["plain", "streaming"])
def test_each_layer_and_head_has_its_own_temperature(attention):
    """Against the same model with W_q of that layer and head multiplied by it."""
    config = LEARNED._replace(attention=attention)
    params, tokens = initialize(SMALL), tokens_for(SMALL)
    log_scale = np.log(np.array([[1, 2], [4, 8]], np.float32))
    found = run(config, with_rule(params, log_scale), tokens, 0.3)
    folded = dict(params)
    for layer in range(2):
        name = f"attention_{layer}"
        kernel = (
            params[name]["query"]["kernel"] * np.exp(log_scale[layer])[None, :, None]
        )  # [D, H, K]
        folded[name] = {**params[name], "query": {"kernel": kernel}}
    expected = run(SMALL._replace(attention=attention), folded, tokens, 0.3)
    np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        found.statistics,
        expected.statistics,
    )
    # And they are told apart: hotter heads are sharper, layer by layer.
    assert np.all(found.statistics.entropy[:, 0] > found.statistics.entropy[:, 1])


def test_a_temperatures_gradient_is_that_of_its_own_logits():
    """∂loss/∂s = Σ ∂loss/∂logits · logits over the rows of its layer and head, as each ∝ exp s."""
    params, tokens = initialize(SMALL), tokens_for(SMALL)
    log_scale = jnp.asarray([[0.1, -0.2], [0.3, 0.4]])
    probe = jnp.zeros((2, 3, 2, 6, 6))

    def loss(log_scale, probe):
        output = transformer.apply(
            LEARNED, with_rule(params, log_scale), tokens, 0.3, logit_probe_LBHTS=probe
        )
        return jnp.sum(output.logits**3), output.weights

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (by_head, by_logits), weights = gradient(log_scale, probe)
    # The logits up to a constant per row, which Jᵀ removes from the product.
    expected = jnp.sum(by_logits * jnp.log(weights), axis=(1, 3, 4))
    np.testing.assert_allclose(by_head, expected, rtol=1e-3)
    assert np.all(np.abs(by_head) > 1e-3)
