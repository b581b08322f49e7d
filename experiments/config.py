"""The settings of a run: frozen, resolved and checked once, before anything is started.

`TrainConfig` holds what decides the rows of a run, `RecordOptions` where and how they are kept.
Every error is a ValueError of one line that names the field, the value and what is right.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attention.scale import ScoreRule, score_rule

OPTIMIZERS = ("adam", "adamw", "sgd")
NORMS = ("pre", "post")
DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = ("default", "high", "highest")
ATTENTIONS = ("plain", "streaming", "fused")

_LARGEST_SEED = 2**31 - 1
_LARGEST_FACTOR = 1e30  # of q·k: float32 ends at 3e38
_LARGEST_TABLE = 2**22  # positions times symbols: the chance level of a task is worked out on it
_LARGEST_BYTES = 2**34  # 16 GiB: for one lane's step, and for the states of all lanes


def _setting(default: Any, description: str, default_text: str | None = None) -> Any:
    """A field with its default and what --help says of it."""
    metadata = {"help": description, "default": default_text}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the rows of a run.

    None means "the default of the task or optimizer"; `resolve` puts that value in its place, so
    that a resolved config says all there is to say.
    """

    scale: tuple[str, ...] = _setting(
        ("none", "sqrt"),
        "score rules, one arm each: none (×1), sqrt (×1/√d_k), mup (×1/d_k) or a number to "
        "multiply q·k with",
    )
    task: str = _setting("sort", "what is learned: {tasks}")
    steps: int | None = _setting(None, "updates per lane", "the task's own")
    num_seeds: int = _setting(5, "seeds per arm, the same ones in every arm")
    seed: int = _setting(0, "the first seed")
    optimizer: str = _setting("adam", "adam, adamw or sgd (with momentum 0.9)")
    learning_rate: tuple[float, ...] | None = _setting(
        None, "one rate or a list, each a lane of its own", "by optimizer: 1e-3, or 0.1 for sgd"
    )
    warmup_steps: int = _setting(0, "steps over which the learning rate rises to its value")
    clip_norm: float | None = _setting(None, "clip the global gradient norm to this", "off")
    batch_size: int = _setting(32, "sequences per update")
    sequence_length: int | None = _setting(None, "tokens per sequence", "the task's own, 16")
    vocab_size: int | None = _setting(None, "number of symbols", "the task's own, 16")
    d_model: int = _setting(64, "width of the model")
    d_k: int = _setting(64, "width of a head's queries and keys")
    d_v: int | None = _setting(
        None, "width of a head's values", "d_model / num_heads, so that d_k changes nothing else"
    )
    d_ff: int | None = _setting(None, "hidden width of the feed-forward layer", "4 d_model")
    num_heads: int = _setting(2, "attention heads per layer")
    num_layers: int | None = _setting(None, "layers", "the task's own, 1 or 2")
    norm: str = _setting("pre", "where LayerNorm stands: pre or post")
    dropout_rate: float = _setting(0.0, "dropout of weights and of each sub-layer, in [0, 1)")
    log_every: int = _setting(1, "steps between written rows; every step is measured")
    eval_every: int = _setting(20, "steps between held-out evaluations")
    eval_size: int = _setting(256, "sequences in the held-out set")
    checkpoint_every: int = _setting(200, "steps between checkpoints")
    dtype: str = _setting(
        "float32", "of activations: float32, bfloat16 or float16; statistics stay float32"
    )
    matmul_precision: str = _setting(
        "highest", "of matrix products on accelerators: default, high or highest"
    )
    vectorize_lanes: bool = _setting(
        False, "run a device's lanes as one batch: for accelerators; changes the last bits"
    )
    batch_shards: int = _setting(
        1, "devices that share each batch, for models too large for one; changes the last bits"
    )
    attention: str = _setting(
        "plain",
        "how attention is computed: plain; streaming, in linear memory; or fused, by an NVIDIA "
        "GPU's own kernel in half precision. The last two have no dropout and no grad_norm_logits, "
        "fused no row statistics but entropy",
    )

    def rules(self) -> tuple[ScoreRule, ...]:
        """The score rules of `scale`, for this d_k."""
        return tuple(score_rule(name, self.d_k) for name in self.scale)

    def seeds(self) -> range:
        """The seeds of every arm, the same for all: that is what pairs them."""
        return range(self.seed, self.seed + self.num_seeds)

    def to_json(self) -> dict[str, Any]:
        """A dict that json can write and `from_json` reads back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    @classmethod
    def from_json(cls, settings: dict[str, Any]) -> TrainConfig:
        """The inverse of `to_json`; an unknown or missing field is an error."""
        names = {field.name for field in dataclasses.fields(cls)}
        if settings.keys() != names:
            differing = ", ".join(sorted(settings.keys() ^ names))
            raise ValueError(f"config: missing or unknown settings: {differing}")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in settings.items()
        }
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class RecordOptions:
    """Where a run is kept, and what is made of it besides the rows."""

    out: Path = _setting(None, "run folder", "a new one under runs/")
    resume: bool = _setting(False, "go on with the run in --out, also to more --steps")
    overwrite: bool = _setting(False, "delete the run in --out first")
    figures: bool = _setting(True, "draw figures at the end")
    tensorboard: bool = _setting(False, "write event files for TensorBoard too")


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
    """What concerns one process only."""

    compilation_cache: str | None = _setting(
        None, "folder for compiled programs, or off", "why-sqrt-dk in the user's cache folder"
    )
    distributed: bool = _setting(
        False,
        "this is one of several processes of one run, each started with the same flags; finds the "
        "others on Slurm, TPU pods and Kubernetes, elsewhere by the next three",
    )
    coordinator_address: str | None = _setting(None, "host:port of process 0", "found out")
    num_processes: int | None = _setting(None, "how many processes there are", "found out")
    process_id: int | None = _setting(None, "which of them this is, from 0", "found out")


def check_process(options: ProcessOptions) -> ProcessOptions:
    """The options as they are.

    Raises:
      ValueError: they contradict each other, or one of them can't be.
    """
    address, count, number = options.coordinator_address, options.num_processes, options.process_id
    names = ("coordinator_address", "num_processes", "process_id")
    given = [name for name in names if getattr(options, name) is not None]
    if not given:
        return options
    if not options.distributed:
        raise ValueError(f"{given[0]}: says nothing without --distributed")
    if address is None or count is None or number is None:
        raise ValueError(
            f"{given[0]}: {', '.join(names)} belong together; give all three, or none where they "
            "can be found out"
        )
    _check_integer("num_processes", count, 1, 2**16)
    _check_integer("process_id", number, 0, count - 1)
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16):
        raise ValueError(f"coordinator_address: {address!r}, must be host:port")
    return options


def resolve(config: TrainConfig) -> TrainConfig:
    """Fill in the defaults that depend on other fields, and check every field.

    Raises:
      ValueError: one line that names the field, the value given, and what is right.
    """
    from experiments import tasks

    _check_choice("task", config.task, tasks.TASKS)
    _check_choice("optimizer", config.optimizer, OPTIMIZERS)
    _check_choice("norm", config.norm, NORMS)
    _check_choice("dtype", config.dtype, DTYPES)
    _check_choice("matmul_precision", config.matmul_precision, PRECISIONS)
    _check_choice("attention", config.attention, ATTENTIONS)
    for name, at_least, at_most in (
        ("steps", 1, 10**8),
        ("num_seeds", 1, 10**5),
        ("seed", 0, _LARGEST_SEED),
        ("warmup_steps", 0, 10**8),
        ("batch_size", 1, 2**16),
        ("sequence_length", 1, 2**16),
        ("vocab_size", 1, 2**16),
        ("d_model", 1, 2**14),
        ("d_k", 1, 2**14),
        ("d_v", 1, 2**14),
        ("d_ff", 1, 2**16),
        ("num_heads", 1, 2**10),
        ("num_layers", 1, 2**10),
        ("log_every", 1, 10**8),
        ("eval_every", 1, 10**8),
        ("checkpoint_every", 1, 10**8),
        ("eval_size", 1, 2**16),
        ("batch_shards", 1, 2**10),
    ):
        _check_integer(name, getattr(config, name), at_least, at_most)
    if config.seed + config.num_seeds - 1 > _LARGEST_SEED:
        raise ValueError(
            f"seed: {config.seed} and num_seeds: {config.num_seeds} go past the last seed, "
            f"{_LARGEST_SEED}"
        )
    _check_list("scale", config.scale)
    for rule in config.rules():
        if abs(rule.multiplier) > _LARGEST_FACTOR:
            raise ValueError(f"scale: {rule.name}, must be at most {_LARGEST_FACTOR:g} in size")
    if type(config.vectorize_lanes) is not bool:
        raise ValueError(f"vectorize_lanes: {config.vectorize_lanes!r}, must be true or false")
    for name in ("batch_size", "eval_size"):
        if getattr(config, name) % config.batch_shards:
            raise ValueError(
                f"batch_shards: {config.batch_shards} does not divide {name}, "
                f"{getattr(config, name)}"
            )
    if config.batch_shards > 1 and config.vectorize_lanes:
        raise ValueError("batch_shards: contradicts vectorize_lanes; give one of them")
    if not (isinstance(config.dropout_rate, float | int) and 0 <= config.dropout_rate < 1):
        raise ValueError(f"dropout_rate: {config.dropout_rate}, must be in [0, 1)")
    if config.clip_norm is not None:
        _check_positive("clip_norm", config.clip_norm)
    if config.learning_rate is not None:
        _check_list("learning_rate", config.learning_rate)
        for rate in config.learning_rate:
            _check_positive("learning_rate", rate)
    if config.d_v is None and config.d_model % config.num_heads:
        raise ValueError(
            f"d_v: its default is d_model / num_heads, but {config.d_model} / {config.num_heads} "
            "is not a whole number; give d_v or change one of them"
        )
    sized = dataclasses.replace(
        config,
        sequence_length=_default(config.sequence_length, tasks.DEFAULT_SEQUENCE_LENGTH),
        vocab_size=_default(config.vocab_size, tasks.DEFAULT_VOCAB_SIZE),
        d_v=_default(config.d_v, config.d_model // config.num_heads),
        d_ff=_default(config.d_ff, 4 * config.d_model),
    )
    # A task of a size that can't be would take for ever to build.
    _check_size(dataclasses.replace(sized, num_layers=_default(config.num_layers, 1)))
    task = tasks.make_task(
        sized.task, sequence_length=sized.sequence_length, vocab_size=sized.vocab_size
    )
    resolved = dataclasses.replace(
        sized,
        steps=_default(config.steps, task.steps),
        learning_rate=_default(config.learning_rate, (task.learning_rates[config.optimizer],)),
        num_layers=_default(config.num_layers, task.num_layers),
    )
    _check_attention(resolved)
    _check_size(resolved)
    return resolved


def _default(value, default):
    return default if value is None else value


def _check_choice(field: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        nearest = difflib.get_close_matches(value.lower(), choices, n=1, cutoff=0.4)
        hint = f" (nearest: {nearest[0]})" if nearest else ""
        raise ValueError(f"{field}: unknown {value!r}{hint}; choose from {', '.join(choices)}")


def _check_integer(field: str, value: int | None, at_least: int, at_most: int) -> None:
    if value is not None and not (type(value) is int and at_least <= value <= at_most):
        raise ValueError(f"{field}: {value}, must be a whole number from {at_least} to {at_most}")


def _check_positive(field: str, value: float) -> None:
    # 1e-30 and below are denormal once squared or divided; nothing sensible is that small.
    if not (math.isfinite(value) and 1e-30 <= value <= 1e30):
        raise ValueError(f"{field}: {value}, must be a positive finite number")


def _check_list(field: str, values: tuple) -> None:
    if not values:
        raise ValueError(f"{field}: empty, give at least one")
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{field}: {value} is given twice")


def _check_attention(config: TrainConfig) -> None:
    """Refuse what streaming and fused attention can't serve, whatever the machine."""
    c = config
    if c.attention != "plain" and c.dropout_rate > 0:
        raise ValueError(
            f"attention: {c.attention} has no dropout, but dropout_rate is {c.dropout_rate}; "
            "give --dropout_rate=0 or --attention=plain"
        )
    if c.attention == "fused":
        if c.dtype == "float32":
            raise ValueError("attention: fused computes in half precision; give --dtype=bfloat16")
        if c.d_v != c.d_k or c.d_k % 8 or c.d_k > 256:
            raise ValueError(
                f"attention: fused needs d_v equal to d_k, a multiple of 8, at most 256; "
                f"they are {c.d_v} and {c.d_k}"
            )


