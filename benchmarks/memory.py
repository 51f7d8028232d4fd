"""Compares the memory estimate of `deepstack check` with the measured peak of runs.

python benchmarks/memory.py

Each of nine shapes runs in its own process on the CPU: five steps of training, the last two
replayed, with snapshots, an evaluation and a checkpoint. The measured peak is the highest resident
set of the process, from timing.csv. The ratio should lie between 0.7 and 1.5.

python benchmarks/memory.py --micro-batches

The peaks of a batch of 4 sequences and of 16 such micro-batches, eager and replayed. The second
should be at most 1.02 of the first.

python benchmarks/memory.py --head

The memory that loss and backward pass of a head add, at 16,384 positions of width 512 and 50,257
tokens: in chunks, and at 2,048 positions with all logits. Hidden states, the head's matrix and its
gradient exist before; the gradient of the hidden states and all temporary tensors count.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from deepstack import config as conf
from deepstack.records import find_runs
from deepstack.tasks import task_of
from deepstack.training import memory_needed

ALL = (
    "runtime.device=cpu", "runtime.replay=true", "train.steps=5", "train.eval_every=5",
    "train.eval_batches=1",
)  # fmt: skip
SHAPES = (
    "model.depth=6",
    "model.depth=48 model.d_model=256 train.batch_size=8",
    "model.depth=200 train.batch_size=8 task.seq_len=32 train.optimizer=sgd",
    "model.depth=200 model.d_model=32 model.d_ff=64 runtime.banks=false",
    "model.depth=48 runtime.fused=false model.dropout=0.1 train.batch_size=32",
    "model.depth=24 model.family=encoder_decoder task.name=copy train.batch_size=16",
    "model.depth=24 model.family=encoder_decoder task.name=text train.batch_size=64",
    "model.depth=1000 model.d_model=32 model.d_ff=64 train.batch_size=4 task.seq_len=32",
    "model.depth=1000 runtime.recompute_every=32 train.batch_size=4 task.seq_len=32",
)


MICRO_BATCHES = (
    "model.depth=4 model.d_model=256 task.seq_len=64 log.layers_every=0 task.name=markov "
    "train.steps=3 train.eval_every=0"
)


def measure(settings: list[str], out: Path) -> tuple[float, float]:
    """Return (estimated, measured) bytes of a run with these settings."""
    config = conf.parse_config("", overrides=settings)
    file = out / "config.yaml"
    file.write_text(conf.to_yaml(config), encoding="utf-8")
    command = [sys.executable, "-m", "deepstack", "train", str(file), "--out", str(out), "-q"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (run,) = find_runs(out / conf.study_name(config, file))
    peak = run.timing["peak_memory_mb"].max() * 1e6
    return memory_needed(config, task_of(config)), float(peak)


def compare_micro_batches() -> None:
    """Print the peaks of one micro-batch and of 16, and their ratio."""
    print(f"{'1, MB':>10}{'16, MB':>10}{'ratio':>8}  runtime.replay")
    for replay in ("false", "python", "native"):
        peaks = []
        for count in (1, 16):
            parts = [f"train.batch_size={4 * count}", f"train.micro_batches={count}"]
            settings = [*ALL, *MICRO_BATCHES.split(), f"runtime.replay={replay}", *parts]
            with tempfile.TemporaryDirectory(prefix="deepstack-") as out:
                peaks.append(measure(settings, Path(out))[1] / 1e6)
        print(f"{peaks[0]:10.1f}{peaks[1]:10.1f}{peaks[1] / peaks[0]:8.3f}  {replay}", flush=True)


HEAD = """
import resource, sys
import torch
from deepstack.model.chunked_loss import ChunkedLoss
from deepstack.model.loss import mean_loss
from deepstack.model.transformer import SeparateHead
positions, chunked = int(sys.argv[1]), sys.argv[2] == "chunked"
vocab, d = 50_257, 512
head = SeparateHead(vocab, d)
head.weight, head.bias = (torch.nn.Parameter(torch.ones(s) / d) for s in ((vocab, d), (vocab,)))
for parameter in (head.weight, head.bias):
    parameter.grad = torch.ones_like(parameter)
final = torch.randn(1, positions, d, requires_grad=True)
targets = torch.randint(vocab, (1, positions))
small = torch.randn(1, 8, d, requires_grad=True)
mean_loss(small @ torch.randn(d, 9), targets[:, :8] % 9).backward()  # starts torch's libraries
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
if chunked:
    loss = ChunkedLoss(mean_loss, targets)(final, head, head.weight)
else:
    loss = mean_loss(head(final, head.weight), targets)
loss.backward()
print((peak() - before) * 1024 / 1e6)
"""


def measure_head() -> None:
    """Print the memory that the head's loss adds, in chunks and with all logits."""
    for positions, kind in ((2_048, "all"), (16_384, "chunked")):
        command = [sys.executable, "-c", HEAD, str(positions), kind]
        added = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        print(f"{positions:8,} positions, {kind:8} logits: {float(added):8.0f} MB", flush=True)


def main() -> None:
    """Print the table."""
    if sys.argv[1:] == ["--head"]:
        return measure_head()
    if sys.argv[1:] == ["--micro-batches"]:
        return compare_micro_batches()
    print(f"{'estimated MB':>14}{'measured MB':>14}{'ratio':>8}  settings")
    for shape in SHAPES:
        with tempfile.TemporaryDirectory(prefix="deepstack-") as out:
            estimated, peak = measure([*ALL, *shape.split()], Path(out))
        print(
            f"{estimated / 1e6:14.0f}{peak / 1e6:14.0f}{estimated / peak:8.2f}  {shape}", flush=True
        )


if __name__ == "__main__":
    main()
