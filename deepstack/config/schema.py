"""The settings of a configuration: every key with its type, range, default and description.

The text under each field is its help, in `deepstack init`, in editors and in the documentation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from deepstack.allowed import RUN_NAME
from deepstack.config.display import Displayed
from deepstack.config.section import (
    LONGEST_NAME,
    Fraction,
    Identifier,
    Scalar,
    Section,
    as_dict,
    as_tuple,
    unused_without,
)

Role = Literal[
    "q", "k", "v", "o", "w1", "w2", "w3", "cross_q", "cross_k", "cross_v", "cross_o", "bias",
    "norm_gain", "norm_bias", "final_norm", "scheme", "embedding", "position", "head",
]  # fmt: skip
ROLES: tuple[str, ...] = get_args(Role)
MATRICES = ROLES[: ROLES.index("bias")]  # of the layers


def _in_order(roles: tuple[str, ...]) -> tuple[str, ...]:
    """Return each role once, in the order of ROLES: one experiment has one spelling."""
    return tuple(role for role in ROLES if role in roles)


Family = Literal["encoder", "decoder", "encoder_decoder"]
Distribution = Literal[
    "xavier_normal", "xavier_uniform", "kaiming_normal", "kaiming_uniform", "orthogonal",
    "truncated_normal", "normal", "zero_identity", "ntk", "torch_linear",
]  # fmt: skip
Activation = Literal[
    "relu", "gelu", "sigmoid", "tanh", "selu", "silu", "relu2", "scaled_sigmoid", "scaled_tanh",
]  # fmt: skip
_XAVIER = ("xavier_normal", "xavier_uniform", "truncated_normal")

# Settings of which one says how long a run trains; `deepstack.model.with_steps` counts its steps.
LENGTHS = ("steps", "tokens", "flops")

# The least number that fp32 holds with all its digits, and what norms up to 3e8 can be divided by.
LEAST, LEAST_CLIP = 1.2e-38, 1e-30


class NormKind(NamedTuple):
    """A kind of norm, for the estimate of memory; its formula is in `deepstack.schemes.norms`."""

    scalars: int = 0  # trained numbers beside gain and bias
    keeps_output: bool = False  # whether a step keeps its output before the gain


NORM_KINDS = {
    "layer": NormKind(),
    "rms": NormKind(keeps_output=True),
    "batch": NormKind(),
    "dynamic_tanh": NormKind(scalars=1, keeps_output=True),
    "dynamic_erf": NormKind(scalars=2, keeps_output=True),
}


class Norm(Section):
    """The norms of a stack, in the place of LN in a scheme's equation."""

    kind: Literal["layer", "rms", "batch", "dynamic_tanh", "dynamic_erf"] = "layer"
    """LayerNorm; RMSNorm; BatchNorm; without statistics: DyT, gain * tanh(a z) + bias, or Derf."""
    gain: bool = True
    """Whether the norms of the layers have a gain."""
    bias: bool = True
    """Whether the norms of the layers have a bias."""
    final_gain: bool | None = None
    """Whether the final norm has a gain; null: as the others.  A folded model with a tied head."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-5
    """The number that is added to the variance, or to the mean square."""
    start: Annotated[float, Field(gt=0, le=1e6)] = 0.5
    """dynamic_tanh, dynamic_erf: the scalar a at the start."""

    _check_use = unused_without(start={"model.norm.kind": ("dynamic_tanh", "dynamic_erf")})


class Init(Section):
    """How weight matrices start, before the scheme's own gain."""

    distribution: Distribution = "xavier_normal"
    """The distribution of matrices; ntk: N(0, gain^2), and products are divided by sqrt(n_in);
    torch_linear: nn.Linear's own, U(-gain/sqrt(n_in), gain/sqrt(n_in)), also of biases."""
    fan: Literal["in_out", "in"] = "in_out"
    """xavier: 'in_out': variance gain^2 * 2 / (n_in + n_out), as published; 'in': gain^2 / n_in."""
    qkv: Literal["separate", "packed"] = "separate"
    """xavier: n_out of q, k and v is d_model; 'packed': 3 d_model as in fairseq (std / sqrt(2))."""
    std: Annotated[float, Field(gt=0, le=1e6)] = 0.02
    """normal: the standard deviation of every matrix."""

    _check_use = unused_without(
        fan={"model.init.distribution": _XAVIER},
        qkv={"model.init.fan": ("in_out",), "model.init.distribution": _XAVIER},
        std={"model.init.distribution": ("normal",)},
    )


