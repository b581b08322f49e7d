"""The small Flax transformer; the only file of the project that imports flax.

Two pure functions, `init` and `apply`, hide Linen: parameters are a plain nested dict, and what the
attention did (statistics and weights of every layer and head) comes back as values. Axes: B batch,
T positions, N = B·T tokens, D = d_model, L layers, H heads, K = d_k, V = d_v, O outputs. What acts
on each token alone runs on [N, D]: one plain matrix product is what every backend does best.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention.dot_product import dot_product_attention
from attention.fused import fused_attention
from attention.head_statistics import HeadStatistics
from attention.scale import ScoreHooks, Site
from attention.statistics import attention_statistics, head_means
from attention.streaming import streaming_attention

Params = Any  # nested dict of float32 arrays

# LayerNorm's output has unit variance per entry; a kernel with variance 1/D keeps it so. Queries
# and keys then have unit variance, so q·k starts with variance d_k: the setting of the question.
UNIT_VARIANCE = nn.initializers.variance_scaling(1.0, "fan_in", "normal")


SCORE_RULE = "score_rule"  # where a rule's own parameters stand among the model's
_RULE_STREAM = 0x5C0E  # folded into the key that they are drawn from


class TransformerConfig(NamedTuple):
    """The shape of a transformer; every width is free of every other."""

    num_tokens: int  # input vocabulary
    num_outputs: int  # output vocabulary
    sequence_length: int
    num_layers: int = 1
    num_heads: int = 2
    d_model: int = 64
    d_k: int = 64  # width of one head's queries and keys
    d_v: int = 32  # width of one head's values
    d_ff: int = 256  # hidden width of the feed-forward layer
    causal: bool = False
    norm: str = "pre"  # where LayerNorm stands: "pre" or "post" (Xiong et al. 2020)
    dropout_rate: float = 0.0
    dtype: str = "float32"  # of activations; parameters, softmax and statistics stay float32
    attention: str = "plain"  # how it is computed: "plain", "streaming" or "fused"
    hooks: ScoreHooks | None = None  # of a score rule that is more than a number

    def site(self, layer: int) -> Site:
        """Where the score rule of a layer is at work."""
        return Site(layer, self.num_heads, self.d_k)


class TransformerOutput(NamedTuple):
    """What the model said, and what its attention did."""

    logits: jax.Array  # [B, T, O], float32 or better
    statistics: HeadStatistics  # fields [L, H]
    weights: jax.Array | None  # [L, B, H, T, T], before dropout; None if attention keeps none


def init(config: TransformerConfig, key: jax.Array) -> Params:
    """Initial parameters: a nested dict of float32 arrays, each drawn by its own name."""
    tokens = jnp.zeros((1, config.sequence_length), jnp.int32)
    rule = _init_rule(config, jax.random.fold_in(key, _RULE_STREAM))
    params: Any = _Transformer(config).init(key, tokens, 1.0, rule, None, True)["params"]
    return {**params, SCORE_RULE: rule} if rule else params


def _init_rule(config: TransformerConfig, key: jax.Array) -> Params:
    """The score rule's own parameters, layer by layer; {} where it has none."""
    if config.hooks is None:
        return {}
    return {
        f"layer_{layer}": config.hooks.init(jax.random.fold_in(key, layer), config.site(layer))
        for layer in range(config.num_layers)
    }


def rule_parameters(params: Params) -> dict[str, jax.Array]:
    """The score rule's own parameters by name, [L, H]; {} where it has none."""
    layers = params.get(SCORE_RULE, {})
    by_layer = [layers[f"layer_{layer}"] for layer in range(len(layers))]
    return {name: jnp.stack([own[name] for own in by_layer]) for name in (by_layer or [{}])[0]}


def apply(
    config: TransformerConfig,
    params: Params,
    tokens_BT: jax.Array,
    scale: float | jax.Array,
    *,
    dropout_key: jax.Array | None = None,
    logit_probe_LBHTS: jax.Array | None = None,
) -> TransformerOutput:
    """Run the model.

    Args:
      config: its shape.
      params: from `init`.
      tokens_BT: int32 in [0, num_tokens).
      scale: what q·k is multiplied by; a number, traced or not. config.hooks may do more with it.
      dropout_key: turns dropout on, at config.dropout_rate; None is evaluation.
      logit_probe_LBHTS: added to the attention logits. The gradient with respect to a probe of
        zeros is the gradient with respect to the logits themselves. Plain attention only.
    """
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    output: Any = _Transformer(config).apply(
        {"params": {name: part for name, part in params.items() if name != SCORE_RULE}},
        tokens_BT,
        scale,
        params.get(SCORE_RULE, {}),
        logit_probe_LBHTS,
        dropout_key is None,
        rngs=rngs,
    )
    return output


