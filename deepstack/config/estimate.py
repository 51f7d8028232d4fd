"""Estimates of a run from its configuration: parameters, memory and disk."""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from pathlib import Path

from deepstack.base.errors import ConfigError
from deepstack.base.kinds import definition_of
from deepstack.base.text import bytes_text
from deepstack.config.instruments import MeasurementSizes, specs
from deepstack.config.machine import cores, machine_memory
from deepstack.config.roles import MATRICES
from deepstack.config.schema import Config, Train
from deepstack.config.sizes import (
    FP32,
    StackSizes,
    chunk_rows,
    layer_counts,
    norm_size,
    parameter_count,
    width_inside,
)
from deepstack.config.validation import validation_sequences

# the vocabulary of a text of bytes; other tasks' are smaller or not much larger
BYTES_VOCABULARY = 257
# Measured: a process after the import of torch and one step of a small model; and the modules of a
# layer with the graph or list of its operations, without results
PROCESS_BYTES = 320 * 2**20
LAYER_OVERHEAD = 240 * 2**10
# Measured: the modules that the first call of torch's `checkpoint` imports.
RECOMPUTING_BYTES = 78 * 2**20
# rows of steps.csv and timing.csv; files below layers/, most diagnostics having two
BYTES_PER_STEP = 160
LAYER_FILES = 60
# Steps from which on `auto` replays them: recording one takes as long as twenty replayed ones save.
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
    target_len: int | None = None,
) -> dict[str, int]:
    """Return the bytes at the peak of a run, term by term: of a training step, or of a snapshot."""
    train, layers, d = config.train, layer_counts(config), config.model.d_model
    by_role = parameter_count(config, vocab_size)
    weights = sum(by_role.values()) * FP32
    trained = sum(trained_parameters(config, by_role).values()) * FP32
    bank_bytes = max(by_role.get(role, 0) for role in ("q", "w1")) * FP32
    probe = config.log.probe_sequences
    lengths = [stack.seq for stack in stack_sizes(config, probe, target_len)]
    sequences, every = sequences_at_once(config), recompute_every(config)
    tokens, predicted = sequences * sum(lengths), sequences * lengths[-1]
    # int64 tokens and targets of a batch, and whether they are masked
    held_out = 8 * sum(lengths) + 9 * lengths[-1]
    held_out *= validation_sequences(config, sum(lengths), predicted_positions(config, lengths[-1]))
    terms = {
        "Python and torch": 0 if on_gpu(config) else process_bytes(every),
        "data": 0 if on_gpu(config) else data,
        "weights": weights,
        "gradients": trained * parts_at_once(config),
        "optimizer moments": moments(config, by_role),
        "temporaries of the optimizer": (1 if train.optimizer == "sgd" else 2) * bank_bytes,
        "modules and graph": layers.all * LAYER_OVERHEAD,
        "activations": activations(config, every, scheme_memory, target_len),
        "gradients of activations": 3 * tokens * max(width_inside(config), 3 * d) * FP32,
        "logits, their softmax and their gradient": head_memory(config, predicted, vocab_size),
        "validation batches": 0 if on_gpu(config) else held_out,
        "probe": probe * (2 * lengths[-1] * vocab_size + 4 * sum(lengths) * d) * FP32,
    }
    if train.spectral_penalty:
        # WᵀW of every matrix; further gradients, one bank of q, k, v or w1 at a time
        bank = max(3 * by_role.get("q", 0), by_role.get("w1", 0)) * FP32
        terms["spectral penalty"] = 6 * by_role.get("q", 0) * FP32 + 2 * bank
    active = [spec for spec in specs().values() if spec.interval(config.log)]
    with_snapshots = [spec for spec in active if spec.is_part_of_snapshots]
    during = terms["activations"] + terms["temporaries of the optimizer"]
    saved = saved_by_layers(config, probe, scheme_memory, target_len)
    measured = MeasurementSizes(weights, trained, bank_bytes, saved)
    if config.log.layers_every != 0 or with_snapshots:
        copies, after = snapshot_terms(config, measured, target_len)
        after = max([after, *(spec.memory(measured) for spec in with_snapshots)])
        terms["snapshots and attribution"] = copies + max(0, after - during)
    for spec in active:
        if not spec.is_part_of_snapshots:
            terms[spec.name] = max(0, spec.memory(measured) - during)
    return terms


