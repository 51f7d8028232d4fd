"""experiments/planted_coordinate_faults: module and cause of faults, answers to questions."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from helpers.sampling import rotating

import deepstack

sys.path.insert(0, str(ROOT / "experiments/planted_coordinate_faults"))
table: Any = import_module("faults")
asked: Any = import_module("questions")


def needed(model: str) -> None:
    if model == "hugging_face":
        pytest.importorskip("transformers")


def test_there_are_twenty_faults_in_five_models() -> None:
    assert len(table.FAULTS) == 20 and len(table.RULES) == 5
    assert {fault.model for fault in table.FAULTS} == set(table.RULES)


def test_every_fault_can_be_planted_and_every_question_asked(tmp_path: Path) -> None:
    for fault in [*table.FAULTS, *table.HELD_OUT]:
        text = table.planted(fault, tmp_path).read_text(encoding="utf-8")
        compile(text, fault.model, "exec")
    page = (ROOT / "docs/coordinates.md").read_text(encoding="utf-8")
    for question in asked.QUESTIONS:
        compile(asked.edited(question), question.model, "exec")
        assert f"https://github.com/{question.thread})" in page


@pytest.mark.parametrize("model", rotating(sorted(table.RULES), 3))
def test_a_right_model_passes(model: str) -> None:
    needed(model)
    path = table.MODELS / f"{model}.py"
    deepstack.assert_coordinates(path, rule=table.RULES[model], **table.SIZES[model])


@pytest.mark.parametrize(
    "fault", rotating(table.FAULTS, 3), ids=lambda fault: f"{fault.model}-{fault.cause}"
)
def test_a_fault_is_named(fault: Any, tmp_path: Path) -> None:
    needed(fault.model)
    path, rule = table.planted(fault, tmp_path), table.RULES[fault.model]
    first = deepstack.coordinates(path, rule=rule, **table.SIZES[fault.model]).first
    assert first is not None
    assert (first.module, first.cause) == (fault.module, fault.cause), first.found


@pytest.mark.parametrize(
    "question", rotating(asked.QUESTIONS, 3), ids=lambda question: question.text
)
def test_a_question_has_the_answer_of_the_page(question: Any, tmp_path: Path) -> None:
    check = asked.check_of(question, tmp_path)
    first = check.first
    found = ("", "") if first is None else (first.module, first.cause)
    assert found == question.broken
