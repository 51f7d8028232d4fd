"""Estimates of a run from its configuration: parameters, memory and disk."""

import math
import os
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from deepstack.config.machine import machine_memory
from deepstack.config.model_schema import NORM_KINDS
from deepstack.config.roles import MATRICES
from deepstack.config.schema import Config
from deepstack.errors import ConfigError

# the vocabulary of a text of bytes; other tasks' are smaller or not much larger
BYTES_VOCABULARY = 257
# Measured: a process after the import of torch and one step of a small model; and the modules of a
# layer with the graph or list of its operations, without results
PROCESS_BYTES = 320 * 2**20
LAYER_OVERHEAD = 240 * 2**10
# rows of steps.csv and timing.csv; files below layers/, most diagnostics having two
BYTES_PER_STEP = 160
LAYER_FILES = 60
# Steps from which on `auto` replays them: recording one costs what about twenty replayed ones save.
FEW_STEPS = 50
# Sublayers that a snapshot measures at a time: launching them costs little, and so does memory.
SUBLAYERS_AT_A_TIME = 128
# Far more than the machine has is refused; a little more is for the run itself to find out.
ABSURD = 4
GPU_BYTES = 192 * 2**30
# The sizes of which a message names one to reduce.
SIZES = (
    "model.depth", "model.d_model", "model.d_ff", "model.n_heads", "task.seq_len",
    "train.batch_size", "log.probe_sequences", "model.decoder_depth", "train.eval_batches",
)  # fmt: skip

_FP32 = 4


def parameter_count(config: Config, vocab_size: int) -> dict[str, int]:
    """Return the number of parameters by role, without empty roles and those that a scheme adds.

    A scheme decides whether there is a final norm too.
    """
    model, layers = config.model, layer_counts(config)
    d, d_ff, every, cross = model.d_model, width_inside(config), layers.all, layers.cross
    averaged = layers.decoder * (model.decoder_attention == "average")  # gates read two streams
    scalar = NORM_KINDS[model.norm.kind].scalars
    gain, bias = d * model.norm.gain + scalar, d * model.norm.bias
    of_heads, d_head = 2 * (every + cross - averaged) * model.qk_norm, d // model.n_heads
    head = {"tied": 0, "separate": vocab_size * d, "bert": d * d + 3 * d}[model.head]
    counts = {
        **dict.fromkeys(("q", "k"), (every + averaged) * d * d),
        **dict.fromkeys(("v", "o"), every * d * d),
        **dict.fromkeys(("cross_q", "cross_k", "cross_v", "cross_o"), cross * d * d),
        "w1": every * d * d_ff,
        "w2": every * d_ff * d,
        "w3": every * d_ff * d * model.gated,
        "bias": (every * (4 * d + d_ff * (1 + model.gated) + d) + cross * 4 * d) * model.bias,
        "norm_gain": layers.sublayers * gain + of_heads * (d_head * model.norm.gain + scalar),
        "norm_bias": layers.sublayers * bias + of_heads * d_head * model.norm.bias,
        "embedding": vocab_size * d,
        "position": positions(config) * d if model.positions == "learned" else 0,
        "head": head + vocab_size,
    }
    return {role: count for role, count in counts.items() if count}


class LayerCounts(NamedTuple):
    """The numbers of layers of a model.

    depth: of its stack, or of its encoder.  decoder: of the decoder that reads an encoder, else 0.
    cross: layers of that decoder whose cross-attention is a sublayer, not merged with another.
    """

    depth: int
    decoder: int
    cross: int

    @property
    def all(self) -> int:
        """The layers of both stacks."""
        return self.depth + self.decoder

    @property
    def sublayers(self) -> int:
        """The sublayers of both stacks."""
        return 2 * self.all + self.cross


def layer_counts(config: Config) -> LayerCounts:
    """Return the numbers of layers of a model."""
    model = config.model
    decoder = (model.decoder_depth or model.depth) if model.family == "encoder_decoder" else 0
    return LayerCounts(model.depth, decoder, decoder * (model.decoder_attention != "merged"))