def snapshot_terms(
    config: Config, measured: MeasurementSizes, target_len: int | None = None
) -> tuple[int, int]:
    """Return the bytes of copies that snapshots keep over a step, and of a snapshot while it lasts.

    The copies are θ_0, which the host keeps, and for snapshots the weights before the step.
    """
    has_snapshots = config.log.layers_every != 0
    copies = measured.weights * (has_snapshots + (not on_gpu(config)))
    if not has_snapshots:
        return copies, 0
    # Further gradients and differences, the branches' outputs, and values of some sublayers at a
    # time, with the stream of all layers once more
    layers = layer_counts(config)
    sizes = stack_sizes(config, config.log.probe_sequences, target_len)
    streams = sum(stack.depth * stack.stream for stack in sizes)
    at_a_time = min(layers.sublayers, SUBLAYERS_AT_A_TIME)
    states = 4 * streams + 6 * at_a_time * max(stack.stream for stack in sizes)
    if config.log.stream_update:  # x_l at θ_0, kept, and a difference
        copies, states = copies + streams, states + streams
    return copies, 2 * measured.weights + measured.saved + states


def process_bytes(every: int) -> int:
    """Return the bytes of a process that trains, beside its tensors.

    every: after how many layers the stream is kept, `recompute_every`.
    """
    return PROCESS_BYTES + RECOMPUTING_BYTES * (every > 0)


def predicted_positions(config: Config, length: int | None = None) -> int:
    """Return about how many positions of a sequence a task predicts: those that it masks.

    length: of the target; None: seq_len.
    """
    length = length or config.task.seq_len
    rate = config.task.options().get("mask_rate", 0.15)
    is_masked = config.model.family == "encoder" and isinstance(rate, int | float)
    return max(1, round(min(rate, 1) * length)) if is_masked else length


def head_memory(config: Config, predicted: int, vocab_size: int) -> int:
    """Return the bytes of the logits of so many positions and of the tensors beside them.

    In chunks these are nine tensors of a chunk (benchmarks/memory.py --head), the gradient of the
    hidden states, and the gradient of the head's matrix before it is added.
    """
    rows, d = chunk_rows(predicted, vocab_size), config.model.d_model
    if rows is None:
        return 3 * predicted * vocab_size * FP32
    return (9 * rows * vocab_size + predicted * d + vocab_size * (d + 1)) * FP32


def memory_estimate(
    config: Config,
    vocab_size: int = BYTES_VOCABULARY,
    scheme_memory: SchemeMemory = no_more,
    data: int = 0,
    target_len: int | None = None,
) -> int:
    """Return the bytes at the peak of a run: of the process on a CPU, of the memory of a GPU.

    scheme_memory: `deepstack.schemes.scheme_memory(config)`; without it, Pre-LN's.
    data: bytes that the task holds in memory, `Task.memory`.
    target_len: positions of the decoder that reads an encoder, `Task.target_len`; without it,
        seq_len, the most that deepstack's own tasks have.

    On CPU, 0.92 to 1.16 of the measured peak over the eight shapes of benchmarks/memory.py.
    """
    return sum(memory_terms(config, vocab_size, scheme_memory, data, target_len).values())


def trained_parameters(config: Config, by_role: Mapping[str, int]) -> dict[str, int]:
    """Return the number of parameters by role of the roles that are trained."""
    chosen = config.train.trainable
    return {role: n for role, n in by_role.items() if chosen == "all" or role in chosen}


def moments(config: Config, by_role: Mapping[str, int]) -> int:
    """Bytes that the optimizer remembers of the parameters that are trained."""
    train, trained = config.train, trained_parameters(config, by_role)
    if train.optimizer == "sgd":
        return FP32 * sum(trained.values()) * (train.momentum > 0)
    if state := getattr(definition_of(config, "train.optimizer"), "state", ()):
        return FP32 * len(state) * sum(trained.values())
    of_muon = MATRICES if train.optimizer == "muon" else ()
    return FP32 * sum(n if role in of_muon else 2 * n for role, n in trained.items())


