"""JAX as a peer: equal layers stacked and scanned, one jitted step, optax."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.peers.peers import PeerTrainer, Shape, ShapeError, TrainStep, peer
from deepstack import config as conf
from deepstack.tasks import IGNORE
from deepstack.training import choose_threads

Parameters = dict[str, Any]


@peer("jax", label="JAX", package="jax", torch=False)
def jax_encoder(shape: Shape) -> PeerTrainer:
    """JAX: Post-LN layers in lax.scan, one jitted step with donated buffers, optax's optimizer."""
    if shape.dropout:
        raise ShapeError("its function has no dropout")
    ends = shape.vocab_size * (shape.d_model * (2 - shape.tied) + 1)
    vectors = shape.depth * (9 * shape.d_model + shape.d_ff)
    parameters = shape.in_matrices + vectors + ends + shape.seq_len * shape.d_model
    return PeerTrainer(parameters, shape.in_matrices, partial(start, shape))


def start(shape: Shape, config: conf.Config) -> TrainStep:
    """Return the jitted training step of this shape under a run's settings."""
    jax = import_jax(config)
    optax = importlib.import_module("optax")
    optimizer = optimizer_of(optax, config.train)
    bf16 = config.train.precision == "bf16"
    half = jax.numpy.bfloat16 if bf16 else jax.numpy.float32

    def mean_loss(parameters: Parameters, inputs: Any, targets: Any) -> Any:
        logits = logits_of(jax, shape, parameters, inputs, half)
        predicted = targets != IGNORE
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets * predicted)
        return (losses * predicted).sum() / predicted.sum()

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(parameters: Parameters, state: Any, inputs: Any, targets: Any) -> Any:
        loss, gradients = jax.value_and_grad(mean_loss)(parameters, inputs, targets)
        changes, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, changes), state, loss

    parameters = initial(jax, shape)
    state = optimizer.init(parameters)

    def train_step(inputs: Tensor, targets: Tensor) -> float:
        nonlocal parameters, state
        batch = inputs.numpy(), targets.numpy()
        parameters, state, loss = update(parameters, state, *batch)
        return float(loss)

    return train_step


def import_jax(config: conf.Config) -> Any:
    """Import JAX for the run's device, with the run's number of threads on a CPU."""
    if config.runtime.device != "cuda":
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax = importlib.import_module("jax")
        with few_processors(choose_threads(config)):
            jax.devices()
        return jax
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # other rows need the GPU's memory too
    jax = importlib.import_module("jax")
    if jax.default_backend() != "gpu":
        raise ShapeError("this JAX has no CUDA; pip install 'jax[cuda12]'")
    return jax


@contextmanager
def few_processors(count: int) -> Iterator[None]:
    """Let this process use `count` processors inside the block, and all of them afterwards.

    XLA starts a thread for every processor that the process may use, and has no other setting.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:count])
    try:
        yield
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), allowed)


def optimizer_of(optax: Any, train: conf.Train) -> Any:
    """Return optax's optimizer after clipping, with the settings of the run."""
    if train.optimizer == "muon":
        raise ShapeError("its function has no Muon")
    steps = [] if train.clip is None else [optax.clip_by_global_norm(train.clip)]
    decay = train.weight_decay
    if train.optimizer != "adamw":  # as torch's Adam and SGD, which add it to the gradient
        steps.append(optax.add_decayed_weights(decay))
        decay = 0.0
    if train.optimizer == "sgd":
        steps.append(optax.sgd(train.lr, momentum=train.momentum or None))
    else:
        b1, b2 = train.betas
        steps.append(optax.adamw(train.lr, b1=b1, b2=b2, eps=train.eps, weight_decay=decay))
    return optax.chain(*steps)


def initial(jax: Any, shape: Shape) -> Parameters:
    """Return the parameters: of all layers stacked, (depth, ...), and of embedding and output."""
    n, d, f, vocab = shape.depth, shape.d_model, shape.d_ff, shape.vocab_size
    sizes = {"qkv": (d, 3 * d), "o": (d, d), "w1": (d, f), "w2": (f, d)}
    ends = {"token": (vocab, d), "position": (shape.seq_len, d)}
    if not shape.tied:
        ends["head"] = (vocab, d)
    keys = iter(jax.random.split(jax.random.key(0), len(sizes) + len(ends)))
    normal, zeros = jax.random.normal, jax.numpy.zeros
    layers = {name: 0.02 * normal(next(keys), (n, *size)) for name, size in sizes.items()}
    layers |= {f"{name}_bias": zeros((n, size[1])) for name, size in sizes.items()}
    for norm in ("norm1", "norm2"):
        layers |= {f"{norm}_gain": jax.numpy.ones((n, d)), f"{norm}_bias": zeros((n, d))}
    outside = {name: 0.02 * normal(next(keys), size) for name, size in ends.items()}
    return outside | {"head_bias": zeros(vocab), "layers": layers}


def logits_of(jax: Any, shape: Shape, parameters: Parameters, tokens: Any, half: Any) -> Any:
    """Return the logits, (batch, seq, vocab), in fp32; products in the precision `half`."""
    jnp = jax.numpy
    activation = (
        jax.nn.relu if shape.activation == "relu" else partial(jax.nn.gelu, approximate=False)
    )

    def norm(x: Any, gain: Any, bias: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        variance = jnp.square(x - mean).mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + shape.eps) * gain + bias

    def linear(x: Any, layer: Parameters, name: str) -> Any:
        return x @ layer[name].astype(half) + layer[f"{name}_bias"].astype(half)

    def run_layer(x: Any, layer: Parameters) -> tuple[Any, None]:
        batch, seq, d = x.shape
        heads = linear(x.astype(half), layer, "qkv").reshape(batch, seq, 3, shape.n_heads, -1)
        q, k, v = (heads[:, :, i] for i in range(3))
        attended = jax.nn.dot_product_attention(q, k, v).reshape(batch, seq, d)
        x = norm(x + linear(attended, layer, "o"), layer["norm1_gain"], layer["norm1_bias"])
        hidden = activation(linear(x.astype(half), layer, "w1"))
        x = norm(x + linear(hidden, layer, "w2"), layer["norm2_gain"], layer["norm2_bias"])
        return x, None

    x = parameters["token"][tokens] + parameters["position"]
    x, _ = jax.lax.scan(run_layer, x, parameters["layers"])
    table = parameters["token" if shape.tied else "head"]
    logits = x.astype(half) @ table.astype(half).T + parameters["head_bias"].astype(half)
    return logits.astype(jnp.float32)
