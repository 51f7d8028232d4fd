"""Hostile input: whatever the bytes are, a configuration or a message, and soon."""

from __future__ import annotations

import random
import time

import pytest
from helpers.bad_configs import GOOD, HOSTILE

from deepstack import config as conf
from deepstack.errors import ConfigError


def refused_or_read(data: str | bytes, overrides: list[str] | None = None) -> None:
    """Whatever it is, it ends in a config or in a message, and soon."""
    begin = time.process_time()  # of this process: the machine may be busy with others
    for read in (conf.parse_config, conf.parse_study):
        try:
            read(data, "f.yaml", overrides or [])
        except ConfigError as error:
            assert str(error) and len(str(error)) < 20_000
            assert str(error).replace("\n", "").isprintable()
    assert time.process_time() - begin < 10  # what grows with the square would take minutes


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_soon(name: str) -> None:
    refused_or_read(HOSTILE[name])


PIECES = [
    "model", "depth", "train", "lr", "sweep", "grid", "seed", ":", ": ", "\n", "\n  ", "- ", "[",
    "]", "{", "}", ",", "'", '"', "#", "&a", "*a", "!!x", "<<", "|", ">", "%", "@", "`", "?", "~",
    "1", "-1", "1e9", ".nan", "0x", "true", "null", "\t", "\r\n", "...", "---", "é", "\ufeff", "\\",
    "a.b", "=", " ",
]  # fmt: skip


def test_random_texts_end_in_a_config_or_a_message() -> None:
    dice = random.Random(0)
    for _ in range(400):
        text = "".join(dice.choices(PIECES, k=dice.randrange(1, 30)))
        refused_or_read(text)
        refused_or_read("", [text, f"model.depth={text}", f"{text}=1"])


def test_random_bytes_end_in_a_config_or_a_message() -> None:
    dice = random.Random(1)
    good = GOOD.encode()
    for _ in range(500):
        refused_or_read(dice.randbytes(dice.randrange(200)))
        changed = bytearray(good)
        for _ in range(dice.randrange(1, 8)):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        refused_or_read(bytes(changed))
