"""Compares the numbers of this working tree with another commit's, byte for byte.

    python tests/golden.py --base COMMIT [--only TEXT] [--keep FOLDER]

Trains the same short runs with both versions on this machine and compares every log, every
per-layer file and the final weights.  Nothing is stored between calls, because the last bits
depend on the processor.  Exit status 1 if anything differs.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path

BASE = """
model: {scheme: deepnorm, depth: 4, d_model: 32, n_heads: 2, d_ff: 64}
task: {name: text, seq_len: 16}
train: {steps: 12, batch_size: 4, eval_every: 6, eval_batches: 2, warmup_steps: 3, lr: 3.0e-3}
log: {layers_every: 4, probe_sequences: 2}
runtime: {device: cpu, threads: 1}
"""

# Each run changes the settings above; '+' separates two settings.
RUNS = {
    "eager": "runtime.fused=false + runtime.replay=false",
    "eager_without_banks": "runtime.fused=false + runtime.replay=false + runtime.banks=false",
    "fused": "runtime.replay=false",
    "replayed": "runtime.replay=true",
    "replayed_by_default": "train.steps=60 + log.layers_every=20",
    "records_replayed": "train.steps=60 + model.norm.kind=rms",
    "probe_as_large_as_batch": "log.probe_sequences=4 + runtime.replay=true",
    "recomputed": "runtime.recompute_every=2",
    "recomputed_replayed": "runtime.recompute_every=2 + runtime.replay=true",
    "sgd": "train.optimizer=sgd + train.momentum=0.9 + train.lr=0.05",
    "adam_without_clip": "train.optimizer=adam + train.clip=null + train.schedule=cosine",
    "muon": "train.optimizer=muon + train.weight_decay=0.1 + runtime.replay=true",
    "weight_decay": "train.weight_decay=0.1 + runtime.replay=true",
    "lr_factors": "train.lr_factors.w1=0.5 + train.lr_factors.norm_gain=2",
    "trainable": "train.trainable=[q,v,w1] + runtime.replay=true",
    "decoder": "model.family=decoder + runtime.replay=true",
    "encoder_decoder": "model.family=encoder_decoder + model.decoder_depth=3 + task.name=reverse",
    "merged_attention": "model.scheme=pre_ln + model.family=encoder_decoder + task.name=markov"
    " + model.decoder_attention=merged",
    "copy": "task.name=copy + model.family=encoder_decoder",
    "markov": "task.name=markov + model.family=decoder",
    "rms": "model.norm.kind=rms + runtime.replay=true",
    "batch_norm": "model.norm.kind=batch + runtime.replay=true",
    "dynamic_tanh": "model.norm.kind=dynamic_tanh + runtime.replay=true",
    "gated": "model.gated=true + model.activation=silu + model.bias=false + runtime.replay=true",
    "rotary": "model.positions=rotary + model.qk_norm=true + runtime.replay=true",
    "sinusoidal": "model.positions=sinusoidal + model.head=bert + model.activation=gelu",
    "dropout": "model.dropout=0.1",
    "dropout_replayed": "model.dropout=0.1 + runtime.replay=true",
    "ntk": "model.init.distribution=ntk",
    "fan_in": "model.init.distribution=xavier_uniform + model.init.fan=in",
    "orthogonal": "model.init.distribution=orthogonal + model.head=separate",
    "spectral_penalty": "train.spectral_penalty=0.1",
    "attribution": "log.attribution_every=6 + log.first_order=true + log.skipped_layers=2",
    "instruments": "log.sharpness_every=6 + log.noise_scale=true + log.jacobian=true"
    " + log.stream_update=true",
    "bf16": "train.precision=bf16",
    "ngpt_replayed": "model.scheme=ngpt + model.gated=true + runtime.replay=true",
    "hyper_connections_replayed": "model.scheme=hyper_connections + runtime.replay=true",
    "admin_decoder": "model.scheme=admin + model.family=decoder",
    "branch_norm_replayed": "model.scheme=branch_norm + runtime.replay=true",
    "diverged": "model.scheme=post_ln + train.lr=1e6 + train.optimizer=sgd + train.clip=null",
    "resumed": "train.steps=14",
    "resumed_replayed": "train.steps=14 + runtime.replay=true + model.dropout=0.1",
}
STOP_AFTER = 7  # the step after which a run named 'resumed…' is stopped and resumed


def runs(only: str) -> Iterator[tuple[str, list[str]]]:
    """Name and settings of every run: those above, and each scheme on its own."""
    import deepstack

    every = dict(RUNS)
    for name, scheme in deepstack.schemes.SCHEMES.items():
        every[f"scheme_{name}"] = settings = f"model.scheme={name}"
        if "encoder_decoder" in scheme.families:
            every[f"scheme_{name}_encoder_decoder"] = f"{settings} + model.family=encoder_decoder"
    for name, settings in every.items():
        if only in name:
            yield name, settings.split(" + ")


def record(folder: Path, only: str) -> None:
    """Train every run into the folder with the deepstack that Python imports here."""
    import deepstack

    try:
        errors = import_module("deepstack.base.errors")
    except ModuleNotFoundError:  # before the package was divided
        errors = import_module("deepstack.errors")
    base = folder / "base.yaml"
    base.write_text(BASE, "utf-8")
    replay = type(deepstack.load_config(base).runtime).model_fields["replay"]
    by_torch = "python" in str(replay.annotation)  # C++ kernels equal torch's to rounding only
    for name, settings in runs(only):
        config = deepstack.load_config(base, settings)
        steps, replayed = config.train.steps, config.runtime.replay
        if by_torch and (replayed is True or (replayed == "auto" and steps >= 50)):
            config = deepstack.load_config(base, [*settings, "runtime.replay=python"])
        stops = [None] * (STOP_AFTER - 1) + [signal.SIGINT]
        try:
            if name.startswith("resumed"):
                with suppress(errors.Interrupted):
                    deepstack.train(config, study=name, out=folder, stop=partial(stops.pop, 0))
            deepstack.train(config, study=name, out=folder)
        except errors.ConfigError as error:  # a refusal is compared as well
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "refused.csv").write_text(str(error), "utf-8")


def compared_files(folder: Path) -> dict[str, Path]:
    """The files with numbers, by study and path inside of the run."""
    found = {}
    for path in folder.glob("*/**/*"):
        if path.suffix in (".csv", ".npy", ".safetensors") and path.name != "timing.csv":
            study, *inside = path.relative_to(folder).parts
            found["/".join([study, *(inside[1:] or inside)])] = path
    return found


def differences(base: Path, tree: Path) -> Iterator[str]:
    """One line per file that only one version wrote, or that differs."""
    old, new = compared_files(base), compared_files(tree)
    for name in sorted(old.keys() ^ new.keys()):
        yield f"{name}: only {'this tree' if name in new else 'the base'} has it"
    for name in sorted(old.keys() & new.keys()):
        if old[name].read_bytes() != new[name].read_bytes():
            yield f"{name}: {first_difference(old[name], new[name])}"


def first_difference(one: Path, other: Path) -> str:
    """The first line of a text that differs."""
    if one.suffix != ".csv":
        return "other bytes"
    pairs = zip(one.read_text().splitlines(), other.read_text().splitlines(), strict=False)
    return next((f"\n    {a}\n    {b}" for a, b in pairs if a != b), "another length")


def main() -> int:
    """Record both versions, one a core, and print every difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="the commit to compare with")
    parser.add_argument("--only", default="", help="only runs whose name contains this")
    parser.add_argument("--keep", type=Path, help="leave the run folders here")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.record:
        record(given.record, given.only)
        return 0
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        worktree = Path(temporary) / "worktree"
        git = ["git", "-C", str(root), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(worktree), given.base], check=True)
        try:
            processes = []
            for name, tree in (("base", worktree), ("tree", root)):
                (folder / name).mkdir(parents=True)
                command = [
                    sys.executable,
                    __file__,
                    "--only",
                    given.only,
                    "--record",
                    folder / name,
                ]
                environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
                processes.append(subprocess.Popen(command, env=environment, cwd=tree))
            if any([process.wait() for process in processes]):
                return 1
        finally:
            subprocess.run([*git, "remove", "--force", str(worktree)], check=True)
        lines = list(differences(folder / "base", folder / "tree"))
        count = len(compared_files(folder / "tree"))
    print("\n".join([*lines, f"{count} files compared, {len(lines)} differ"]))
    return int(bool(lines) or not count)


if __name__ == "__main__":
    sys.exit(main())
