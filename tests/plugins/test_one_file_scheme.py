"""A scheme of one file, with options, a parameter and two streams, is known everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import QUICK
from helpers.command_line import TINY, typed

import deepstack
from deepstack.config import memory_terms
from deepstack.plugins import load_plugins
from deepstack.schemes import scheme_memory, scheme_options

ECHO = '''
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from deepstack.schemes import Scheme, parameter


class Echo(Scheme, name="echo", label="Echo", paper="none", static=True):
    """x <- LN(x + s * G(x) + m), m <- decay m + G(x), m_0 = 0.  s: a vector of each sublayer."""

    extra_streams = 2
    decay: Annotated[float, Field(ge=0, le=1, description="of m at every sublayer")] = 0.5
    start: float = 1.0
    no_option: ClassVar[int] = 3

    def setup(self, parts):
        d = parts.d_model
        self.add_per_sublayer("s", lambda: parameter(d, role="scheme", start=self.start))

    @classmethod
    def alpha(cls, depth):
        return 1 - cls.decay

    @classmethod
    def gain(cls, role, layer, depth):
        return cls.alpha(depth) if role == "o" else 1.0

    def enter(self, x):
        return x, torch.zeros_like(x)

    def layer(self, stream, *sublayers):
        x, m = stream
        for G, (norm,), s in zip(sublayers, self.norm_functions, self.per_sublayer("s")):
            g = G(x)
            x, m = norm(x + s * g + m), self.decay * m + g
        return x, m

    def leave(self, stream, norm):
        return stream[0]
'''
SETTINGS = ["model.scheme=echo", "model.scheme_options.decay=0.25"]


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    file = tmp_path / "echo.py"
    file.write_text(ECHO)
    return file


def test_commands_know_a_scheme_of_one_file(echo: Path, tmp_path: Path) -> None:
    words = QUICK, *TINY, *SETTINGS, "--plugin", echo
    facts = json.loads(typed("check", *words, "--json").stdout)[0]
    assert facts["alpha"] == 0.75 and facts["parameters scheme"] == 2 * 2 * 8
    listed = json.loads(typed("list", "schemes", "--plugin", echo, "--json").stdout)
    (row,) = [row for row in listed if row["name"] == "echo"]
    assert row["gains"]["o"] == row["alpha"] == 0.5 and row["equation"].startswith("x <- LN(")
    trained = typed("train", *words, "-q", "--out", tmp_path)
    assert trained.exit_code == 0, trained.stderr
    drawn = typed("plot", "loss_vs_step", tmp_path)
    assert drawn.exit_code == 0, drawn.stderr


def test_its_layers_and_its_coefficients_read_its_options(echo: Path) -> None:
    load_plugins([echo])
    assert list(scheme_options("echo")) == ["decay", "start"]
    built = deepstack.build_model(deepstack.load_config(QUICK, [*TINY, *SETTINGS]), vocab_size=5)
    layer = built.model.layers[0]
    scheme, x = layer.scheme, torch.randn(2, 3, 8)
    assert type(scheme).alpha(2) == 0.75 and scheme.alpha(2) == 0.75
    a = layer.attention(x)
    y = scheme.attention_norms[0](x + scheme.attention_s * a)
    f = layer.feed_forward(y)
    z = scheme.feed_forward_norms[0](y + scheme.feed_forward_s * f + a)
    out, m = layer((x, torch.zeros_like(x)))
    torch.testing.assert_close(out, z)
    torch.testing.assert_close(m, 0.25 * a + f)


def test_the_estimate_has_its_memory(echo: Path) -> None:
    load_plugins([echo])
    config = deepstack.load_config(QUICK, [*TINY, *SETTINGS, "log.layers_every=0"])
    without = memory_terms(config, 257)["activations"]
    added = memory_terms(config, 257, scheme_memory(config))["activations"] - without
    batch = config.train.batch_size + config.log.probe_sequences
    assert added in [2 * 4 * n * 8 * 8 * 4 for n in (config.train.batch_size, batch)]
