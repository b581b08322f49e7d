"""Suite-wide strictness: one CPU device, ranks never broadcast by accident, warnings are errors."""

import hypothesis
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in every run, and no deadline: the first example of a shape compiles.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=30, help="how often test_survival.py kills runs")