def positions(config: Config) -> int:
    """The rows of the table of positions: a sequence, or two."""
    return config.task.seq_len * (2 if config.model.family == "encoder_decoder" else 1)


def width_inside(config: Config) -> int:
    """d_ff, which the schema has resolved."""
    return config.model.d_ff or 4 * config.model.d_model


class StackSizes(NamedTuple):
    """The sizes of a stack from which a scheme computes the memory and the FLOPs that it adds.

    sublayers: of all layers.  seq: positions.  replayed: whether the step is replayed on a CPU,
    which keeps the gradients of activations as well.
    """

    depth: int
    sublayers: int
    batch: int
    seq: int
    heads: int
    d_model: int
    replayed: bool

    @property
    def numbers(self) -> int:
        """The numbers of one stream, (batch, seq, d_model)."""
        return self.batch * self.seq * self.d_model

    @property
    def stream(self) -> int:
        """The bytes of one stream in fp32."""
        return self.numbers * _FP32


SchemeMemory = Callable[[StackSizes], int]
"""Bytes that a scheme keeps in a stack for its gradients, in addition to Pre-LN's."""


def no_more(sizes: StackSizes) -> int:
    """Return the memory that Pre-LN adds: none."""
    return 0


def memory_terms(
    config: Config,
    vocab_size: int = BYTES_VOCABULARY,
    scheme_memory: SchemeMemory = no_more,
    data: int = 0,
) -> dict[str, int]:
    """Return the bytes at the peak of a run, term by term: of a training step, or of a snapshot."""
    train, layers, d = config.train, layer_counts(config), config.model.d_model
    by_role = parameter_count(config, vocab_size)
    weights = sum(by_role.values()) * _FP32
    trained = sum(trained_parameters(config, by_role).values()) * _FP32
    bank_bytes = max(by_role.get(role, 0) for role in ("q", "w1")) * _FP32
    tokens = train.batch_size * positions(config)
    probe = config.log.probe_sequences
    # int64 tokens and targets of a batch, and whether they are masked
    held_out = 8 * tokens + 9 * train.batch_size * config.task.seq_len
    terms = {
        "Python and torch": 0 if on_gpu(config) else PROCESS_BYTES,
        "data": 0 if on_gpu(config) else data,
        "weights": weights,
        "gradients": trained * train.shards,
        "optimizer moments": moments(config, by_role),
        "temporaries of the optimizer": (1 if train.optimizer == "sgd" else 2) * bank_bytes,
        "modules and graph": layers.all * LAYER_OVERHEAD,
        "activations": activations(config, scheme_memory),
        "gradients of activations": 3 * tokens * max(width_inside(config), 3 * d) * _FP32,
        "logits, their softmax and their gradient": 3 * tokens * vocab_size * _FP32,
        "validation batches": 0 if on_gpu(config) else train.eval_batches * held_out,
        "probe": probe * positions(config) * (2 * vocab_size + 4 * d) * _FP32,
    }
    if train.spectral_penalty:
        # WᵀW of every matrix; further gradients, one bank of q, k, v or w1 at a time
        bank = max(3 * by_role.get("q", 0), by_role.get("w1", 0)) * _FP32
        terms["spectral penalty"] = 6 * by_role.get("q", 0) * _FP32 + 2 * bank
    has_snapshots, has_attribution = config.log.layers_every != 0, config.log.attribution_every != 0
    if has_snapshots or has_attribution:
        # θ_0, kept by the host; held over the step: the weights before it
        copies = weights * (has_snapshots + (not on_gpu(config)))
        after = 0
        if has_snapshots:  # further gradients and differences, the branches' outputs, and values of
            # some sublayers at a time, with the stream of all layers once more
            stream = probe * positions(config) * d * _FP32
            states = (4 * layers.all + 6 * min(layers.sublayers, SUBLAYERS_AT_A_TIME)) * stream
            if config.log.stream_update:  # x_l at θ_0, kept, and a difference
                copies, states = copies + layers.all * stream, states + layers.all * stream
            saved = saved_by_layers(config, probe, scheme_memory)
            after = 2 * weights + saved + states
            if config.log.noise_scale:  # a gradient; in double precision its rows and their sum
                after = max(after, 5 * trained + saved)
        if has_attribution:  # θ_t, and to first order the difference, zeros, and tangents of a part
            after = max(after, weights * (1 + 3 * config.log.first_order) + 2 * bank_bytes)
        during = terms["activations"] + terms["temporaries of the optimizer"]
        terms["snapshots and attribution"] = copies + max(0, after - during)
    if config.log.sharpness_every:
        # vectors in double precision with gradients, and the graph of a gradient
        graph = 4 * saved_by_layers(config, probe, scheme_memory)
        during = terms["activations"] + terms["temporaries of the optimizer"]
        terms["sharpness"] = max(0, 22 * trained + graph - during)
    return terms


