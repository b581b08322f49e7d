"""The settings of a run: what a person typed, and what is then run.

`TrainConfig` is as typed: None means "the default of the task or optimizer", a scalar may stand
for a list of one, and NumPy's numbers are numbers. `resolve` turns it once into a `RunConfig`, with
nothing left open and everything checked. Every error is a ValueError of one line that names the
field, the value and what is right. Imports no JAX.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments import tasks
from experiments.arms import Arm, arm_choices, check_distinct, make_arm
from experiments.settings import NUMBER, NUMBERS, PATH, SCALES, SWITCH, TEXT, normalised, setting

FORMAT = 2  # of the run folder; 1 had no number in it
VERSION = "0.2.0"
# What a setting was before there was one, for runs that an earlier version wrote.
BEFORE: dict[str, Any] = {"vectorize_lanes": False, "batch_shards": 1}

OPTIMIZERS = ("adam", "adamw", "sgd")
NORMS = ("pre", "post")
DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = ("default", "high", "highest")
ATTENTIONS = ("plain", "streaming", "fused")
# The one place for rates that a study or a run takes where none is given; SGD's with momentum 0.9.
LEARNING_RATES = {"adam": 1e-3, "adamw": 1e-3, "sgd": 0.1}

_LARGEST_SEED = 2**31 - 1
_LARGEST_FACTOR = 1e30  # of q·k: float32 ends at 3e38
_LARGEST_TABLE = 2**22  # positions times symbols: the chance level of a task is worked out on it
_LARGEST_BYTES = 2**34  # 16 GiB: for one lane's step, and for the states of all lanes


# Settings -------------------------------------------------------------------------------------

_MANY = 10**8
_SIZE = (1, 2**16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides the rows of a run, as typed.

    In Python, `scale` and `learning_rate` take one value or several, and a scale may be a number.
    """

    scale: str | float | Sequence[str | float] = setting(
        ("none", "sqrt"), "arms, each with lanes of its own: {scales} or a number", SCALES
    )
    task: str = setting("sort", "what is learned: {tasks}", TEXT, choices=tasks.TASKS)
    steps: int | None = setting(
        None, "updates per lane", default_text="the task's own", bounds=(1, _MANY)
    )
    num_seeds: int = setting(5, "seeds per arm, the same ones in every arm", bounds=(1, 10**5))
    seed: int = setting(0, "the first seed", bounds=(0, _LARGEST_SEED))
    optimizer: str = setting(
        "adam", "adam, adamw or sgd (with momentum 0.9)", TEXT, choices=OPTIMIZERS
    )
    learning_rate: float | Sequence[float] | None = setting(
        None,
        "one rate or a list, each a lane of its own",
        NUMBERS,
        "by optimizer: 1e-3, or 0.1 for sgd",
    )
    warmup_steps: int = setting(
        0, "steps over which the learning rate rises to its value", bounds=(0, _MANY)
    )
    clip_norm: float | None = setting(None, "clip the global gradient norm to this", NUMBER, "off")
    batch_size: int = setting(32, "sequences per update", bounds=_SIZE)
    sequence_length: int | None = setting(
        None, "tokens per sequence", default_text="the task's own, 16", bounds=_SIZE
    )
    vocab_size: int | None = setting(
        None, "number of symbols", default_text="the task's own, 16", bounds=_SIZE
    )
    d_model: int = setting(64, "width of the model", bounds=(1, 2**14))
    d_k: int = setting(64, "width of a head's queries and keys", bounds=(1, 2**14))
    d_v: int | None = setting(
        None,
        "width of a head's values",
        default_text="d_model / num_heads, so that d_k changes nothing else",
        bounds=(1, 2**14),
    )
    d_ff: int | None = setting(
        None, "hidden width of the feed-forward layer", default_text="4 d_model", bounds=_SIZE
    )
    num_heads: int = setting(2, "attention heads per layer", bounds=(1, 2**10))
    num_layers: int | None = setting(
        None, "layers", default_text="the task's own, 1 or 2", bounds=(1, 2**10)
    )
    norm: str = setting("pre", "where LayerNorm stands: pre or post", TEXT, choices=NORMS)
    dropout_rate: float = setting(
        0.0, "dropout of weights and of each sub-layer, in [0, 1)", NUMBER
    )
    log_every: int = setting(
        1, "steps between written rows; every step is measured", bounds=(1, _MANY)
    )
    eval_every: int = setting(20, "steps between held-out evaluations", bounds=(1, _MANY))
    eval_size: int = setting(256, "sequences in the held-out set", bounds=_SIZE)
    checkpoint_every: int = setting(200, "steps between checkpoints", bounds=(1, _MANY))
    dtype: str = setting(
        "float32",
        "of activations: float32, bfloat16 or float16; statistics stay float32",
        TEXT,
        choices=DTYPES,
    )
    matmul_precision: str = setting(
        "highest",
        "of matrix products on accelerators: default, high or highest",
        TEXT,
        choices=PRECISIONS,
    )
    vectorize_lanes: bool = setting(
        False,
        "run a device's lanes as one batch: for accelerators; changes the last bits",
        SWITCH,
    )
    batch_shards: int = setting(
        1,
        "devices that share each batch, for models too large for one; changes the last bits",
        bounds=(1, 2**10),
    )
    attention: str = setting(
        "plain",
        "how attention is computed: plain; streaming, in linear memory; or fused, by an NVIDIA "
        "GPU's own kernel in half precision. The last two have no dropout and no grad_norm_logits, "
        "fused no row statistics but entropy",
        TEXT,
        choices=ATTENTIONS,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(TrainConfig):
    """What is run: nothing left open, everything checked. Made by `resolve`, nowhere else."""

    scale: tuple[str, ...]
    steps: int
    learning_rate: tuple[float, ...]
    clip_norm: float  # inf: off
    sequence_length: int
    vocab_size: int
    d_v: int
    d_ff: int
    num_layers: int

    def arms(self) -> tuple[Arm, ...]:
        """The arms of `scale`, for this d_k."""
        return tuple(make_arm(name, self.d_k) for name in self.scale)

    def seeds(self) -> range:
        """The seeds of every arm, the same for all: that is what pairs them."""
        return range(self.seed, self.seed + self.num_seeds)

    def make_task(self) -> tasks.Task:
        """The task at this size."""
        return tasks.make_task(
            self.task, sequence_length=self.sequence_length, vocab_size=self.vocab_size
        )

    def lane_names(self) -> tuple[LaneName, ...]:
        """The lanes in the order of the rows: scale, learning rate, seed."""
        return tuple(
            LaneName(scale, rate, seed)
            for scale in self.scale
            for rate in self.learning_rate
            for seed in self.seeds()
        )

    def to_json(self) -> dict[str, Any]:
        """Every setting, the format and the version, as strict JSON has them."""
        settings = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(as_typed(self)).items()
        }
        return {"format": FORMAT, "version": VERSION, **settings}


