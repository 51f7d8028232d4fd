"""Analyses of models that deepstack did not build: any PyTorch model, and Hugging Face folders."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deepstack import config as conf
from deepstack.depth_use.layered import Layered, Sample
from deepstack.depth_use.measure import MEASURES, Request, measure_all
from deepstack.depth_use.runs import HELD_OUT, TRAINING, draw
from deepstack.diagnostics.external_calls import Layers, find_module
from deepstack.diagnostics.external_layers import find_layers
from deepstack.errors import ConfigError, ResourceError
from deepstack.records import Analysis, RunFolder, sha256, write_analysis
from deepstack.tasks import task_of

NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
LAYERS = ("layers", "h", "blocks")
SEQUENCE, SEQUENCES = 128, 8
"""Tokens of a sequence (fewer if the model has fewer positions), and sequences in a batch."""

Head = str | Sequence[str] | Callable[[Tensor], Tensor]


def analyze_model(
    model: nn.Module,
    batch: Any,
    what: Sequence[str] = ("lens",),
    *,
    head: Head,
    targets: Tensor | None = None,
    layers: Layers = None,
    training: Any = None,
    **settings: Any,
) -> dict[str, Analysis]:
    """Analyze any PyTorch model whose layers pass on one stream; return name -> result.

    batch: as in `deepstack.probe`: model(batch), model(*batch) or model(**batch).  The model
    returns logits, (batch, seq, vocabulary), or an object with `logits`.
    what: names of analyses, see `deepstack list analyses`; they write nothing.
    head: what follows the last layer: the names of modules, applied in their order, as in
    ("transformer.ln_f", "lm_head"), or a function of the stream.
    targets: (batch, seq), the true token at each position, -100 where none is predicted; without
    them nothing is measured that needs a loss, and the lens covers all positions.
    layers: as in `deepstack.probe`, modules that take the stream first, and return it, or a tuple
    that begins with it.  training: a batch on which `linear` fits its maps.
    settings: every, top, probes, iterations, ridge, seed.

    Raises ConfigError unless the head of the last layer's output gives the model's logits.
    Restores modes and random states of the model; changes no parameter.
    """
    for name in what:
        MEASURES[name]
    modules = dict(model.named_modules())
    name, stack = find_layers(model, batch, layers)
    if not callable(head):
        names = [head] if isinstance(head, str) else head
        head = nn.Sequential(*(find_module(modules, name) for name in names))
    layered = Layered(model, stack, name, lambda sample, x: head(x))
    sample = Sample(batch, targets)
    with layered.ready():
        refuse_other_head(layered, sample)
    request = Request(
        model=layered,
        held_out=sample,
        probe=sample,
        training=None if training is None else Sample(training),
        **settings,
    )
    results = measure_all(what, request)
    for result in results.values():
        result.about = {
            "model": f"{type(model).__module__}.{type(model).__qualname__}",
            "layers": layered.name,
            "depth": layered.depth,
            "every": request.step,
        }
    return results


def refuse_other_head(layered: Layered, sample: Sample) -> None:
    """Raise ConfigError unless the head makes the logits of the last layer's output."""
    states, logits = layered.states_and_logits(sample)
    read = layered.read_out(sample, states[-1])
    tolerance = 1e-3 * float(logits.abs().max())
    if read.shape != logits.shape or not torch.allclose(read, logits, atol=tolerance):
        raise ConfigError(
            "head: after the last layer it does not give the model's logits "
            f"{tuple(logits.shape)}; name all that follows the layers, as in "
            "head=('transformer.ln_f', 'lm_head')"
        )


def is_huggingface(folder: str | Path) -> bool:
    """Return whether a folder has config.json and *.safetensors."""
    path = Path(folder)
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def analyze_folder(
    folder: str | Path,
    what: Sequence[str] = ("lens",),
    *,
    text: str | Path,
    batches: int = HELD_OUT,
    training_batches: int = TRAINING,
    **settings: Any,
) -> dict[str, Analysis]:
    """Analyze the model of `analyze_huggingface` on a text; write to analysis/ in its folder.

    text: a file that the task `tokens` reads: text, for the tokenizer.json of the folder, or
    tokens.  Held-out sequences come from its last tenth.  settings: as in `analyze_model`.
    Raises ConfigError for a file or a folder that does not fit.
    """
    path = Path(folder)
    try:
        about = json.loads((path / "config.json").read_text(encoding="utf-8"))
        positions = about.get("max_position_embeddings") or about.get("n_positions") or SEQUENCE
        seq_len = min(SEQUENCE, int(positions))
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from error
    tokenizer = path / "tokenizer.json"
    options = {"task.name": "tokens", "task.path": str(text), "task.seq_len": seq_len}
    options |= {"task.tokenizer": str(tokenizer)} if tokenizer.is_file() else {}
    task = task_of(conf.with_overrides(conf.Config(), options | {"model.family": "decoder"}))
    held_out, training = (
        torch.from_numpy(np.concatenate([batch.inputs for batch in drawn])).long()
        for drawn in draw(task, SEQUENCES, batches, training_batches)
    )
    run = RunFolder(path)
    with run.lock():
        results = analyze_huggingface(path, held_out, what, training=training, **settings)
        weights = {file.name: sha256(file) for file in sorted(path.glob("*.safetensors"))}
        for name, result in results.items():
            result.about |= {
                "weights_sha256": weights,
                "text_sha256": task.data["sha256"],
                "held_out_sequences": len(held_out),
                "training_sequences": len(training),
                "seq_len": seq_len,
            }
            write_analysis(run, name, result)
    return results


def analyze_huggingface(
    folder: str | Path,
    tokens: Tensor,
    what: Sequence[str] = ("lens",),
    *,
    training: Tensor | None = None,
    **settings: Any,
) -> dict[str, Analysis]:
    """Analyze a causal language model in a folder with config.json and *.safetensors.

    tokens: (batch, seq) integers, which are input and target: each position predicts the next.
    training: the same, for `linear`.  settings: as in `analyze_model`.  Needs transformers.  Loads
    the folder alone: it downloads nothing, reads no pickle and runs no code of the folder.
    Raises ConfigError for a folder without such files and for an architecture whose parts have
    other names (then use `analyze_model`), ResourceError without transformers.
    """
    path = Path(folder)
    if not is_huggingface(path):
        raise ConfigError(f"{path}: found no config.json with *.safetensors; allowed such a folder")
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ResourceError(f"{path}: transformers is missing: pip install transformers") from error
    model = AutoModelForCausalLM.from_pretrained(
        path.resolve(), local_files_only=True, trust_remote_code=False, use_safetensors=True
    ).float()
    base = model.base_model
    layers = next((getattr(base, name) for name in LAYERS if hasattr(base, name)), None)
    norm = next((getattr(base, name) for name in NORMS if hasattr(base, name)), None)
    output = model.get_output_embeddings()
    if layers is None or norm is None or output is None:
        kind = type(model).__name__
        raise ConfigError(
            f"{path}: {kind} names its layers or its last norm otherwise; give them to "
            "deepstack.analyze_model(model, batch, layers=…, head=…)"
        )
    ahead = torch.full_like(tokens[:, :1], -100)
    targets = torch.cat([tokens[:, 1:], ahead], dim=1)

    def batch(ids: Tensor) -> dict[str, Any]:
        return {"input_ids": ids, "use_cache": False}

    return analyze_model(
        model,
        batch(tokens),
        what,
        head=lambda x: output(norm(x)),
        targets=targets,
        layers=list(layers),
        training=None if training is None else batch(training),
        **settings,
    )
