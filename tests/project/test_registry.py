"""Names: registering them, and finding the one that was meant."""

import random
import string
from collections import Counter
from typing import Any

import pytest

from deepstack.base.errors import ConfigError
from deepstack.base.registry import Registry, nearest, unknown
from deepstack.cli.completion import values_of
from deepstack.config import ROLES
from deepstack.config.keys import sections, setting_keys

CHOICES = {
    **sections(),
    **{key: choices for key in setting_keys() if len(choices := values_of(key)) > 2},
    "role": list(ROLES),
}


def slips(word: str) -> set[str]:
    """Every word that one typing error makes of this one."""
    found = set()
    for i in range(len(word) + 1):
        before, after = word[:i], word[i:]
        found |= {before + letter + after for letter in string.ascii_lowercase}
        found |= {before + letter + after[1:] for letter in ("", *string.ascii_lowercase)}
        found.add(before + after[1:2] + after[:1] + after[2:])
    return found - {word, ""}


@pytest.mark.parametrize("kind", CHOICES)
def test_nearest_is_right_for_95_percent_of_single_typing_errors(kind: str) -> None:
    choices = CHOICES[kind]
    meanings = Counter(wrong for word in choices for wrong in slips(word))
    random.seed(0)
    right = []
    for word in choices:
        # of w4 nobody knows which was meant, and nothing is left of a word of one letter when that
        # letter is another
        wrong = sorted(w for w in slips(word) - {*choices} if meanings[w] == 1 and len(w) > 1)
        typed = random.sample(wrong, min(40, len(wrong)))
        right += [nearest(each, choices) == word for each in typed]
    assert sum(right) >= 0.95 * len(right) > 0


@pytest.mark.parametrize(
    ("typed", "choices", "meant"),
    [
        ("AdamW", ["adamw", "adam"], "adamw"),
        ("post-ln", ["post_ln", "pre_ln"], "post_ln"),
        ("PostLN", ["post_ln", "pre_ln"], "post_ln"),
        ("batch", ["batch_size", "betas"], "batch_size"),
        ("w", ["w1", "q"], "w1"),
        ("zebra", ["q", "k", "depth"], None),
        ("RMSNorm", ["layer", "rms"], "rms"),
        ("keel_norm", ["ke", "keel"], "keel"),
        ("x" * 100_000, ["x"], None),
        ("", ["q"], None),
        ("q", [], None),
    ],
)
def test_nearest(typed: str, choices: list[str], meant: str | None) -> None:
    assert nearest(typed, choices) == meant


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "depnorm",
            "^unknown scheme 'depnorm'; did you mean 'deepnorm'. allowed: deepnorm, pre_ln$",
        ),
        ([], "unknown scheme"),
        ("x" * 10_000, "unknown scheme 'x{37}[.]{3}'"),
        ("a\n\x1b[31m", r"'a\\n\\x1b\[31m'"),
    ],
)
def test_unknown_name_is_a_config_error_with_the_nearest(name: Any, message: str) -> None:
    schemes: Registry[int] = Registry("scheme")
    schemes.register("deepnorm", 1)
    schemes.register("pre_ln", 2)
    with pytest.raises(ConfigError, match=message):
        schemes[name]


def test_many_names_are_the_nearest_and_a_command_that_lists_all() -> None:
    names = [*(f"xx_{i}" for i in range(20)), "effective_rank"]
    text = unknown("word", "stable_rank_q", names, "list words")
    assert text.startswith("unknown word 'stable_rank_q'; allowed: effective_rank, xx_")
    assert text.endswith(" and 13 more (list words)") and text.count(", ") == 7
    assert unknown("word", "zz", names[:8], "list words").endswith(", xx_7")
    assert unknown("value", "0", ["0", "1"]) == "unknown value '0'; allowed: 0, 1"