def query_key_mask(params: Params) -> Any:
    """A tree like params: True at the kernels of queries and keys, False elsewhere."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any(part.key in ("query", "key") for part in path), params
    )


class _Transformer(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, tokens_BT, scale, rule, logit_probe_LBHTS, deterministic):
        c = self.config
        embed = nn.initializers.normal(1.0)
        token = nn.Embed(c.num_tokens, c.d_model, embedding_init=embed, name="token")
        position = nn.Embed(c.sequence_length, c.d_model, embedding_init=embed, name="position")
        x_BTD = token(tokens_BT) + position(jnp.arange(tokens_BT.shape[1]))[None]
        x_ND = x_BTD.reshape(-1, c.d_model).astype(c.dtype)
        if c.norm == "post":  # so that the first queries and keys, too, are made of unit variance
            x_ND = nn.LayerNorm(dtype=c.dtype, name="embedding_norm")(x_ND)
        dropout = nn.Dropout(c.dropout_rate, deterministic=deterministic)
        statistics, weights = [], []
        for layer in range(c.num_layers):
            probe = None if logit_probe_LBHTS is None else logit_probe_LBHTS[layer]
            attend = _Attention(c, name=f"attention_{layer}")
            feed_forward = _FeedForward(c, name=f"feed_forward_{layer}")
            norms = [
                nn.LayerNorm(dtype=c.dtype, name=f"{part}_norm_{layer}")
                for part in ("attention", "feed_forward")
            ]
            own_scale = scale
            if c.hooks is not None:
                own_scale = c.hooks.scale(rule[f"layer_{layer}"], scale, c.site(layer))
            arguments = (tokens_BT.shape, own_scale, probe, deterministic)
            if c.norm == "pre":
                update, heads, p = attend(norms[0](x_ND), *arguments)
                x_ND = x_ND + dropout(update)
                x_ND = x_ND + dropout(feed_forward(norms[1](x_ND)))
            else:
                update, heads, p = attend(x_ND, *arguments)
                x_ND = norms[0](x_ND + dropout(update))
                x_ND = norms[1](x_ND + dropout(feed_forward(x_ND)))
            statistics.append(heads)
            weights.append(p)
        if c.norm == "pre":
            x_ND = nn.LayerNorm(dtype=c.dtype, name="final_norm")(x_ND)
        logits_NO = nn.Dense(c.num_outputs, dtype=c.dtype, name="readout")(x_ND)
        logits_NO = logits_NO.astype(jnp.promote_types(logits_NO.dtype, jnp.float32))
        return TransformerOutput(
            logits=logits_NO.reshape(*tokens_BT.shape, c.num_outputs),
            statistics=jax.tree.map(lambda *layers: jnp.stack(layers), *statistics),
            weights=jnp.stack(weights) if c.attention == "plain" else None,
        )


class _Attention(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, x_ND, tokens_shape, scale, logit_probe_BHTS, deterministic):
        c = self.config

        def project(name: str, width: int) -> jax.Array:
            features = (c.num_heads, width)
            dense = nn.DenseGeneral(
                features, use_bias=False, kernel_init=UNIT_VARIANCE, dtype=c.dtype, name=name
            )
            return dense(x_ND).reshape(*tokens_shape, *features)

        inputs = project("query", c.d_k), project("key", c.d_k), project("value", c.d_v)
        rate = 0.0 if deterministic else c.dropout_rate
        if c.attention == "plain":
            values, weights, logits, visible = dot_product_attention(
                *inputs,
                scale=scale,
                bias=logit_probe_BHTS,
                causal=c.causal,
                dropout_rate=rate,
                dropout_key=self.make_rng("dropout") if rate > 0 else None,
            )
            rows = attention_statistics(logits, where=visible)
        else:  # neither holds weights to drop, or logits to probe
            if rate > 0 or logit_probe_BHTS is not None:
                raise ValueError(f"{c.attention} attention has no dropout and no logit probe")
            weights = None
            attend = {"streaming": streaming_attention, "fused": fused_attention}[c.attention]
            values, rows = attend(*inputs, scale=scale, causal=c.causal)
        output = nn.Dense(c.d_model, use_bias=False, dtype=c.dtype, name="output")
        return output(values.reshape(len(x_ND), -1)), head_means(rows), weights


class _FeedForward(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, x_ND):
        c = self.config
        hidden = nn.Dense(c.d_ff, dtype=c.dtype, name="hidden")(x_ND)
        return nn.Dense(c.d_model, dtype=c.dtype, name="output")(nn.relu(hidden))
