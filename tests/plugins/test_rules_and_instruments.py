"""Mistakes in the update of an optimizer, and instruments that change the run, are refused."""

from pathlib import Path
from textwrap import indent

import pytest
import torch
from helpers import QUICK
from helpers.command_line import TINY, refusal, succeed

from deepstack.records import find_runs

RULE = (
    "from deepstack.training import Optimizer\n\n\n"
    "class Own(Optimizer, name='own'):\n"
    '    """u = g."""\n\n'
    "    static = True\n"
)
OPTIMIZER = "train.optimizer=own"


def write(tmp_path: Path, text: str, body: str, name: str = "own") -> Path:
    path = tmp_path / f"{name}.py"
    path.write_text(text + indent(body, "    "))
    return path


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def update(self, p, g):\n    return g", "gave Tensor; allowed the tuple (u,)"),
        (
            "state = ('m',)\ndef update(self, p, g, m):\n    return (0.9 * m + g,)",
            "gave 1 values; allowed the tuple (u, m)",
        ),
        ("def update(self, p, g):\n    return (g.mean(),)", "gave a tensor () for u; allowed a t"),
        (
            "state = ('m',)\ndef update(self, p, g, m):\n    return g, m.mul_(0.9).add_(g)",
            "changes m in place; allowed to return a new tensor",
        ),
        (
            "def update(self, p, g):\n    return (g / g.norm(),)",
            "lets one number of u depend on the gradient of",
        ),
    ],
)
def test_a_wrong_update_is_named_before_training(body: str, message: str, tmp_path: Path) -> None:
    file = write(tmp_path, RULE, body)
    said = refusal(2, "check", QUICK, OPTIMIZER, "--plugin", file)
    line = RULE.count("\n") + body.split("def update")[0].count("\n") + 1
    assert f"the optimizer own: {file}:{line}: update {message}" in said


@pytest.mark.parametrize(
    "u", ["g + torch.randn_like(g)", "g * m / m"], ids=["random", "0/0 at the start"]
)
def test_a_rule_of_single_numbers_is_accepted(u: str, tmp_path: Path) -> None:
    body = f"state = ('m',)\ndef update(self, p, g, m):\n    return {u}, m + g"
    before = torch.get_rng_state()
    succeed("check", QUICK, OPTIMIZER, "--plugin", write(tmp_path, f"import torch\n{RULE}", body))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("replay", ["false", "true"])
def test_a_state_may_have_any_name(replay: str, tmp_path: Path) -> None:
    """A state named step is a tensor like the parameter, also where steps are replayed."""
    losses = {}
    for name in ("step", "n"):
        body = (
            f"state = ('{name}',)\ndef update(self, p, g, n):\n"
            "    n = n + (g != 0)\n    return g / (n + 1), n"
        )
        file = write(tmp_path, RULE.replace("own", f"own_{name}"), body, name)
        words = [
            *TINY,
            "train.steps=12",
            "train.lr=0.1",
            f"{OPTIMIZER}_{name}",
            f"runtime.replay={replay}",
        ]
        out = tmp_path / name
        succeed("train", QUICK, *words, "-q", "--plugin", file, "--out", out)
        (run,) = find_runs(out)
        losses[name] = list(run.steps["loss"])
    assert losses["step"] == losses["n"] and len(losses["n"]) == 12


INSTRUMENT = (
    "import torch\nfrom deepstack.diagnostics import Instrument\n\n\n"
    "class Own(Instrument, name='own'):\n"
    '    """A value."""\n\n'
    "    columns = {'value': ('v', '', 'A value.')}\n\n"
)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("next(state.model.parameters()).data.mul_(0.9)\nreturn {'value': 1.0}", "changes param"),
        ("return {'value': torch.rand(())}", "draws torch's global random numbers; allowed a "),
        ("return {'value': 'much'}", "found 'much' for value; allowed a number, or None"),
    ],
)
def test_an_instrument_that_changes_the_run_is_refused(
    body: str, message: str, tmp_path: Path
) -> None:
    method = f"def measure(self, state):\n{indent(body, '    ')}"
    file = write(tmp_path, INSTRUMENT, method)
    words = [*TINY, "log.instruments.own=1", "-q", "--plugin", file, "--out", tmp_path]
    said = refusal(2, "train", QUICK, *words)
    assert f"instrument 'own': {file}:10: " in said and message in said