class LaneName(NamedTuple):
    """What tells the lanes of a run apart; the key of every row that is written."""

    scale: str  # the arm as typed
    learning_rate: float
    seed: int


@dataclasses.dataclass(frozen=True)
class RecordOptions:
    """Where a run is kept, and what is made of it besides the rows."""

    out: Path = setting(None, "run folder", PATH, "a new one under runs/")
    resume: bool = setting(False, "go on with the run in --out, also to more --steps", SWITCH)
    overwrite: bool = setting(False, "delete the run in --out first", SWITCH)
    figures: bool = setting(True, "draw figures at the end", SWITCH)
    tensorboard: bool = setting(False, "write event files for TensorBoard too", SWITCH)
    accept_edits: bool = setting(
        False, "go on with a run whose files were changed on purpose; what is made says so", SWITCH
    )


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
    """What concerns one process only."""

    compilation_cache: Path | None = setting(
        None,
        "folder for compiled programs, or off",
        PATH,
        "JAX_COMPILATION_CACHE_DIR, or why-sqrt-dk in the user's cache folder",
    )
    distributed: bool = setting(
        False,
        "this is one of several processes of one run, each started with the same flags; finds the "
        "others on Slurm, TPU pods and Kubernetes, elsewhere by the next three",
        SWITCH,
    )
    coordinator_address: str | None = setting(None, "host:port of process 0", TEXT, "found out")
    num_processes: int | None = setting(
        None, "how many processes there are", default_text="found out", bounds=_SIZE
    )
    process_id: int | None = setting(
        None, "which of them this is, from 0", default_text="found out", bounds=(0, 2**16)
    )
    wait_seconds: int = setting(
        300, "how long a process waits for the others to start", bounds=(1, 10**6)
    )


def check_process(options: ProcessOptions) -> ProcessOptions:
    """The options as they are.

    Raises:
      ValueError: they contradict each other, or one of them can't be.
    """
    options = normalised(options)
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
    if number >= count:
        raise ValueError(f"process_id: {number}, must be a whole number from 0 to {count - 1}")
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16):
        raise ValueError(f"coordinator_address: {address!r}, must be host:port")
    return options


# Resolving ------------------------------------------------------------------------------------