def disk_estimate(config: Config, vocab_size: int = BYTES_VOCABULARY) -> tuple[int, int]:
    """Bytes on the disk: of the finished run, and at the most while it is being trained.

    The first are its logs and, with runtime.keep_final_weights, its weights, with
    runtime.keep_optimizer also the optimizer's state; the second are two checkpoints and the draft
    of a third.
    """
    by_role = parameter_count(config, vocab_size)
    weights = FP32 * sum(by_role.values())
    kept = weights * count_kept(config.train)
    logs = BYTES_PER_STEP * config.train.steps + 2**16
    if every := config.log.layers_every:
        steps = config.train.steps
        snapshots = 2 * math.log(steps + 1, 1.6) if every == "log" else steps / every
        logs += int(LAYER_FILES * FP32 * layer_counts(config).all * (snapshots + 2))
    optimizer = moments(config, by_role)
    checkpoint = (optimizer + logs) * config.runtime.keep_optimizer
    final = weights * config.runtime.keep_final_weights + logs + kept + checkpoint
    return final, 3 * (weights + optimizer + logs) + logs + kept


def count_kept(train: Train) -> int:
    """Return how many weights a run keeps before the last step; of 'log' about as many.

    A run of no steps keeps the weights of the start.
    """
    chosen, steps = train.keep_weights, max(1, train.steps)
    if isinstance(chosen, tuple):
        return len({step for step in chosen if step < steps})
    if chosen == "log":
        return math.ceil(math.log(steps + 1, 1.6)) + 1
    return math.ceil(steps / chosen) if chosen else 0


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


def parts_at_once(config: Config) -> int:
    """Return how many parts of a batch have gradients of their own: all shards in threads, or 1."""
    threads, shards = config.runtime.threads, config.train.shards
    if shards == 1 or config.model.dropout or not _replayed(config):
        return 1
    return shards if (cores() if threads == "auto" else threads) > 1 else 1


def sequences_at_once(config: Config) -> int:
    """Return the sequences whose activations are in memory at the same time."""
    return config.train.batch_size // config.train.parts * parts_at_once(config)


