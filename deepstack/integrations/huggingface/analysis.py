"""Analyses of a model in a Hugging Face folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.base import ConfigError
from deepstack.integrations.huggingface.folder import (
    Folder,
    load_huggingface,
    read_folder,
    refuse_reading_ahead,
    refuse_tokens,
)
from deepstack.records import Analysis, RunFolder, sha256, write_analysis
from deepstack.tasks import task_of
from deepstack.tools.depth_use import HELD_OUT, TRAINING, analyze_model, draw

SEQUENCE, SEQUENCES = 128, 8
"""Tokens of a sequence (fewer if the model has fewer positions), and sequences in a batch."""


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
        tokens.  Held-out sequences come from blocks that are spread over it.
    bos: begin each sequence with the bos_token_id of config.json.
    settings: as in `analyze_model`.

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
    training: the same, for `linear`.
    settings: as in `analyze_model`.  Needs transformers.  Loads the folder alone, in fp32: it
        downloads nothing, reads no pickle and runs no code of the folder.

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
