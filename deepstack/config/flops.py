"""FLOPs of a training step from its configuration, two for each multiply-add.  No torch.

Matrix products count, and the products that a scheme states; norms, activations, softmax, lookups
and the optimizer do not.  With T = batch * seq tokens of a stack, n = seq and d = d_model, a
forward pass has these multiply-adds:

| part                        | multiply-adds                                        |
|-----------------------------|------------------------------------------------------|
| q, k, v, o                  | 4 T d² in each attention; 5 T d² in a merged one;    |
|                             | 6 T d² in an average                                 |
| logits and weighted values  | 2 T n d in each attention; a causal one counts all   |
|                             | n, an average none                                   |
| w1, w2, and w3 of a gate    | T d d_ff each                                        |
| head                        | T d vocab; T d² more with BERT's                     |
| scheme                      | what `Scheme.extra_flops` states                     |

The backward pass has twice as many: one product for the gradient of each factor.  A matrix that is
not trained needs none for its own gradient.
"""

from collections.abc import Callable
from typing import NamedTuple

from deepstack.config.estimate import (
    StackSizes,
    layer_counts,
    parameter_count,
    recompute_every,
    stack_sizes,
)
from deepstack.config.roles import MATRICES
from deepstack.config.schema import Config

SchemeFlops = Callable[[StackSizes], int]
"""FLOPs of a scheme's own products in a forward pass of a stack."""


class StepFlops(NamedTuple):
    """The FLOPs of a training step, part by part.

    forward, backward: of the training batch.  recompute: the layers' second forward pass with
    `runtime.recompute_every`.  probe: the forward pass of the probe batch after the update.
    """

    forward: int
    backward: int
    recompute: int
    probe: int

    @property
    def step(self) -> int:
        """Forward and backward pass of the training batch: the FLOPs of `train.flops`."""
        return self.forward + self.backward

    @property
    def total(self) -> int:
        """Every part: also the recomputed layers and the probe."""
        return sum(self)


def step_flops(config: Config, vocab_size: int, scheme_flops: SchemeFlops) -> StepFlops:
    """Return the FLOPs of a training step.

    scheme_flops: `deepstack.schemes.scheme_flops(config)`.
    """
    batch, d = config.train.batch_size, config.model.d_model
    tokens = batch * config.task.seq_len
    layers = layer_flops(config, batch, scheme_flops)
    head = {"embedding": 2 * tokens * d * vocab_size}
    if config.model.head == "separate":
        head = {"head": head["embedding"]}
    elif config.model.head == "bert":
        head["head"] = 2 * tokens * d * d
    trained = config.train.trainable
    by_role = [*layers.items(), *head.items()]
    forward = sum(flops for _, flops in by_role)
    # "" names products without a matrix of parameters
    learnt = sum(flops for role, flops in by_role if trained == "all" or role in ("", *trained))
    of_layers = sum(layers.values())
    probe = layer_flops(config, config.log.probe_sequences, scheme_flops)
    recompute = of_layers if recompute_every(config) else 0
    return StepFlops(forward, forward + learnt, recompute, sum(probe.values()))


def layer_flops(config: Config, batch: int, scheme_flops: SchemeFlops) -> dict[str, int]:
    """Return the FLOPs of a forward pass of all layers by role, and under "" those of no role."""
    tokens, seq, d = batch * config.task.seq_len, config.task.seq_len, config.model.d_model
    layers, attention = layer_counts(config), config.model.decoder_attention
    numbers = parameter_count(config, vocab_size=0)
    products = {role: 2 * tokens * numbers.get(role, 0) for role in MATRICES}
    if attention == "merged":  # values of the decoder's stream, and of the encoder's output
        products["v"] += layers.decoder * 2 * tokens * d * d
    attentions = layers.all + layers.cross - layers.decoder * (attention == "average")
    scheme_part = sum(map(scheme_flops, stack_sizes(config, batch)))
    return products | {"": attentions * 4 * tokens * seq * d + scheme_part}
