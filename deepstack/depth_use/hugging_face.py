"""Analyses of a causal language model in a folder of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepstack.depth_use.foreign import analyze_model
from deepstack.errors import ConfigError, ResourceError
from deepstack.records import Analysis

NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
LAYERS = ("layers", "h", "blocks")


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
    if not (path / "config.json").is_file() or not list(path.glob("*.safetensors")):
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
