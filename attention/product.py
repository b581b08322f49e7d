"""A product of two arrays that stands any number of leading axes and of vmaps.

XLA on CPU hands products to a library that counts to eight axes and adds some of its own: five axes
shared by both operands and the result can make a product fail, six can end the process (jaxlib
0.10.1; jax-ml/jax#39257 is of this kind). Every `jax.vmap` of `jnp.einsum` adds such an axis where
no caller can see it, so reshaping beforehand does not help. `product` is a primitive of its own
instead: it lowers to the `dot_general` that einsum makes, and merges the shared axes when they are
more than MAX_SHARED, whoever added them.
"""

from __future__ import annotations

import math
from functools import partial
from string import ascii_letters, ascii_uppercase
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

MAX_SHARED = 4


class Axes(NamedTuple):
    """The axes of a product, a letter each, in the order they have in the operands."""

    left: str
    right: str
    shared: str  # in both operands and in the result
    summed: str  # in both operands only

    @property
    def result(self) -> str:
        """Shared axes, then what only the left operand has, then what only the right one has."""
        used = self.shared + self.summed
        return self.shared + "".join(axis for axis in self.left + self.right if axis not in used)


def product(subscripts: str, left: jax.Array, right: jax.Array, dtype) -> jax.Array:
    """jnp.einsum(subscripts, left, right, preferred_element_type=dtype).

    Differentiable in both modes, any number of times. To `jax.checkpoint_policies` it is no dot.

    Args:
      subscripts: as "...tk,...sk->...ts"; "..." are leading axes that both operands have alike,
        and every other axis is in at least two of the three terms.
      left: floating-point array.
      right: floating-point array.
      dtype: of the sum and the result.
    """
    operands, result = subscripts.split("->")
    one, other = operands.split(",")
    leading = ascii_uppercase[: left.ndim - len(one.removeprefix("..."))]
    one, other, result = (term.replace("...", leading) for term in (one, other, result))
    both = [axis for axis in other if axis in one]
    shared = "".join(axis for axis in both if axis in result)
    summed = "".join(axis for axis in both if axis not in result)
    axes = Axes(one, other, shared, summed)
    # Read when traced, as dot_general does.
    precision = jax.config.jax_default_matmul_precision  # pyrefly: ignore[missing-attribute]
    out = _product.bind(
        *_varying_alike(left, right), axes=axes, dtype=jnp.dtype(dtype), precision=precision
    )
    return _arrange(out, axes.result, result)


def _varying_alike(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inside `jax.shard_map`, both over whichever mesh axes one varies over; else as they are."""
    own, other = (jax.typeof(array).manual_axis_type.varying for array in (left, right))
    if own == other:
        return left, right
    left = jax.lax.pcast(left, tuple(other - own), to="varying")
    return left, jax.lax.pcast(right, tuple(own - other), to="varying")


def _arrange(array: jax.Array, axes: str, wanted: str) -> jax.Array:
    return jax.lax.transpose(array, [axes.index(axis) for axis in wanted])


def _lower(left: jax.Array, right: jax.Array, *, axes: Axes, dtype, precision) -> jax.Array:
    """The product in JAX's own primitives, with axes.result."""
    shared = axes.shared
    if len(shared) > MAX_SHARED:
        own = ["".join(axis for axis in term if axis not in shared) for term in axes[:2]]
        left = _arrange(left, axes.left, shared + own[0])
        right = _arrange(right, axes.right, shared + own[1])
        sizes = left.shape[: len(shared)]
        left, right = (x.reshape(math.prod(sizes), *x.shape[len(sizes) :]) for x in (left, right))
        merged = Axes(shared[0] + own[0], shared[0] + own[1], shared[0], axes.summed)
        out = _lower(left, right, axes=merged, dtype=dtype, precision=precision)
        return out.reshape(*sizes, *out.shape[1:])

    def places(kind: str) -> tuple[list[int], list[int]]:
        return [axes.left.index(axis) for axis in kind], [axes.right.index(axis) for axis in kind]

    numbers = places(axes.summed), places(shared)
    return jax.lax.dot_general(
        left, right, numbers, precision=precision, preferred_element_type=dtype
    )


def _cotangent(cotangent, operand, other, axes: Axes, of: str, by: str, **options):
    """What flows back to an operand with the axes `of`, the other one having the axes `by`."""
    summed = "".join(axis for axis in by if axis in axes.result and axis not in of)
    back = Axes(axes.result, by, axes.shared, summed)
    out = _product.bind(cotangent, other, axes=back, **options)
    return _arrange(out, back.result, of).astype(operand.aval.dtype)


def _to_left(cotangent, left, right, *, axes: Axes, **options):
    return _cotangent(cotangent, left, right, axes, axes.left, axes.right, **options)


def _to_right(cotangent, left, right, *, axes: Axes, **options):
    return _cotangent(cotangent, right, left, axes, axes.right, axes.left, **options)


def _batch(operands, positions, *, axes: Axes, **options):
    """One more axis where it stands: shared if both operands have it."""
    new = next(letter for letter in ascii_letters if letter not in axes.left + axes.right)
    left, right = (
        term if at is batching.not_mapped else term[:at] + new + term[at:]
        for term, at in zip(axes[:2], positions, strict=True)
    )
    both = new in left and new in right
    axes = Axes(left, right, new * both + axes.shared, axes.summed)
    return _product.bind(*operands, axes=axes, **options), axes.result.index(new)


def _abstract(left, right, **options):
    return jax.make_jaxpr(partial(_lower, **options))(left, right).out_avals[0]


_product = Primitive("product")
_product.def_impl(jax.jit(_lower, static_argnames=("axes", "dtype", "precision")))
_product.def_abstract_eval(_abstract)
ad.defbilinear(_product, _to_left, _to_right)
batching.primitive_batchers[_product] = _batch
mlir.register_lowering(_product, mlir.lower_fun(_lower, multiple_results=False))
