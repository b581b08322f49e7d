"""What is reported of each head: the one list of row statistics. Imports no JAX.

Rows of runs, tables, figures and event files follow the fields of `HeadStatistics`. A new statistic
of a row is a function in statistics.py and one field here, which says how heads are made of rows.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

if TYPE_CHECKING:
    from attention.statistics import AttentionStatistics

SATURATED_ABOVE = 0.9  # a row whose largest weight is above this is called saturated
DEAD_BELOW = 1e-3  # a row with ‖J‖_F below this passes next to nothing back to its logits

Array = Any  # jax.Array, without importing it


class OfRows(NamedTuple):
    """How a head's number is made of its rows."""

    unit: str
    about: str  # one sentence
    rows: "Callable[[AttentionStatistics], Array]"  # gives [..., H, T]
    above: float | None = None  # the fraction of rows above this, rather than the mean
    below: float | None = None  # likewise
    least_keys: int = 1  # rows that see fewer keys have nothing to tell and are left out
    largest: bool = False  # the largest over rows (and, of a model, over heads), not the mean


class HeadStatistics(NamedTuple):
    """Row statistics reduced to heads: each field [..., H], in the order of the rows of a run."""

    dead_row_fraction: Annotated[
        Array,
        OfRows(
            "fraction",
            f"rows with ‖J‖_F below {DEAD_BELOW:g}: next to nothing flows back through them",
            lambda rows: rows.jacobian_norm,
            below=DEAD_BELOW,
        ),
    ]
    entropy: Annotated[
        Array, OfRows("nats", "entropy of the weights, -Σ p ln p", lambda rows: rows.entropy)
    ]
    normalized_entropy: Annotated[
        Array,
        OfRows(
            "0 to 1",
            "entropy over its largest possible value, ln of the visible keys; over rows that see "
            "at least two",
            lambda rows: rows.normalized_entropy,
            least_keys=2,
        ),
    ]
    max_weight: Annotated[Array, OfRows("0 to 1", "largest weight", lambda rows: rows.max_weight)]
    saturation: Annotated[
        Array,
        OfRows(
            "fraction",
            f"rows whose largest weight is above {SATURATED_ABOVE:g}",
            lambda rows: rows.max_weight,
            above=SATURATED_ABOVE,
        ),
    ]
    jacobian_trace: Annotated[
        Array,
        OfRows(
            "0 to 1",
            "trace of the softmax's Jacobian, 1 - Σp²",
            lambda rows: rows.jacobian_trace,
        ),
    ]
    logit_std: Annotated[
        Array,
        OfRows("logits", "standard deviation of the visible logits", lambda rows: rows.logit_std),
    ]
    logit_max: Annotated[
        Array,
        OfRows(
            "logits",
            "largest visible logit: the largest over rows and heads, not a mean",
            lambda rows: rows.logit_max,
            largest=True,
        ),
    ]


def fields_of(record: type) -> dict[str, Any]:
    """The fields of a NamedTuple that are annotated with what they are, in order."""
    return {
        name: annotation.__metadata__[0]
        for name, annotation in record.__annotations__.items()
        if hasattr(annotation, "__metadata__")
    }


HEAD_STATISTICS: dict[str, OfRows] = fields_of(HeadStatistics)
