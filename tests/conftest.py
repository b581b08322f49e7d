"""Suite-wide strictness: one CPU device, ranks never broadcast by accident, warnings are errors."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")
