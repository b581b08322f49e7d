"""Everything that a step tells: the one list of the columns of metrics.jsonl. Imports no JAX.

The row format, the reader, tables, figures and event files follow the fields of `StepMetrics` and
of `attention.head_statistics.HeadStatistics`, each with its unit and one sentence.
`python -m experiments.metrics` prints them as the table in docs/columns.md.
"""

from typing import Annotated, Any, NamedTuple

from attention.head_statistics import HEAD_STATISTICS, HeadStatistics, fields_of

Array = Any  # jax.Array or np.ndarray


class Scalar(NamedTuple):
    """What a number of a step is."""

    unit: str
    about: str  # one sentence


class StepMetrics(NamedTuple):
    """What one step tells; step i describes the parameters before update i. float32 scalars."""

    loss: Annotated[Array, Scalar("nats", "mean cross-entropy over answer positions")]
    accuracy: Annotated[Array, Scalar("fraction", "answer positions that are right")]
    applied_learning_rate: Annotated[Array, Scalar("1", "the learning rate, after warmup")]
    grad_norm: Annotated[
        Array, Scalar("nats", "norm of ∂loss/∂(all model parameters), before clipping")
    ]
    grad_norm_query_kernel: Annotated[Array, Scalar("nats", "of ∂loss/∂W_q, over all layers")]
    grad_norm_key_kernel: Annotated[Array, Scalar("nats", "of ∂loss/∂W_k, over all layers")]
    grad_norm_value_kernel: Annotated[Array, Scalar("nats", "of ∂loss/∂W_v, over all layers")]
    grad_norm_output_kernel: Annotated[Array, Scalar("nats", "of ∂loss/∂W_o, over all layers")]
    grad_norm_logits: Annotated[
        Array,
        Scalar(
            "nats",
            "of ∂loss/∂logits, over all layers, heads and rows; null where attention holds no "
            "logits",
        ),
    ]
    update_norm: Annotated[Array, Scalar("1", "norm of the change to all parameters")]
    heads: HeadStatistics  # fields [L, H]
    parameters: dict[str, Array]  # of the arm, by name: [L, H]


class Evaluation(NamedTuple):
    """A lane on the held-out set; float32 scalars."""

    loss: Annotated[Array, Scalar("nats", "mean cross-entropy over answer positions")]
    accuracy: Annotated[Array, Scalar("fraction", "answer positions that are right")]


STEP_SCALARS: dict[str, Scalar] = fields_of(StepMetrics)

# What tells rows apart and says what was applied, first in every row.
IDENTITY: dict[str, Scalar] = {
    "step": Scalar("updates", "taken before the row: it describes the parameters before the next"),
    "scale": Scalar("text", "the arm as typed"),
    "learning_rate": Scalar("1", "the lane's own"),
    "seed": Scalar("integer", "of weights, data and dropout"),
    "multiplier": Scalar(
        "1", "what the arm multiplies q·k by; where it learns that, what it starts from"
    ),
}


class Column(NamedTuple):
    """A column of metrics.jsonl."""

    name: str
    axes: str  # "" for a number
    unit: str
    about: str


def by_head(name: str) -> str:
    """The column of a statistic of every head."""
    return f"{name}_by_head"


def parameter_column(name: str) -> str:
    """The column of a parameter of an arm's own."""
    return f"parameter_{name}_by_head"


def reduce_heads(name: str, values: Any) -> Any:
    """[..., L, H] to [...]: the mean over layers and heads, or the largest, as the list says."""
    if HEAD_STATISTICS[name].largest:
        return values.max(axis=(-2, -1))
    return values.mean(axis=(-2, -1))


def columns() -> list[Column]:
    """The columns of metrics.jsonl, in order."""
    scalars = [Column(n, "", s.unit, s.about) for n, s in (IDENTITY | STEP_SCALARS).items()]
    over_rows = [
        Column(name, "", how.unit, f"{how.about}; over all rows, heads and layers")
        for name, how in HEAD_STATISTICS.items()
    ]
    of_heads = [
        Column(by_head(name), "[L][H]", how.unit, "the same, of each layer and head")
        for name, how in HEAD_STATISTICS.items()
    ]
    own = Column(
        parameter_column("NAME"),
        "[L][H]",
        "the arm's",
        "a parameter of an arm that has its own, null for other arms of the run; absent where no "
        "arm has any",
    )
    return [*scalars, *over_rows, *of_heads, own]


def columns_table() -> str:
    """The columns as a page of markdown."""
    lines = [f"| `{c.name}` | {c.axes or '–'} | {c.unit} | {c.about} |" for c in columns()]
    return "\n".join(
        [
            "# The columns of metrics.jsonl",
            "",
            "One line a step and lane, strict JSON: NaN and infinities are null. Step i describes "
            "the parameters before update i. L layers, H heads. Made by "
            "`python -m experiments.metrics > docs/columns.md`.",
            "",
            "| column | axes | unit | what it is |",
            "|---|---|---|---|",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    print(columns_table(), end="")
