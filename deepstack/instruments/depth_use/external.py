"""Analyses of models that deepstack did not build: any PyTorch model, and Hugging Face folders."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deepstack import config as conf
from deepstack.base.errors import ConfigError
from deepstack.instruments.depth_use.analyses import MEASURES, Request, measure_all
from deepstack.instruments.depth_use.external_layers import ExternalLayers
from deepstack.instruments.depth_use.huggingface import (
    Folder,
    load_huggingface,
    read_folder,
    refuse_reading_ahead,
    refuse_tokens,
)
from deepstack.instruments.depth_use.layered import Sample
from deepstack.instruments.depth_use.runs import HELD_OUT, TRAINING, draw
from deepstack.instruments.probe.calls import Layers, copied, find_module, unwrapped
from deepstack.instruments.probe.layers import find_layers
from deepstack.records import Analysis, RunFolder, sha256, write_analysis
from deepstack.tasks import task_of

SEQUENCE, SEQUENCES = 128, 8
"""Tokens of a sequence (fewer if the model has fewer positions), and sequences in a batch."""

Reader = Callable[[Tensor], Tensor]
Head = str | Sequence[str] | Reader


def analyze_model(
    model: nn.Module,
    batch: Any,
    what: Sequence[str] = ("lens",),
    *,
    head: Head | None = None,
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
    ("transformer.ln_f", "lm_head"), or a function of the stream.  By default the model itself reads
    each stream, with layers that do nothing.
    targets: (batch, seq), the true token at each position, -100 where none is predicted; without
    them nothing is measured that needs a loss, and the lens covers all positions.
    layers: as in `deepstack.probe`, modules that take the stream first, and return it, or a tuple
    that begins with it.  training: a batch on which `linear` fits its maps.
    settings: every, top, probes, iterations, ridge, seed.

    The model runs in evaluation mode, without autocast, compilation and key-value caches.  If one
    of several analyses fails, its result is empty, and its note has the reason.
    Raises ConfigError for a model that cannot be taken apart: unless its layers pass on one dense
    stream, as it is, and the head of the last one gives the model's logits, twice the same.
    Restores modes and random states of the model; changes no parameter.
    """
    for name in what:
        MEASURES[name]
    inner = unwrapped(model)
    modules = dict(inner.named_modules())
    refuse_kinds(modules)
    batch, training = copied(batch), None if training is None else copied(training)
    layered = ExternalLayers(inner, (), "", reader(modules, head))
    with layered.ready(), layered.guarded():
        name, stack = find_layers(inner, batch, layers)
    if not stack:
        raise ConfigError("layers: found none; name what holds the layers, as in layers='blocks'")
    layered = ExternalLayers(inner, stack, name, reader(modules, head))
    sample = Sample(batch, targets)
    with layered.ready():
        layered.check(sample)
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
            "model": f"{type(inner).__module__}.{type(inner).__qualname__}",
            "layers": layered.name,
            "depth": layered.depth,
            "every": request.step,
        }
    return results


def reader(modules: Mapping[str, nn.Module], head: Head | None) -> Reader | None:
    """Return the head as a function of the stream; None: the model itself reads it."""
    if head is None or callable(head):
        return head
    names = [head] if isinstance(head, str) else head
    return nn.Sequential(*(find_module(modules, name) for name in names))


def refuse_kinds(modules: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError for modules whose code or whose parameters cannot be reached."""
    for name, module in modules.items():
        where = f"model: {name or type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(f"{where} is a TorchScript module; give the Python module of it")
        if type(module).__module__.startswith("torch.distributed.fsdp") or type(
            module
        ).__name__.startswith("FSDP"):
            raise ConfigError(
                f"{where} is sharded over processes; gather its parameters in one model first"
            )


def analyze_folder(
    folder: str | Path,
    what: Sequence[str] = ("lens",),
    *,
    text: str | Path,
    bos: bool = False,
    batches: int = HELD_OUT,
    training_batches: int = TRAINING,
    **settings: Any,
) -> dict[str, Analysis]:
    """Analyze the model of `analyze_huggingface` on a text; write to analysis/ in its folder.

    text: a file that the task `tokens` reads: text, for the tokenizer.json of the folder, or
    tokens.  Held-out sequences come from its last tenth.  bos: begin each sequence with the
    bos_token_id of config.json.  settings: as in `analyze_model`.
    Raises ConfigError for a file or a folder that does not fit.
    """
    path, checked = Path(folder), read_folder(folder)
    seq_len = min(SEQUENCE, checked.positions or SEQUENCE)
    tokenizer = path / "tokenizer.json"
    options = {"task.name": "tokens", "task.path": str(text), "task.seq_len": seq_len}
    options |= {"task.tokenizer": str(tokenizer)} if tokenizer.is_file() else {}
    task = task_of(conf.with_overrides(conf.Config(), options | {"model.family": "decoder"}))
    held_out, training = (
        torch.from_numpy(np.concatenate([batch.inputs for batch in drawn])).long()
        for drawn in draw(task, SEQUENCES, batches, training_batches)
    )
    if bos:
        held_out, training = (with_first_token(checked, x) for x in (held_out, training))
    run = RunFolder(path)
    with run.lock():
        results = analyze_huggingface(path, held_out, what, training=training, **settings)
        weights = {file.name: sha256(file) for file in checked.files}
        for name, result in results.items():
            if not result.columns:
                continue
            result.about |= {
                "weights_sha256": weights,
                "text_sha256": task.data["sha256"],
                "held_out_sequences": len(held_out),
                "training_sequences": len(training),
                "seq_len": seq_len,
                "bos": bos,
            }
            write_analysis(run, name, result)
    return results


def with_first_token(folder: Folder, tokens: Tensor) -> Tensor:
    """Return sequences of the same length that begin with the folder's bos_token_id."""
    first = folder.config.get("bos_token_id")
    if not isinstance(first, int):
        raise ConfigError(
            f"--bos: {folder.path / 'config.json'} has bos_token_id {first!r}; allowed with a token"
        )
    return torch.cat([torch.full_like(tokens[:, :1], first), tokens[:, :-1]], dim=1)


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
    the folder alone, in fp32: it downloads nothing, reads no pickle and runs no code of the folder.
    Raises ConfigError for a folder without such files, for weights that do not fit the model, all
    and exactly, and for layers that pass on more than a stream; ResourceError without transformers.
    """
    checked = read_folder(folder)
    model = load_huggingface(checked)
    for each in (tokens, training):
        if each is not None:
            refuse_tokens(checked.path, model, each)
    refuse_reading_ahead(checked.path, model, tokens)
    ahead = torch.full_like(tokens[:, :1], -100)
    targets = torch.cat([tokens[:, 1:], ahead], dim=1)

    def batch(ids: Tensor) -> dict[str, Any]:
        return {"input_ids": ids, "use_cache": False}

    results = analyze_model(
        model,
        batch(tokens),
        what,
        targets=targets,
        training=None if training is None else batch(training),
        **settings,
    )
    for result in results.values():
        result.notes += checked.notes()
    return results
