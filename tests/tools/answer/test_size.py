"""What an answer says of larger models: the shares that a published study measured."""

import csv
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from helpers.plot_runs import make_run

import deepstack


def decoders(root: Path, gap: float = 0.2, optimizers: bool = False, **changes: Any) -> Path:
    """Two schemes of decoders, three seeds each."""
    config = {"model.family": "decoder", "model.d_model": 32} | changes
    for scheme, loss in (("pre_ln", 2.5), ("keel", 2.5 + gap)):
        if optimizers:
            config["train.optimizer"] = "adamw" if scheme == "keel" else "sgd"
        for seed, noise in enumerate((0.0, 0.01, 0.02)):
            masked = loss + noise * (1 if scheme == "keel" else -1)
            make_run(root / "s", scheme=scheme, depth=16, seed=seed, masked=masked, config=config)
    return root / "s"


def sentence_of(study: Path) -> str:
    """Return the sentence on 400M parameters of an answer, or ''."""
    sure = deepstack.answer(study).found.sure
    return next((one for one in sure if "400M" in one), "")


def test_a_better_scheme_of_a_small_decoder_has_the_share_of_the_study(tmp_path: Path) -> None:
    with (ROOT / "experiments/desk_against_400m/pairs.csv").open(encoding="utf-8") as file:
        (row,) = (
            row
            for row in csv.DictReader(file)
            if (row["setting"], row["seeds"], row["column"]) == ("best", "all", "16")
        )
    found = sentence_of(decoders(tmp_path))
    assert f"in {int(float(row['agree']))} of {row['pairs']} pairs of designs" in found
    assert f"; {100 * float(row['p']):.0f} % of shuffled designs" in found
    assert found in deepstack.answer(tmp_path / "s").page("markdown")


@pytest.mark.parametrize(
    "changes",
    [
        {"model.family": "encoder"}, {"model.d_model": 256}, {"model.depth": 200},
        {"model.depth": 4}, {"gap": 0.0}, {"optimizers": True},
    ],
)  # fmt: skip
def test_other_studies_do_not_cite_it(changes: dict[str, Any], tmp_path: Path) -> None:
    assert sentence_of(decoders(tmp_path, **changes)) == ""
