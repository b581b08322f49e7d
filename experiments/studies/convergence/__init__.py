"""Does scaling train faster, and why: tuned, paired, tested."""

from experiments.studies.convergence.protocol import run

__all__ = ["run"]