def resolve(config: TrainConfig) -> RunConfig:
    """Fill in the defaults that depend on other fields, and check every field.

    A RunConfig, perhaps one with fields replaced, is checked again.

    Raises:
      ValueError: one line that names the field, the value given, and what is right.
    """
    c = normalised(as_typed(config) if isinstance(config, RunConfig) else config)
    _check_numbers(c)
    if c.d_v is None and c.d_model % c.num_heads:
        raise ValueError(
            f"d_v: its default is d_model / num_heads, but {c.d_model} / {c.num_heads} "
            "is not a whole number; give d_v or change one of them"
        )
    settings = vars(c) | {
        "clip_norm": _default(c.clip_norm, math.inf),
        "sequence_length": _default(c.sequence_length, tasks.DEFAULT_SEQUENCE_LENGTH),
        "vocab_size": _default(c.vocab_size, tasks.DEFAULT_VOCAB_SIZE),
        "d_v": _default(c.d_v, c.d_model // c.num_heads),
        "d_ff": _default(c.d_ff, 4 * c.d_model),
        "learning_rate": _default(c.learning_rate, (LEARNING_RATES[c.optimizer],)),
    }
    # A task of a size that can't be would take for ever to build.
    sized = RunConfig(**settings | {"num_layers": c.num_layers or 1, "steps": c.steps or 1})
    _check_size(sized)
    task = sized.make_task()
    resolved = dataclasses.replace(
        sized,
        steps=_default(c.steps, task.steps),
        num_layers=_default(c.num_layers, task.num_layers),
    )
    _check_arms(resolved)
    _check_attention(resolved)
    _check_size(resolved)
    return resolved


def as_typed(config: RunConfig) -> TrainConfig:
    """The settings that resolve to this config, for some to be changed; clip_norm None is off."""
    off = config.clip_norm == math.inf
    return TrainConfig(**vars(config) | {"clip_norm": None if off else config.clip_norm})


def from_json(settings: dict[str, Any]) -> RunConfig:
    """The settings of a run folder, of this version's format or an earlier one.

    A setting that the run's version did not have takes the value that it then had.

    Raises:
      ValueError: a later format, a setting that this version doesn't know, or one that can't be.
    """
    settings = dict(settings)
    written, version = settings.pop("format", 1), settings.pop("version", "0.1")
    ours = f"this is {VERSION}, format {FORMAT}"
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    if strange := sorted(settings.keys() - known):
        raise ValueError(
            f"{strange[0]} is not a setting that this version knows: the run was written by "
            f"{version}, format {written}; {ours}"
        )
    if type(written) is not int or not 1 <= written <= FORMAT:
        raise ValueError(f"the run was written by {version}, format {written}; {ours}")
    for name, value in BEFORE.items():
        settings.setdefault(name, value)
    if missing := sorted(known - settings.keys()):
        raise ValueError(f"{missing[0]} is missing")
    return resolve(TrainConfig(**settings))


def _default(value, default):
    return default if value is None else value


def _check_numbers(c: TrainConfig) -> None:
    if c.seed + c.num_seeds - 1 > _LARGEST_SEED:
        raise ValueError(
            f"seed: {c.seed} and num_seeds: {c.num_seeds} go past the last seed, {_LARGEST_SEED}"
        )
    for name in ("batch_size", "eval_size"):
        if getattr(c, name) % c.batch_shards:
            raise ValueError(
                f"batch_shards: {c.batch_shards} does not divide {name}, {getattr(c, name)}"
            )
    if c.batch_shards > 1 and c.vectorize_lanes:
        raise ValueError("batch_shards: contradicts vectorize_lanes; give one of them")
    if not 0 <= c.dropout_rate < 1:
        raise ValueError(f"dropout_rate: {c.dropout_rate}, must be in [0, 1)")
    rates: Any = c.learning_rate
    for name, values in (("clip_norm", (c.clip_norm,)), ("learning_rate", rates or ())):
        for value in values:
            # 1e-30 and below are denormal once squared or divided; nothing sensible is that small.
            if value is not None and not (math.isfinite(value) and 1e-30 <= value <= 1e30):
                raise ValueError(f"{name}: {value}, must be a positive finite number")
    for name, values in (("scale", c.scale), ("learning_rate", rates)):
        if values is not None and not values:
            raise ValueError(f"{name}: empty, give at least one")
    for value in rates or ():
        if rates.count(value) > 1:
            raise ValueError(f"learning_rate: {value} is given twice")


def _check_arms(c: RunConfig) -> None:
    try:
        arms = c.arms()
    except ValueError as error:
        raise ValueError(f"scale: {error}") from None
    check_distinct(arms)
    for arm in arms:
        if not abs(arm.rule.multiplier) <= _LARGEST_FACTOR:
            raise ValueError(f"scale: {arm.name}, must be at most {_LARGEST_FACTOR:g} in size")


def _check_attention(c: RunConfig) -> None:
    """Refuse what streaming and fused attention can't serve, whatever the machine."""
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


def _check_size(c: RunConfig) -> None:
    """Refuse what could not fit a device: parameters with their optimizer, activations."""
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
    lanes = len(c.scale) * len(c.learning_rate) * c.num_seeds
    states = 4 * 3 * parameters * lanes
    if states > _LARGEST_BYTES:
        raise ValueError(
            f"{lanes} lanes would need about {states / 2**30:.0f} GiB, {limit}: lower num_seeds"
        )


def scales_help() -> str:
    """The arms with their formulas, for --help."""
    return ", ".join(f"{name} ({formula})" for name, formula in arm_choices().items())