def memory_estimate(
    config: Config,
    vocab_size: int = BYTES_VOCABULARY,
    scheme_memory: SchemeMemory = no_more,
    data: int = 0,
) -> int:
    """Return the bytes at the peak of a run: of the process on a CPU, of the memory of a GPU.

    scheme_memory: `deepstack.schemes.scheme_memory(config)`; without it, that of Pre-LN.
    data: bytes that the task holds in memory, `Task.memory`.

    On CPU, 0.92 to 1.16 of the measured peak over the eight shapes of benchmarks/memory.py.
    """
    return sum(memory_terms(config, vocab_size, scheme_memory, data).values())


def trained_parameters(config: Config, by_role: Mapping[str, int]) -> dict[str, int]:
    """Return the number of parameters by role of the roles that are trained."""
    chosen = config.train.trainable
    return {role: n for role, n in by_role.items() if chosen == "all" or role in chosen}


def moments(config: Config, by_role: Mapping[str, int]) -> int:
    """Bytes that the optimizer remembers of the parameters that are trained."""
    train, trained = config.train, trained_parameters(config, by_role)
    if train.optimizer == "sgd":
        return _FP32 * sum(trained.values()) * (train.momentum > 0)
    of_muon = MATRICES if train.optimizer == "muon" else ()
    return _FP32 * sum(n if role in of_muon else 2 * n for role, n in trained.items())


def disk_estimate(config: Config, vocab_size: int = BYTES_VOCABULARY) -> tuple[int, int]:
    """Bytes on the disk: of the finished run, and at the most while it is being trained.

    The first are its weights and logs, with runtime.keep_optimizer also the optimizer's state; the
    second are two checkpoints and the draft of a third.
    """
    by_role = parameter_count(config, vocab_size)
    weights = _FP32 * sum(by_role.values())
    logs = BYTES_PER_STEP * config.train.steps + 2**16
    if every := config.log.layers_every:
        steps = config.train.steps
        snapshots = 2 * math.log(steps + 1, 1.6) if every == "log" else steps / every
        logs += int(LAYER_FILES * _FP32 * layer_counts(config).all * (snapshots + 2))
    optimizer = moments(config, by_role)
    checkpoint = (optimizer + logs) * config.runtime.keep_optimizer
    return weights + logs + checkpoint, 3 * (weights + optimizer + logs) + logs


def recompute_every(config: Config) -> int:
    """Return after how many layers the stream is kept, the rest being computed again; 0: all.

    'auto' looks at the estimate of Pre-LN and at the memory of this machine.  The choice changes no
    number that a run logs.
    """
    chosen = config.runtime.recompute_every
    if chosen != "auto":
        return chosen
    keeping = config.runtime.model_copy(update={"recompute_every": 0})
    needed = memory_estimate(config.model_copy(update={"runtime": keeping}))
    short = not on_gpu(config) and needed > machine_memory()
    return math.isqrt(layer_counts(config).all) if short else 0


