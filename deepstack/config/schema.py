"""The settings of a configuration: every key with its type, range, default and description.

The text under each field is its help, in `deepstack init`, in editors and in the documentation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from deepstack.base.allowed import RUN_NAME
from deepstack.base.extensions import import_extensions
from deepstack.base.notebook import html_table
from deepstack.config.instruments import log_sections, log_settings
from deepstack.config.model_schema import Model
from deepstack.config.roles import Role, in_order
from deepstack.config.section import (
    LONGEST_NAME,
    Device,
    Fraction,
    Identifier,
    Interval,
    Options,
    Scalar,
    Section,
    as_dict,
    as_tuple,
    divisor_of,
    unused_without,
)

# Settings of which one says how long a run trains; `deepstack.model.with_steps` counts its steps.
LENGTHS = ("steps", "tokens", "flops")
# The least number that fp32 holds with all its digits, and the least divisor of norms up to 3e8.
LEAST, LEAST_CLIP = 1.2e-38, 1e-30


class Task(Section):
    """The task to learn.  Further keys are options of the task (`deepstack list tasks`)."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Scalar | list[Scalar] | None]

    name: Identifier = "text"
    """The task."""
    seq_len: Annotated[int, Field(ge=2, le=65_536)] = 64
    """The length of a sequence in tokens."""

    def options(self) -> dict[str, Any]:
        """The task's own options: every key besides name and seq_len."""
        return dict(self.__pydantic_extra__ or {})


