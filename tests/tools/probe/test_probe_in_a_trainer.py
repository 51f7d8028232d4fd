"""The probe in the Trainer of Hugging Face, by the code of the page; needs its extra accelerate."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ROOT

from deepstack.records import Run

PAGE = (ROOT / "docs" / "tutorials" / "own_model.md").read_text(encoding="utf-8")
STEPS, LAYERS = 6, 3


@pytest.mark.others
def test_the_code_of_the_page_trains_alike_and_measures_each_layer(tmp_path: Path) -> None:
    """Two micro-batches a step, with clipping: the same weights, and a finite row for each step."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    (code,) = re.findall(r'```python title="trainer_probe.py"\n(.*?)```', PAGE, re.DOTALL)
    page: dict[str, Any] = {}
    exec(code, page)
    tokens = torch.arange(64 * 8).view(64, 8) % 13
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def trainer_of(kind: Any) -> Any:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=13,
            n_positions=8,
            n_embd=8,
            n_layer=LAYERS,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
        options = transformers.TrainingArguments(
            str(tmp_path / "out"), max_steps=STEPS, gradient_accumulation_steps=2, report_to=[],
            use_cpu=True, save_strategy="no", disable_tqdm=True, per_device_train_batch_size=4,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
        return kind(model=model, args=options, train_dataset=data)

    plain, probed = trainer_of(transformers.Trainer), trainer_of(page["ProbedTrainer"])
    torch.manual_seed(1)
    plain.train()
    torch.manual_seed(1)
    page["train"](
        probed, tokens[:2], out=tmp_path / "s" / "hf", hidden="transformer.ln_f", layers_every=2
    )
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, probed.model.state_dict()[name]), name
    run = Run(tmp_path / "s" / "hf")
    assert run.state == "done" and run.steps["step"].tolist() == [*range(1, STEPS + 1)]
    assert run.steps["loss"].between(2.0, 3.0).all()  # of a whole step; ln 13 is 2.56
    steps, norms = run.layers("grad_norm")
    assert steps.tolist() == [0, 2, 4, 6] and norms.shape == (4, LAYERS)
    assert (norms[1:] > 0).all()  # before training there is no gradient
