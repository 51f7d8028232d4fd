"""Time of one training step: deepstack with ‖ΔF‖ logged, beside nn.TransformerEncoder without.

python benchmarks/step_time.py [--depth 1000] [--d-model 64] [--rounds 7]

Both have the same shape (d_ff 4 d_model, batch 8, sequences of 32, AdamW, clipping at 1, fp32) and
take turns, so that whatever else the machine does hits both alike.  One CPU thread.  deepstack's
step is everything that `deepstack train` does for a row of steps.csv: batch, update, probe, row.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from deepstack.config import Config, with_overrides
from deepstack.tasks import build_task
from deepstack.training import mean_loss, timed_steps, to_device

HEADS, BATCH, SEQ, VOCAB = 2, 8, 32, 257


class Reference(nn.Module):
    """Embedding, nn.TransformerEncoder (Post-LN) and an output layer."""

    def __init__(self, depth: int, d_model: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            d_model, HEADS, 4 * d_model, dropout=0.0, batch_first=True
        )
        self.embedding = nn.Embedding(VOCAB, d_model)
        self.stack = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(d_model, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.stack(self.embedding(tokens)))


def reference_step(depth: int, d_model: int) -> Callable[[Tensor, Tensor], None]:
    """zero_grad, forward, backward, clip, AdamW, as anyone would write them."""
    model = Reference(depth, d_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        mean_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def main() -> None:
    """Print the median of each and of their ratio, with machine and versions."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--depth", type=int, default=1000)
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scheme", default="post_ln")
    given = parser.parse_args()
    config = with_overrides(
        Config(),
        {
            "model.depth": given.depth,
            "model.d_model": given.d_model,
            "model.n_heads": HEADS,
            "model.scheme": given.scheme,
            "task.seq_len": SEQ,
            "train.batch_size": BATCH,
            "train.steps": given.rounds + 2,
            "train.lr": 1e-4,
            "log.probe_sequences": 1,
            "runtime.threads": 1,
            "runtime.device": "cpu",
        },
    )
    theirs = reference_step(given.depth, given.d_model)
    times: dict[str, list[float]] = {"reference": [], "deepstack": [], "of which probe": []}
    task = build_task("text", {}, seq_len=SEQ, seed=0)
    for number, ours in enumerate(timed_steps(config), start=1):
        inputs, targets = to_device(task.train_batch(number, BATCH), torch.device("cpu"))
        began = time.perf_counter()
        theirs(inputs, targets)
        reference = time.perf_counter() - began
        if number > 2:  # the first two touch fresh memory
            times["deepstack"].append(ours.total)
            times["of which probe"].append(ours.probe)
            times["reference"].append(reference)
    ratios = [a / b for a, b in zip(times["deepstack"], times["reference"], strict=True)]
    print(f"{platform.machine()}, torch {torch.__version__}, one thread, {given.rounds} rounds")
    print(f"depth {given.depth}, d_model {given.d_model}, batch {BATCH} x {SEQ}, AdamW, fp32")
    for name, values in times.items():
        low, high = min(values), max(values)
        print(f"{name:<16} {statistics.median(values):.3f} s/step ({low:.3f} to {high:.3f})")
    print(
        f"deepstack / nn.TransformerEncoder: {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
