"""Numbers from run folders: reading, paired tests, censored times, summaries, tables. No JAX."""