def activations(
    config: Config, every: int, scheme_memory: SchemeMemory, target_len: int | None = None
) -> int:
    """Return the bytes kept for the backward pass: of all layers, or of those not recomputed.

    every: after how many layers the stream is kept, `recompute_every`; 0: all are kept.
    """
    layers, batch = layer_counts(config).all, sequences_at_once(config)
    saved = saved_by_layers(config, batch, scheme_memory, target_len)
    if not every or every >= layers:
        return saved
    largest = max(stack.stream for stack in stack_sizes(config, batch, target_len))
    return -(-layers // every) * largest + every * saved // layers


def saved_by_layers(
    config: Config, batch: int, scheme_memory: SchemeMemory, target_len: int | None = None
) -> int:
    """Return the bytes that all eager layers keep for the backward pass of a batch."""
    model, d = config.model, config.model.d_model
    matmul = 2 if config.train.precision == "bf16" else FP32  # of a number in a matrix product
    norm_output = norm_size(config).keeps_output  # for the gradient of the gain
    dropout = model.dropout > 0

    def common(n: int) -> int:
        # of each sublayer: the norm's input (stream plus branch), mean and reciprocal deviation,
        # the norm's output, and the mask of dropout
        return FP32 * batch * n * (d * (1 + norm_output + dropout) + 2)

    def attention(n: int, m: int) -> int:
        # input, queries and output at n positions; keys and values of m; the logarithm of each
        # softmax's sum
        size = common(n) + batch * (3 * n + 2 * m) * d * matmul + batch * model.n_heads * n * FP32
        if model.qk_norm or model.positions == "rotary":  # queries and keys once more
            size += batch * (n + m) * d * FP32 * (1 + norm_output)
        if dropout:  # no fused kernel: attention weights before and after it, and its mask
            size += 3 * batch * model.n_heads * n * m * FP32
        return size

    def feed_forward(n: int) -> int:
        # input; hidden values after and before the activation: gelu needs these, and relu leaves a
        # hole of their size, which the allocator fills only in part; under a gate another half, and
        # both
        hidden = width_inside(config) * 2 * (1 + model.gated)
        return common(n) + batch * n * (d + hidden) * matmul

    stacks = stack_sizes(config, batch, target_len)
    saved = sum(s.depth * (attention(s.seq, s.seq) + feed_forward(s.seq)) for s in stacks)
    saved += layer_counts(config).cross * attention(stacks[-1].seq, stacks[0].seq)
    return saved + sum(map(scheme_memory, stacks))


def stack_sizes(config: Config, batch: int, target_len: int | None = None) -> list[StackSizes]:
    """Return the sizes of the stack of a configuration, or of both, for a batch.

    target_len: positions of the decoder that reads an encoder; None: seq_len.
    """
    model, layers, seq = config.model, layer_counts(config), config.task.seq_len
    common = model.n_heads, model.d_model, _replayed(config), width_inside(config)
    first = StackSizes(layers.depth, 2 * layers.depth, batch, seq, *common)
    if not layers.decoder:
        return [first]
    sublayers = 2 * layers.decoder + layers.cross
    return [first, StackSizes(layers.decoder, sublayers, batch, target_len or seq, *common)]


def _replayed(config: Config) -> bool:
    """Whether a step is replayed on a CPU, as far as one can tell without torch."""
    replay, enough = config.runtime.replay, config.train.steps >= FEW_STEPS
    return not on_gpu(config) and (enough if replay == "auto" else bool(replay))


def on_gpu(config: Config) -> bool:
    """Whether the run would take a GPU, as far as one can tell without torch."""
    if config.runtime.device != "auto":
        return config.runtime.device == "cuda"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    return Path("/dev/nvidiactl").exists() and not hidden


def numbers_at(keys: Iterable[str], config: Config) -> dict[str, int]:
    """Return the numbers at dotted keys; a key that follows another one, or 'auto', is left out."""
    values = {key: attrgetter(key)(config) for key in keys}
    return {key: value for key, value in values.items() if isinstance(value, int)}


def refuse_absurd(config: Config, scheme_memory: SchemeMemory = no_more) -> None:
    """Raise ConfigError, with the estimate, for a run that cannot fit into this machine.

    The error's key is the size that is furthest above its default.  A run a little too large is let
    through: a GPU may have more memory than the machine.
    """
    memory = max(machine_memory(), GPU_BYTES if on_gpu(config) else 0)
    needed = memory_estimate(config, scheme_memory=scheme_memory)
    if needed <= ABSURD * memory:
        return
    sizes, usual = (numbers_at(SIZES, one) for one in (config, Config()))
    if "d_ff" not in config.model.model_fields_set:
        sizes.pop("model.d_ff", None)
    usual |= {"model.decoder_depth": usual["model.depth"], "train.eval_batches": 4}
    key = max(sizes, key=lambda key: sizes[key] / usual[key])
    most = largest_size(
        config, key, lambda one: memory_estimate(one, scheme_memory=scheme_memory) <= memory
    )
    allowed = f"at most about {most}, which fits" if most else "less, so that it fits"
    raise ConfigError(
        f"{key}: found {sizes[key]}, a run of about {bytes_text(needed)}; "
        f"allowed {allowed} into {bytes_text(memory)}",
        key=key,
    )


def largest_size(config: Config, key: str, fits: Callable[[Config], bool]) -> int:
    """Return the largest size below the configuration's that fits, to two digits; 0 for none.

    key: of the size, as in model.depth.
    """
    section, name = key.split(".")
    inner = getattr(config, section)

    def with_size(size: int) -> Config:
        sizes = {name: size}
        if key == "model.d_model" and "d_ff" not in inner.model_fields_set:
            sizes["d_ff"] = 4 * size  # which follows
        return config.model_copy(update={section: inner.model_copy(update=sizes)})

    low, high = 0, int(getattr(inner, name))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(with_size(middle)) else (low, middle)
    step = 10 ** max(len(str(low)) - 2, 0)
    return low // step * step