class Muon(Section):
    """How train.optimizer=muon updates the matrices of the layers; AdamW updates all others."""

    momentum: Fraction = 0.95
    """The momentum, Nesterov's."""
    ns_steps: Annotated[int, Field(ge=1, le=100)] = 5
    """Newton-Schulz steps that orthogonalise an update."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """The factor on lr: 0.2 sqrt(max(n_out, n_in)), or sqrt(max(1, n_out/n_in))."""


class Train(Section):
    """Optimisation and evaluation.  Times are in steps."""

    steps: Annotated[int, Field(ge=0, le=1_000_000_000)] = 300
    """The number of optimizer steps; 0: measure the start, and write no weights but kept ones."""
    tokens: Annotated[int, Field(ge=1, le=10**18)] | None = None
    """Instead of steps: the tokens that the model reads in all batches, rounded to steps."""
    flops: Annotated[float, Field(gt=0, le=1e30)] | None = None
    """Instead of steps: the FLOPs of all steps, as `deepstack check` prints, rounded to steps."""
    batch_size: Annotated[int, Field(ge=1, le=1_048_576)] = 16
    """Sequences in a batch."""
    micro_batches: Annotated[int, Field(ge=1, le=65_536, validate_default=True)] = 1
    """Equal parts of a batch, one after the other, whose gradients are added: less memory."""
    shards: Annotated[int, Field(ge=1, le=1024, validate_default=True)] = 1
    """The same as micro_batches, but runtime.threads replay the parts at the same time."""
    optimizer: Identifier = "adamw"
    """The optimizer (`deepstack list optimizers`)."""
    optimizer_options: Options = {}
    """Options of the optimizer."""
    lr: Annotated[float, Field(gt=0, le=1e6)] = 1e-3
    """The learning rate after warm-up."""
    betas: Annotated[tuple[Fraction, Fraction], BeforeValidator(as_tuple)] = (0.9, 0.98)
    """Decay rates of the moments of adam and adamw."""
    eps: Annotated[float, Field(ge=LEAST, le=1)] = 1e-8
    """The number that is added to the square root of the second moment."""
    momentum: Fraction = 0.0
    """The momentum of sgd."""
    muon: Muon = Muon()
    schedule: Identifier = "linear"
    """The learning rate after warm-up (`deepstack list schedules`)."""
    schedule_options: Options = {}
    """Options of the schedule."""
    final_lr_factor: Fraction = 0.0
    """The factor on lr one step after the last, of schedules that end: linear, cosine, wsd."""
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000_000)] = 10
    """Steps over which the learning rate rises linearly to lr."""
    decay_period: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Steps P in the sqrt(P/(P + steps after warm-up)) of inverse_sqrt; null: the warm-up's."""
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Decay of matrices and embeddings; biases, gains and scalars never decay."""
    spectral_penalty: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """lambda in loss + lambda/2 * sum of squared spectral norms of the layers' matrices."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """eps in the training loss (1 - eps) * -ln p(true) + eps * mean over tokens of -ln p."""
    z_loss: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """lambda in training loss + lambda * (ln of the sum over tokens of exp(logit))^2."""
    clip: Annotated[float, Field(ge=LEAST_CLIP)] | None = 1.0
    """The largest global gradient norm; null for no clipping."""
    lr_factors: Annotated[
        dict[Role, Annotated[float, Field(ge=0, le=1e6)]], BeforeValidator(as_dict)
    ] = {}
    """A factor on the learning rate of a role's parameters: {q: 0.5}."""
    lr_exponents: Annotated[
        dict[Role, Annotated[float, Field(ge=-8, le=8)]], BeforeValidator(as_dict)
    ] = {}
    """Powers e of depth: a role's rate is lr * (N / base_depth)^(-e), N = model.depth: {v: 0.5}."""
    base_depth: Annotated[int, Field(ge=1, le=1_000_000)] = 6
    """The depth at which lr_exponents and eps_exponent change nothing."""
    decay_by_depth: Literal["with_lr", "constant"] = "with_lr"
    """The decay of a step, rate * weight_decay: falls with lr_exponents, or stays as without."""
    eps_exponent: Annotated[float, Field(ge=-8, le=8)] = 0.0
    """A power e of depth: the eps of adam and adamw is eps * (N / base_depth)^(-e)."""
    trainable: (
        Literal["all"]
        | Annotated[
            tuple[Role, ...],
            BeforeValidator(as_tuple),
            Field(min_length=1),
            AfterValidator(in_order),
        ]
    ) = "all"
    """The roles that are trained: 'all', or a list."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """The number format of matrix products.  'bf16' is autocast: weights, optimizer, norms, softmax
    and the probe stay in fp32."""
    max_loss: Annotated[float, Field(gt=0)] = 100.0
    """A training loss above this ends the run as diverged."""
    eval_every: Annotated[int, Field(ge=0, le=1_000_000_000)] = 50
    """Steps between evaluations on held-out batches; 0: only at the start and the end."""
    eval_batches: Annotated[int, Field(ge=1, le=100_000)] | Literal["auto"] = "auto"
    """Held-out batches in an evaluation; 'auto': 1,024 to 8,192 predicted positions."""

    keep_weights: (
        Annotated[
            tuple[Annotated[int, Field(ge=0, le=1_000_000_000)], ...],
            BeforeValidator(as_tuple),
            Field(min_length=1, max_length=1000),
        ]
        | Interval
    ) = 0
    """Steps after which the weights are kept too: a list, or an interval; 0: only the last."""

    _check_use = unused_without(
        momentum={"train.optimizer": ("sgd",)},  # muon has train.muon.momentum
        muon={"train.optimizer": ("muon",)},
        decay_period={"train.schedule": ("inverse_sqrt",)},
    )

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        lengths = [key for key in LENGTHS if key in self.model_fields_set and getattr(self, key)]
        if len(lengths) > 1:
            text = f"found {' and '.join(lengths)}; allowed one of {', '.join(LENGTHS)}"
            raise PydanticCustomError("relation", text)
        return self

    @property
    def has_budget(self) -> bool:
        """Whether tokens or flops are given, from which the steps are yet to be computed."""
        return self.tokens is not None or self.flops is not None

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Leave out the default steps where a budget decides them, by `model.with_steps`."""
        shown = super().__repr_args__()
        return [one for one in shown if not (one[0] == "steps" and self.has_budget)]

    _check_parts = divisor_of("micro_batches", "train.batch_size")
    _check_shards = divisor_of("shards", "train.batch_size")

    @field_validator("shards")
    @classmethod
    def _one_kind_of_parts(cls, value: int, info: Any) -> int:
        other = info.data.get("micro_batches", 1)
        if value > 1 and other > 1:
            text = f"found {value} beside train.micro_batches={other}; allowed one of both"
            raise PydanticCustomError("relation", text)
        return value

    @field_validator("keep_weights")
    @classmethod
    def _reached_steps(cls, value: Any, info: Any) -> Any:
        steps = info.data.get("steps")
        has_budget = info.data.get("tokens") or info.data.get("flops")
        last = max(value) if isinstance(value, tuple) else 0
        if steps is not None and not has_budget and last > steps:
            text = f"found {last}; allowed steps up to train.steps = {steps}"
            raise PydanticCustomError("relation", text)
        return value

    @property
    def parts(self) -> int:
        """The equal parts of a batch whose gradients are added in order."""
        return max(self.micro_batches, self.shards)

    def lr_factor(self, role: str) -> float:
        """Return the factor on lr for the parameters of a role."""
        return {str(key): factor for key, factor in self.lr_factors.items()}.get(role, 1.0)


@log_settings(place=0)
class SnapshotSettings(Section):
    """The probe batch, and the records of every layer."""

    probe_sequences: Annotated[int, Field(ge=1, le=4096)] = 4
    """Sequences in the fixed batch on which the model update is measured."""
    layers_every: Interval = "log"
    """Steps between records of every layer; 'log': 0, 1, 2, 3, 5, 8, 13, 21, ...; 0: never."""
    layers_on: Literal["spike"] | None = None
    """Besides: 'spike', a record at a step whose loss or gradient norm jumps; null: none."""
    skipped_layers: Annotated[int, Field(ge=0, le=16)] = 0
    """How many layers a record leaves out in turn, to measure the probe loss without each."""
    stream_update: bool = False
    """Whether a record has ‖x_l,t − x_l,0‖ of every layer; it keeps the stream of the start."""
    jacobian: bool = False
    """Whether a record has the norm of the Jacobian of F with respect to each layer's output."""
    streams: bool = False
    """Whether a record has the mixing of streams and compares neighbouring layers' changes."""

    _check_layers_on = unused_without(layers_on={"log.layers_every": ()})
    _check_stream_update = unused_without(stream_update={"log.layers_every": ()})
    _check_streams = unused_without(streams={"log.layers_every": ()})


TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


@log_settings(place=80)
class OutputSettings(Section):
    """Trackers, and instruments that have no settings of their own."""

    to: Annotated[tuple[TrackerName, ...], BeforeValidator(as_tuple)] = ()
    """Trackers that get each row while the run trains, in its folder: [wandb]; change no number."""
    instruments: Annotated[dict[Identifier, Interval], BeforeValidator(as_dict)] = {}
    """Steps between the measurements of instruments from plugins: {grad_cosine: 10}."""


import_extensions("settings")  # the fields of instruments

if TYPE_CHECKING:

    class Log(SnapshotSettings, OutputSettings):
        pass
else:
    Log = create_model(
        "Log", __base__=log_sections(), __module__=__name__, __doc__="The records of a run."
    )


class Runtime(Section):
    """The device and the fast paths; nothing here is part of the experiment."""

    device: Device = "auto"
    """The device; 'auto' takes a GPU when there is one; gpu is another word for cuda."""
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """CPU threads; 'auto' means all cores for C++ kernels and for large matrices, else one; one a
    shard with train.shards; one in a sweep, unless matrices are large."""
    banks: bool = True
    """Whether the parameters of one role over all layers are one tensor; the numbers are equal."""
    fused: bool | Literal["auto"] = "auto"
    """Whether a sublayer is one node of the backward pass, which writes its gradients in place."""
    compile: bool | Literal["auto"] = "auto"
    """Whether the layer is compiled, once for all of them; 'auto': on a GPU, if not fused."""
    cuda_graph: bool | Literal["auto"] = "auto"
    """Whether a step is captured and replayed as CUDA graphs; 'auto': on a GPU, yes."""
    replay: bool | Literal["auto", "native", "python"] = "auto"
    """Whether the operations of a step are recorded once and replayed, by C++ kernels ('native') or
    by torch's ('python'); 'auto': on a CPU, and by C++ where there is a compiler."""
    products: Literal["auto", "mkl", "onednn"] = "auto"
    """The library of large products in fp32 on a CPU; 'auto': oneDNN on AMD with AVX-512."""
    recompute_every: Annotated[int, Field(ge=0, le=1_000_000)] | Literal["auto"] = "auto"
    """Keep the stream every so many layers and compute the rest again backward; 0: keep all;
    'auto': all, or on a CPU every √depth layers if the machine has too little memory for all."""
    parallel: Literal["data", "fully_sharded"] = "data"
    """How processes of torchrun share the work: split the batch, or the parameters too."""
    checkpoint_seconds: Annotated[float, Field(ge=0, le=1e9)] = 120.0
    """Seconds between checkpoints."""
    keep_final_weights: bool = True
    """Whether a finished run keeps its weights; without them `analyze`, `export` and `model.start`
    have nothing to read."""
    keep_optimizer: bool = False
    """Whether a finished run keeps the state of its optimizer too, as `train --extend` needs."""
    deterministic: bool = True
    """Whether only deterministic kernels are allowed."""

    _check_kept = unused_without(keep_optimizer={"runtime.keep_final_weights": ()})


class Config(Section):
    """One run.  Every key has a default: an empty file is a configuration."""

    name: Annotated[str, Field(pattern=RUN_NAME, max_length=LONGEST_NAME)] | None = None
    """The study that the run is filed under; null for the file's own name."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """The seed of initialisation, data and dropout."""
    model: Model = Model()
    task: Task = Task.model_validate({})
    train: Train = Train()
    log: Log = Log()
    runtime: Runtime = Runtime()

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        return list(non_defaults(self).items())

    __str__ = BaseModel.__repr__

    def _repr_html_(self) -> str:
        changed = {str(key): value for key, value in self.__repr_args__()}
        rest = "others" if changed else "all settings"
        return html_table(f"Config: {rest} have their defaults", changed)


def values(config: Config) -> dict[str, Any]:
    """Return every value by its dotted key: {'seed': 0, 'model.depth': 6, …}; tuples as lists."""
    return dict(flatten(config.model_dump(mode="json")))


def non_defaults(config: Config) -> dict[str, Any]:
    """Return the values that differ from the defaults; a d_ff of 4 d_model does not."""
    usual = _usual() | {"model.d_ff": 4 * config.model.d_model}
    settings = values(config)
    return {  # 1 is neither 1.0 nor true
        key: value
        for key, value in settings.items()
        if key not in usual or type(value) is not type(usual[key]) or value != usual[key]
    }


@cache
def _usual() -> dict[str, Any]:
    return values(Config())


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted key as nested sections: the reverse of `flatten`."""
    sections: dict[str, Any] = {}
    for key, value in flat.items():
        *above, last = key.split(".")
        inner = sections
        for section in above:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return sections


def flatten(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and the values of nested sections."""
    for key, item in value.items():
        if isinstance(item, dict):
            yield from flatten(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