class Model(Section):
    """The stack of layers, or the two of an encoder-decoder."""

    scheme: Identifier = "deepnorm"
    """The residual scheme (`deepstack list schemes`)."""
    scheme_options: Annotated[dict[Identifier, Scalar | None], BeforeValidator(as_dict)] = {}
    """Options of the scheme's own."""
    depth: Annotated[int, Field(ge=1, le=1_000_000)] = 6
    """The number of layers N; a layer is attention and feed-forward, so 2 N sublayers."""
    family: Family = "encoder"
    """encoder: sees all positions; decoder: those before; encoder_decoder: one reads the other."""
    decoder_depth: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """encoder_decoder: the number of decoder layers M; null: depth, which the encoder has."""
    decoder_attention: Literal["separate", "merged", "average"] = "separate"
    """encoder_decoder: self- and cross-attention, merged, or an average and cross-attention."""
    unique_layers: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """The number of layers with parameters of their own, which the others repeat; null: all."""
    d_model: Annotated[int, Field(ge=1, le=65_536)] = 64
    """The width of the stream."""
    n_heads: Annotated[int, Field(ge=1, le=65_536, validate_default=True)] = 2
    """The number of attention heads; it divides d_model."""
    d_ff: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """The width inside the feed-forward; null means 4 * d_model."""
    activation: Activation = "relu"
    """The nonlinearity of the feed-forward; relu2: relu's square; scaled_…: of unit mean square."""
    gated: bool = False
    """Whether a third matrix, w3, gates the feed-forward's hidden values; with silu: SwiGLU."""
    bias: bool = True
    """Whether the linear maps of the layers (q, k, v, o, w1, w2, w3) have biases."""
    dropout: Fraction = 0.0
    """The dropout rate on attention weights and sublayer outputs."""
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"
    """How positions enter: added to the embedding, or turning queries and keys (RoPE)."""
    qk_norm: bool = False
    """Whether queries and keys are normed before their logits, head by head."""
    norm: Norm = Norm()
    init: Init = Init()
    head: Literal["tied", "separate", "bert"] = "tied"
    """The output: the token table again, a separate matrix, or BERT's masked-token head."""
    start: Annotated[str, Field(min_length=1)] | None = None
    """The folder of a finished run with whose weights it begins; null: drawn from the seed."""
    grow: Literal["stack", "interleave", "middle", "identity"] | None = None
    """start: how a deeper stack begins: 1212, 1122, the middle twice, or new layers that add 0."""

    _check_use = unused_without(
        decoder_depth={"model.family": ("encoder_decoder",)},
        decoder_attention={"model.family": ("encoder_decoder",)},
    )

    @field_validator("grow")
    @classmethod
    def _growth_needs_a_start(cls, grow: str | None, info: Any) -> str | None:
        if grow and info.data.get("start") is None:
            raise PydanticCustomError(
                "relation",
                "found {grow}, unused under model.start=null; allowed null, or a model.start",
                {"grow": grow},
            )
        return grow

    @field_validator("unique_layers")
    @classmethod
    def _unique_layers_divide_depth(cls, unique: int | None, info: Any) -> int | None:
        for key in ("depth", "decoder_depth"):
            depth = info.data.get(key)
            if unique and depth and depth % unique:
                raise PydanticCustomError(
                    "relation",
                    "found {unique}; allowed a divisor of model.{key} = {depth}",
                    {"unique": unique, "key": key, "depth": depth},
                )
        return unique

    @field_validator("n_heads")
    @classmethod
    def _heads_divide_width(cls, n_heads: int, info: Any) -> int:
        d_model = info.data.get("d_model")
        if d_model is not None and d_model % n_heads:
            divisors = [str(h) for h in range(1, min(d_model, 1024) + 1) if d_model % h == 0]
            raise PydanticCustomError(
                "relation",
                "found {n_heads}; allowed a divisor of model.d_model = {d_model}: {divisors}",
                {"n_heads": n_heads, "d_model": d_model, "divisors": ", ".join(divisors)},
            )
        return n_heads

    @model_validator(mode="after")
    def _resolve_d_ff(self) -> Model:
        if self.d_ff is None:
            # past the frozen setter, and without marking the field as one that the user has set
            self.__dict__["d_ff"] = 4 * self.d_model
        return self


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
    """The number of optimizer steps; 0: measure the start and write no weights."""
    tokens: Annotated[int, Field(ge=1, le=10**18)] | None = None
    """Instead of steps: the tokens of all batches, batch_size * seq_len each, rounded to steps."""
    flops: Annotated[float, Field(gt=0, le=1e30)] | None = None
    """Instead of steps: the FLOPs of all steps, as `deepstack check` prints, rounded to steps."""
    batch_size: Annotated[int, Field(ge=1, le=1_048_576)] = 16
    """Sequences in a batch."""
    shards: Annotated[int, Field(ge=1, le=1024, validate_default=True)] = 1
    """Equal parts of a batch whose gradients are added in order; runtime.threads replay them."""
    optimizer: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """The optimizer; 'muon' moves the layers' matrices, and adamw the other parameters."""
    lr: Annotated[float, Field(gt=0, le=1e6)] = 1e-3
    """The learning rate after warm-up."""
    betas: Annotated[tuple[Fraction, Fraction], BeforeValidator(as_tuple)] = (0.9, 0.98)
    """Decay rates of the moments of adam and adamw."""
    eps: Annotated[float, Field(ge=LEAST, le=1)] = 1e-8
    """The number that is added to the square root of the second moment."""
    momentum: Fraction = 0.0
    """The momentum of sgd."""
    muon: Muon = Muon()
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt"] = "linear"
    """The learning rate after warm-up; 'linear', 'cosine': to 0, one step after the last."""
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
            AfterValidator(_in_order),
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
    eval_batches: Annotated[int, Field(ge=1, le=100_000)] = 4
    """Held-out batches in an evaluation."""

    _check_use = unused_without(
        momentum={"train.optimizer": ("sgd", "adam", "adamw")},  # muon: train.muon.momentum
        muon={"train.optimizer": ("muon",)},
        decay_period={"train.schedule": ("inverse_sqrt",)},
    )

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        lengths = [key for key in LENGTHS if key in self.model_fields_set and getattr(self, key)]
        if len(lengths) > 1:
            raise PydanticCustomError(
                "relation",
                "found {given}; allowed one of {lengths}",
                {"given": " and ".join(lengths), "lengths": ", ".join(LENGTHS)},
            )
        return self

    @property
    def has_budget(self) -> bool:
        """Whether tokens or flops are given, from which the steps are yet to be computed."""
        return self.tokens is not None or self.flops is not None

    @field_validator("shards")
    @classmethod
    def _shards_divide_batch(cls, shards: int, info: Any) -> int:
        batch_size = info.data.get("batch_size")
        if batch_size is not None and batch_size % shards:
            raise PydanticCustomError(
                "relation",
                "found {shards}; allowed a divisor of train.batch_size = {batch_size}",
                {"shards": shards, "batch_size": batch_size},
            )
        return shards

    def lr_factor(self, role: str) -> float:
        """Return the factor on lr for the parameters of a role."""
        return {str(key): factor for key, factor in self.lr_factors.items()}.get(role, 1.0)


