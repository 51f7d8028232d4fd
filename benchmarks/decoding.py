"""Times decoding with merged attention and with self- and cross-attention.

python benchmarks/decoding.py [--lengths 64,256,1024] [--layers 12] [--rounds 5]

Prints milliseconds a position, the median over the rounds, which take turns, and their ratio. The
weights are random: the output does not affect the time.
"""

import argparse
import statistics
import time

import torch

from deepstack.config import Config, with_overrides
from deepstack.model import build_model
from deepstack_lab.ledger import generate


def main() -> None:
    """Time both kinds at each length."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--lengths", default="64,256,1024")
    words.add_argument("--layers", type=int, default=12)
    words.add_argument("--d-model", type=int, default=256)
    words.add_argument("--batch", type=int, default=8)
    words.add_argument("--source", type=int, default=32)
    words.add_argument("--rounds", type=int, default=5)
    arguments = words.parse_args()
    torch.set_num_threads(1)
    print(
        f"{arguments.layers} decoder layers, d_model {arguments.d_model}, "
        f"batch {arguments.batch}, one thread"
    )
    for length in map(int, arguments.lengths.split(",")):
        models = {}
        for kind in ("separate", "merged"):
            keys = {
                "model.family": "encoder_decoder", "model.scheme": "post_ln", "model.depth": 2,
                "model.decoder_depth": arguments.layers, "model.d_model": arguments.d_model,
                "model.n_heads": 4, "model.decoder_attention": kind, "task.seq_len": length,
            }  # fmt: skip
            models[kind] = build_model(with_overrides(Config(), keys), vocab_size=257).model
        source = torch.randint(0, 257, (arguments.batch, arguments.source))
        begin = torch.zeros(arguments.batch, 1, dtype=torch.long)
        times: dict[str, list[float]] = {kind: [] for kind in models}
        for turn in range(arguments.rounds + 1):
            for kind, model in models.items():
                began = time.perf_counter()
                generate(model, begin, length, source=source)
                if turn:  # the first one warms up
                    times[kind].append((time.perf_counter() - began) / length * 1000)
        separate, merged = (statistics.median(times[kind]) for kind in ("separate", "merged"))
        each = [a / b for a, b in zip(times["separate"], times["merged"], strict=True)]
        print(
            f"length {length:>5}: separate {separate:6.2f} ms a position, merged {merged:6.2f}; "
            f"{statistics.median(each):.2f} times as fast ({min(each):.2f} to {max(each):.2f})"
        )


if __name__ == "__main__":
    main()
