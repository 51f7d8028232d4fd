"""FLOPs of a training step from its configuration, two for each multiply-add.  No torch.

Matrix products count, and the products that a scheme states; norms, activations, softmax, lookups
and the optimizer do not.  With T = batch * seq tokens of a stack, n = seq and d = d_model, a
forward pass has these multiply-adds:

| part                        | multiply-adds                                        |
|-----------------------------|------------------------------------------------------|
| q, k, v, o                  | 4 T d² in each attention; 5 T d² in a merged one     |
| logits and weighted values  | 2 T n d in each attention; a causal one counts all n |
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
    recompute_every,
    stack_sizes,
    width_inside,
)
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
    model, seq = config.model, config.task.seq_len
    d, tokens = model.d_model, batch * seq
    layers = layer_counts(config)
    every, cross, merged = layers.all, layers.cross, layers.decoder - layers.cross
    square, inside = 2 * tokens * d * d, 2 * tokens * d * width_inside(config)
    scheme_part = sum(map(scheme_flops, stack_sizes(config, batch)))
    return {
        **dict.fromkeys(("q", "k", "o"), every * square),
        "v": (every + merged) * square,  # of the decoder's stream, and of the encoder's output
        **dict.fromkeys(("cross_q", "cross_k", "cross_v", "cross_o"), cross * square),
        **dict.fromkeys(("w1", "w2"), every * inside),
        "w3": every * inside * model.gated,
        "": (every + cross) * 4 * tokens * seq * d + scheme_part,
    }