class Log(Section):
    """The records of a run."""

    probe_sequences: Annotated[int, Field(ge=1, le=4096)] = 4
    """Sequences in the fixed batch on which the model update is measured."""
    layers_every: Annotated[int, Field(ge=0, le=1_000_000_000)] | Literal["log"] = "log"
    """Steps between records of every layer; 'log': 0, 1, 2, 3, 5, 8, 13, 21, ...; 0: never."""
    skipped_layers: Annotated[int, Field(ge=0, le=16)] = 0
    """How many layers a record leaves out in turn, to measure the probe loss without each."""
    stream_update: bool = False
    """Whether a record has ‖x_l,t − x_l,0‖ of every layer; it keeps the stream of the start."""
    jacobian: bool = False
    """Whether a record has the norm of the Jacobian of F by each layer's output: one more pass."""
    attribution_every: Annotated[int, Field(ge=0, le=1_000_000_000)] | Literal["log"] = 0
    """Steps between records of which roles and layers moved F: a forward of the probe for each."""
    to: Annotated[tuple[Literal["tensorboard"], ...], BeforeValidator(as_tuple)] = ()
    """Trackers that get the log too, in the run's folder: [tensorboard]; changes no number."""
    first_order: bool = False
    """Whether the same is recorded of the linearised model too: a forward-mode pass for each."""

    @field_validator("first_order", "stream_update")
    @classmethod
    def _is_of_a_record(cls, chosen: bool, info: Any) -> bool:
        every = {"first_order": "attribution_every", "stream_update": "layers_every"}
        key = every[info.field_name]
        if chosen and info.data.get(key) == 0:
            raise PydanticCustomError(
                "relation",
                f"found true, unused under log.{key}=0; allowed false, or another log.{key}",
            )
        return chosen


class Runtime(Section):
    """The device and the fast paths; nothing here is part of the experiment."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device; 'auto' takes a GPU when there is one."""
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """CPU threads; 'auto' means one for small matrices.  With train.shards, one a shard."""
    banks: bool = True
    """Whether the parameters of one role over all layers are one tensor; the numbers are equal."""
    fused: bool | Literal["auto"] = "auto"
    """Whether a sublayer is one node of the backward pass, which writes its gradients in place."""
    compile: bool | Literal["auto"] = "auto"
    """Whether the layer is compiled, once for all of them; 'auto': on a GPU, if not fused."""
    cuda_graph: bool | Literal["auto"] = "auto"
    """Whether a step is captured and replayed as CUDA graphs; 'auto': on a GPU, yes."""
    replay: bool | Literal["auto"] = "auto"
    """Whether the operations of a step are recorded once and replayed; 'auto': on a CPU."""
    products: Literal["auto", "mkl", "onednn"] = "auto"
    """The library of large products in fp32 on a CPU; 'auto': oneDNN on AMD with AVX-512."""
    recompute_every: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Keep the stream every so many layers and compute the rest again backward; 0: keep all."""
    parallel: Literal["data", "fully_sharded"] = "data"
    """How processes of torchrun share the work: split the batch, or the parameters too."""
    checkpoint_seconds: Annotated[float, Field(ge=0, le=1e9)] = 120.0
    """Seconds between checkpoints."""
    keep_optimizer: bool = False
    """Whether a finished run keeps the state of its optimizer too, as `train --extend` needs."""
    deterministic: bool = True
    """Whether only deterministic kernels are allowed."""


class Config(Displayed, Section):
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
