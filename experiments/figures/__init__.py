"""Pictures: the style of all, and every plot. No JAX but for attention maps."""
