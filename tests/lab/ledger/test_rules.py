"""Rules of entries reject wrong numbers and null models; the page follows from the draws."""

import re

import pytest
from helpers import ROOT

from deepstack import config as conf
from deepstack_lab.ledger import report
from deepstack_lab.ledger.claim import Claim
from deepstack_lab.ledger.claims import CLAIMS, all_claims
from deepstack_lab.ledger.measured import STUDIES, Measured

PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
WITH_RULES = [entry for entry in all_claims() if entry.rules]

# id, number, a wrong measurement of it
PLANTED = [
    ("AD-1", "ω of sublayer 200", 14.1),
    ("C51", "Post-LN: share of equal signs of x and G", 0.7),
    ("C54", "LN: rank correlation of a token's coordinates before and after", 0.9),
    ("C55", "ln of the first over the last layer's gradient, 1000 layers", -2.0),
    ("C62", "the same, as the formula says", 1.0),
    ("C66", "a gradient step, largest of 12 sublayers: ‖Δx_{l+1}‖ over the bound", 1.3),
    ("C67", "Pre-LN: ‖∂L/∂F‖ at N = 24 over N = 6, after 50 steps", 2.0),
    ("C68", "Post-LN, 96 layers: slope of ln ‖∂L/∂W_2‖ in l", -0.01),
    ("C69", "exponent of ‖Δθ‖/‖θ_0‖ in α, lr 0.1", -0.5),
    ("C70", "Post-norm: loss with LN less that with BN, last 20 of 60 steps", 0.1),
    ("C71", "no norms: rank correlation of Π‖W‖₂ with the gap, six λ", 0.2),
    ("C72", "Pre-norm: second chain, loss of LN with biases less RMSNorm's without", -0.02),
    ("C74", "Pre-LN less Post-LN: loss at its best rate after 1000 steps", -0.02),
    ("C75", "first chain with a new tied head: the same", -0.1),
    ("CP-2", "CompleteP: exponent of the best rate in N, 4 to 64 layers", -0.5),
    ("CP-3", "depth-µP: exponent of the best rate in N, 4 to 64 layers", 0.1),
    ("CP-C", "CompleteP: exponent of ‖x_N‖ in N after 10 steps, 8 to 1000 layers", 0.5),
    ("DN-1", "post_ln fails at 18 layers: share learnt", 0.6),
    ("DN-1", "pre_ln trains at 100 layers: share learnt", -0.05),
    ("DN-2", "‖ΔF‖ over that of unrelated states at step 2", 0.06),
    ("DN-5", "DeepNorm: exponent of ‖ΔF‖ in A", 1.14),
    ("DN-5", "DeepNorm: ‖ΔF‖ at 100 + 100 layers", 0.078),
    ("ED-1", "‖G‖/‖x‖, second half of the layers over the first", 1.3),
    ("ED-2", "exponent of the effective ratio in N, 6 to 96 layers", -0.7),
    ("HT-1", "Pre-LN: exponent of the best rate in N, 4 to 64 layers", -0.5),
    ("C50", "‖∂F/∂θ_N‖ over √(v² + w²)/α, 48 over 12 layers", 2.0),
    ("ED-3", "mean cosine of x_l − x_{l−1} and x_{l+1} − x_l after training", 0.3),
    ("LNS-V", "Pre-LN: R² of the exponential less R² of the power", -0.3),
    ("MH-1", "mHC: composite gain after training", 30.0),
    ("PL-V", "Peri-LN: exponent of Var x_l − Var x_1 in l − 1 after training", 2.0),
    ("SC-1", "exponent of the student's loss in N, 3 to 24 layers", -0.3),
    ("SP-1", "rank correlation of |λ_a| + |λ_g| with the share learnt", 0.3),
    ("SP-2", "attention: 99th percentile of the relative error of its variance", 0.4),
    ("TF-1", "share learnt at 200 layers", -0.05),
    ("TP-1", "depth-µP: exponent of the best rate in N, 4 to 64 layers", -0.4),
    ("XI-1", "Pre-LN: exponent of the last W_2's gradient in N", 0.0),
    ("XI-2", "Post-LN: E‖x‖²/d at the feed-forward's norm", 2.0),
    ("ZH-B", "β_LN, self-attention", 1.0),
]


def five(value: float) -> list[float]:
    """Return five draws around a value."""
    return [value + 0.01 * step * (abs(value) or 1.0) for step in (-2, -1, 0, 1, 2)]


@pytest.mark.parametrize(("name", "what", "wrong"), PLANTED, ids=lambda one: str(one))
def test_a_rule_rejects_a_planted_number(name: str, what: str, wrong: float) -> None:
    (rule,) = (rule for rule in CLAIMS[name].rules if rule.what == what)
    assert rule.judge(five(wrong)).decision == "disagrees"


@pytest.mark.parametrize("entry", WITH_RULES, ids=lambda entry: entry.id)
def test_no_rule_agrees_with_the_null_model(entry: Claim) -> None:
    finding = entry.judge({rule.what: five(rule.null.value) for rule in entry.rules})
    assert finding.verdict in ("disagrees", "undecided")
    assert not any(part.agrees for part in finding.parts)


def section_of(name: str) -> str:
    (text,) = re.findall(rf"^## {name}\n.*?(?=\n\n## |\Z)", PAGE, re.M | re.S)
    return str(text).rstrip("\n")


@pytest.mark.parametrize("entry", WITH_RULES, ids=lambda entry: entry.id)
def test_the_page_follows_from_rules_and_draws(entry: Claim) -> None:
    """The section is made again from the draws that it prints."""
    section = section_of(entry.id)
    draws = dict(re.findall(r"^- (.*), by seed: (.*)$", section, re.M))
    one = Measured(entry, reason="not made")
    if draws:
        numbers = {what: [float(word) for word in text.split()] for what, text in draws.items()}
        one = Measured(entry, entry.judge(numbers))
    else:
        (reason,) = re.findall(r"^Not measured: (.*)\.$", section, re.M)
        one = Measured(entry, reason=reason)
    made = report.page([one], "", "claims")
    (again,) = re.findall(rf"^## {entry.id}\n.*", made, re.M | re.S)
    assert str(again).rstrip("\n") == section
    assert f"| [{entry.id}](#{entry.id.lower()}) |" in PAGE


def test_every_study_belongs_to_an_entry_and_has_five_seeds() -> None:
    used = {entry.study for entry in all_claims() if entry.study}
    assert used == {path.name for path in STUDIES.glob("*.yaml")}
    for name in used:
        study = conf.load_study(STUDIES / name)
        assert len(study.grid["seed"]) >= 5, name
        assert study.base.name == f"ledger_{name.removesuffix('.yaml')}"


def test_an_opposed_entry_exists() -> None:
    for entry in all_claims():
        assert set(entry.opposes) <= set(CLAIMS)
