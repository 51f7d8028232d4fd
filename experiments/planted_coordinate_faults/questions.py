"""Questions that people asked in public about their µP, each answered by a check of a small model.

    python experiments/planted_coordinate_faults/questions.py

Writes questions.csv: a row for each model, with the first module that breaks µP, and the exponents
in width of the module that the question names.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pandas as pd
from faults import MODELS, SIZES

import deepstack
from deepstack.tools.coordinates import CoordinateCheck


class Question(NamedTuple):
    """A model that a question describes, as lines of a right model that are replaced.

    thread: address of the question on GitHub.
    text: the model in words.
    model: name of the right model.
    edits: line -> its replacement.
    about: name of the module that the question names.
    quantity: of its exponents in questions.csv.
    broken: first module that breaks the rule, and its cause; empty texts if it holds.
    """

    thread: str
    text: str
    model: str
    edits: dict[str, str]
    about: str
    quantity: str
    broken: tuple[str, str]


HOLDS = ("", "")
HEAD = "self.output_multiplier = BASE_WIDTH / width"
ZEROS = """\
        nn.init.zeros_(self.classes.weight)
        for layer in layers:
            nn.init.zeros_(layer.self_attn.in_proj_weight[:width])

    def forward(self, tokens):"""
OTHERS = "    others = ["
GROUP = '{"params": others, "lr": RATE}'
READOUT = f"""{GROUP},
        {{"params": [model.classes.weight], "lr": RATE * BASE_WIDTH / width}}"""
WITHOUT = "if id(p) not in chosen"

QUESTIONS = [
    Question(
        "microsoft/mup/issues/71", "readout and queries start at 0", "encoder",
        {"    def forward(self, tokens):": ZEROS}, "", "change", HOLDS,
    ),
    Question(
        "microsoft/mup/issues/71", "the same, without output multiplier", "encoder",
        {"    def forward(self, tokens):": ZEROS, HEAD: "self.output_multiplier = 1.0"},
        "", "change", ("", "output multiplier"),
    ),
    Question(
        "microsoft/mup/issues/55", "tied embedding, times √width", "decoder",
        {"if hidden else 0.2": "if hidden else 0.2 * math.sqrt(n_embd / BASE_WIDTH)"},
        "transformer.wte", "size", ("transformer.wte", "scale of the embedding"),
    ),
    Question(
        "microsoft/mup/issues/55", "tied embedding that starts equal at all widths", "decoder",
        {}, "transformer.wte", "size", HOLDS,
    ),
    Question(
        "microsoft/mup/issues/66", "attention divided by √(head width)", "decoder",
        {"scale = 4 / q.shape[-1]": "scale = q.shape[-1] ** -0.5"},
        "transformer.h.0.attn softmax", "size",
        ("transformer.h.0.attn softmax", "attention scale"),
    ),
    Question(
        "microsoft/mup/issues/17", "more heads of equal width, divided by its root", "encoder",
        {}, "encoder.layers.0.self_attn softmax", "size", HOLDS,
    ),
    Question(
        "microsoft/mup/issues/7", "output multiplier, constant rate of the output matrix",
        "encoder", {}, "", "change", HOLDS,
    ),
    Question(
        "microsoft/mup/issues/7", "start and rate of the output matrix 1/width, no multiplier",
        "encoder",
        {
            HEAD: "self.output_multiplier = 1.0",
            "inputs = p.shape[-1] if \"encoder\" in name else 1":
            "inputs = p.shape[-1] if \"encoder\" in name else (width / BASE_WIDTH) ** 2"
            " if \"classes\" in name else 1",
            GROUP: READOUT,
            WITHOUT: f"{WITHOUT} and p is not model.classes.weight",
        },
        "", "change", HOLDS,
    ),
    Question(
        "microsoft/mup/issues/7", "output multiplier and rate of the output matrix 1/width",
        "encoder",
        {GROUP: READOUT, WITHOUT: f"{WITHOUT} and p is not model.classes.weight"},
        "classes", "relative", HOLDS,  # undecided with five seeds
    ),
    Question(
        "EleutherAI/nanoGPT-mup/issues/8", "start 0.02 at the base width", "decoder",
        {"std = 0.2 /": "std = 0.02 /"}, "transformer.h.0.c_fc", "size", HOLDS,
    ),
    Question(
        "EleutherAI/nanoGPT-mup/issues/8", "start 1/√32 at the base width 32", "decoder",
        {"std = 0.2 /": "std = BASE_WIDTH**-0.5 /"}, "transformer.h.0.c_fc", "size", HOLDS,
    ),
]  # fmt: skip


def edited(question: Question) -> str:
    """Return the model of a question, as text."""
    text = (MODELS / f"{question.model}.py").read_text(encoding="utf-8")
    for old, new in question.edits.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def check_of(question: Question, folder: Path) -> CoordinateCheck:
    """Return the check of µP of a question's model."""
    path = folder / f"{question.model}.py"
    path.write_text(edited(question), encoding="utf-8")
    sizes = SIZES[question.model] | {"depths": (4,)}
    return deepstack.coordinates(path, rule="mup", steps=(1, 3, 10, 30), **sizes)


def row_of(question: Question, check: CoordinateCheck) -> dict[str, object]:
    """Return the row of questions.csv."""
    first = check.first
    row: dict[str, object] = {
        "thread": question.thread,
        "model": question.text,
        "holds": check.holds,
        "broken_modules": len({one.module for one in check.broken}),
        "modules": len(check.modules),
        "first": "" if first is None else f"{first.module}: {first.found}; {first.cause}",
        "about": f"{question.about or '(output)'} {question.quantity}",
    }
    for one in check.rows:
        if (one.module, one.quantity) == (question.about, question.quantity):
            row[f"step_{one.step}"] = f"{one.exponent:.2f} ({one.low:.2f} to {one.high:.2f})"
    return row


if __name__ == "__main__":
    rows = []
    for question in QUESTIONS:
        with TemporaryDirectory() as folder:
            rows.append(row_of(question, check_of(question, Path(folder))))
        print(rows[-1], flush=True)
    pd.DataFrame(rows).to_csv(Path(__file__).parent / "questions.csv", index=False)