def _check_size(config: TrainConfig) -> None:
    """Refuse what could not fit a device: parameters with their optimizer, activations."""
    c: Any = config  # every field that has to do with size is filled by now
    if c.sequence_length * c.vocab_size > _LARGEST_TABLE:
        raise ValueError(
            f"sequence_length and vocab_size: {c.sequence_length} times {c.vocab_size} is more "
            f"than {_LARGEST_TABLE}; lower one of them"
        )
    widths = c.num_heads * (2 * c.d_k + c.d_v)
    per_layer = c.d_model * (widths + c.num_heads * c.d_v + 2 * c.d_ff)
    parameters = c.num_layers * per_layer + c.d_model * (2 * c.vocab_size + c.sequence_length)
    weights = c.num_heads * c.sequence_length**2 * (c.attention == "plain")
    activations = c.sequence_length * (widths + 4 * c.d_model + c.d_ff + c.vocab_size)
    sequences = max(c.batch_size * c.num_layers, c.eval_size)
    size = 4 * (4 * parameters + 3 * sequences * (weights + activations))
    limit = f"more than {_LARGEST_BYTES / 2**30:.0f} GiB"
    if size > _LARGEST_BYTES:
        raise ValueError(
            f"one lane would need about {size / 2**30:.0f} GiB, {limit}: lower batch_size, "
            "sequence_length, d_model, d_k, num_heads or num_layers"
        )
    lanes = len(c.scale) * len(c.learning_rate or (0,)) * c.num_seeds
    states = 4 * 3 * parameters * lanes
    if states > _LARGEST_BYTES:
        raise ValueError(
            f"{lanes} lanes would need about {states / 2**30:.0f} GiB, {limit}: lower num_seeds"
        )