def activations(config: Config, scheme_memory: SchemeMemory) -> int:
    """Return the bytes kept for the backward pass: of all layers, or of those not recomputed."""
    layers, every = layer_counts(config).all, recompute_every(config)
    batch = config.train.batch_size
    saved = saved_by_layers(config, batch, scheme_memory)
    if not every or every >= layers:
        return saved
    return -(-layers // every) * stack_sizes(config, batch)[0].stream + every * saved // layers


def saved_by_layers(config: Config, batch: int, scheme_memory: SchemeMemory) -> int:
    """Return the bytes that all eager layers keep for the backward pass of a batch."""
    model, n = config.model, config.task.seq_len
    matmul = 2 if config.train.precision == "bf16" else _FP32  # of a number in a matrix product
    stream, hidden = batch * n * model.d_model, batch * n * width_inside(config)
    norm_output = NORM_KINDS[model.norm.kind].keeps_output  # for the gradient of the gain
    dropout = model.dropout > 0
    # of either sublayer: the norm's input (stream plus branch), mean and reciprocal deviation, the
    # norm's output, and the mask of dropout
    common = _FP32 * (stream * (1 + norm_output + dropout) + 2 * batch * n)
    # input; queries, keys and values; output; the logarithm of each softmax's sum
    attention = common + 5 * stream * matmul + batch * model.n_heads * n * _FP32
    if model.qk_norm or model.positions == "rotary":  # queries and keys once more
        attention += 2 * stream * _FP32 * (1 + norm_output)
    if dropout:  # no fused kernel: attention weights before and after it, and its mask
        attention += 3 * batch * model.n_heads * n * n * _FP32
    # input; hidden values after and before the activation: gelu needs these, and relu leaves a hole
    # of their size, which the allocator fills only in part; under a gate another half, and both
    feed_forward = common + (stream + 2 * hidden * (1 + model.gated)) * matmul
    layers = layer_counts(config)  # cross-attention keeps as much as self-attention
    saved = layers.all * (attention + feed_forward) + layers.cross * attention
    return saved + sum(map(scheme_memory, stack_sizes(config, batch)))


def stack_sizes(config: Config, batch: int) -> list[StackSizes]:
    """Return the sizes of the stack of a configuration, or of both, for a batch."""
    model, layers = config.model, layer_counts(config)
    stacks = [(layers.depth, 2 * layers.depth), (layers.decoder, 2 * layers.decoder + layers.cross)]
    common = batch, config.task.seq_len, model.n_heads, model.d_model, _replayed(config)
    return [StackSizes(depth, sublayers, *common) for depth, sublayers in stacks if depth]


def _replayed(config: Config) -> bool:
    """Whether a step is replayed on a CPU, as far as one can tell without torch."""
    replay, enough = config.runtime.replay, config.train.steps >= FEW_STEPS
    return not on_gpu(config) and (enough if replay == "auto" else replay)


def on_gpu(config: Config) -> bool:
    """Whether the run would take a GPU, as far as one can tell without torch."""
    if config.runtime.device != "auto":
        return config.runtime.device == "cuda"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    return Path("/dev/nvidiactl").exists() and not hidden


def refuse_absurd(config: Config, scheme_memory: SchemeMemory = no_more) -> None:
    """Raise ConfigError, with the estimate, for a run that cannot fit into this machine.

    The error's key is the size that is furthest above its default.  A run a little too large is let
    through: a GPU may have more memory than the machine.
    """
    memory = max(machine_memory(), GPU_BYTES if on_gpu(config) else 0)
    needed = memory_estimate(config, scheme_memory=scheme_memory)
    if needed <= ABSURD * memory:
        return
    usual = Config()
    sizes = {key: int(attrgetter(key)(config) or 0) for key in SIZES}  # None: follows another key
    if "d_ff" not in config.model.model_fields_set:
        del sizes["model.d_ff"]
    key = max(sizes, key=lambda key: sizes[key] / (attrgetter(key)(usual) or usual.model.depth))
    raise ConfigError(
        f"{key}: found {sizes[key]}, a run of about {format_bytes(needed)}; "
        f"allowed what fits into {format_bytes(memory)}",
        key=key,
    )


def format_bytes(size: float) -> str:
    """Return a size in bytes as text: '3.2 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.0f} PiB"
