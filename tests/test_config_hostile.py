"""Hostile input: whatever the bytes are, a configuration or a message, and soon."""

from __future__ import annotations

import random
import time

import pytest

from deepstack import config as conf
from deepstack.errors import ConfigError

GOOD = """
name: good
model: {d_model: 12, n_heads: 3, scheme_options: {a: 1.0, c: true}}
task:
  texts: ['1e3', "tab\\tend\\n", é, 😀]
train:
  lr: 3e-4
  trainable: [q, w1]
  clip: null
sweep:
  grid:
    model.depth: [6, 48]
    train.betas: [[0.9, 0.98], [0.9, 0.95]]
"""


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


HOSTILE: dict[str, str | bytes] = {
    "deep lists": "[" * 65_000,
    "deep lists over lines": "[\n" * 30_000,
    "deep sections": "{a: " * 16_000,
    "deep block lists": "- " * 30_000,
    "deep block keys": "? " * 30_000,
    "deep indentation": "".join(" " * i + "a:\n" for i in range(350)),
    "billion laughs": "a: &a [x,x]\n" + "".join(f"b{i}: &b{i} [*a,*a]\n" for i in range(99)),
    "many keys": "".join(f"k{i}:\n" for i in range(9000)),
    "many long keys": "".join(f"{'batch_size' * 3}{i}:\n" for i in range(1500)),
    "many values": "task: {x: [" + "1," * 32_000 + "]}",
    "many duplicates": "a:\n" * 20_000,
    "many mistakes in a section": "model:\n" + "".join(f"  depht{i}: 1\n" for i in range(4000)),
    "many roles": "train: {lr_factors: {" + "".join(f"r{i}: 1, " for i in range(6000)) + "}}",
    "many in a list": "train: {trainable: [" + "qq, " * 16_000 + "]}",
    "many options": "task: {" + "".join(f"o{i}: {{}}, " for i in range(6000)) + "}",
    "long key": "k" * 65_000 + ": 1",
    "long value": "name: " + "x" * 65_000,
    "long digits": "seed: " + "9" * 65_000,
    "long float": "train: {lr: " + "9" * 60_000 + ".5e-60000}",
    "long exponent": "train: {lr: 1e-" + "9" * 60_000 + "}",
    "long line of dots": "seed: " + "." * 65_000,
    "tabs": "\t" * 65_000,
    "line ends": "\n" * 65_000,
    "carriage returns": "\r" * 65_000 + "x",
    "quotes": "'" * 65_001,
    "double quotes": '"' * 65_001,
    "backslashes": 'name: "' + "\\" * 60_000,
    "colons": ":" * 65_000,
    "spaced colons": ": " * 32_000,
    "commas": "[" + "," * 65_000,
    "dashes": "-" * 65_000,
    "document marks": "---\n" * 16_000,
    "percents": "%" * 65_000,
    "stars": "*" * 65_000,
    "exclamation marks": "!" * 65_000,
    "block scalar": "name: |\n" + "  x\n" * 16_000,
    "folded scalar": "name: >9\n" + " x\n" * 16_000,
    "dots in a key": "." * 65_000 + ": 1",
    "dotted axes": "sweep: {grid: {" + "a." * 30_000 + ": [1]}}",
    "many axes": "sweep:\n grid:\n" + "".join(f"  task.x{i}: [1]\n" for i in range(3000)),
    "lone surrogates": "\ud800\udfff" * 10_000,
    "escaped surrogates": 'name: "' + "\\ud800" * 9_000 + '"',
    "noncharacters": "\uffff\ufffe",
    "NULs": b"\x00" * 65_536,
    "all bytes": bytes(range(256)) * 256,
    "UTF-32": "seed: 1".encode("utf-32"),
    "half a letter": "name: é".encode()[:-1],
    "byte order marks": "\ufeff" * 1000,
    "other line ends": "seed: 1\u2028model: \x85 3",
    "right to left": "n\u202eame: 1",
    "wide letters": "𝕞odel: {depth: ٣}",
    "full-width digits": "seed: １２",
    "names of the machinery": "model: {model_config: 1, __class__: 2}\n__init__: 4",
    "options of the machinery": "task: {model_config: 1, __dict__: 2, __pydantic_extra__: 3}",
    "keys without text": "'': 1\nmodel: {'': 2}\ntrain: {lr_factors: {'': 1}}\ntask: {'': 3}",
    "anchors and aliases": "a: &a 1\nb: *a\n&k c: 2\n? &d {}\n: *d",
    "merge keys": "<<: {seed: 1}\nmodel: {<<: *m, depth: 2}\n<<: [*a, *b]",
    "tags": "!!map {seed: !!int '1', !x model: !!python/object:os.system {}}",
    "documents": "seed: 1\n...\n---\nseed: 2\n...",
    "duplicate sections": "model: {depth: 1}\nmodel: {depth: 2}\n'model': {}\n\"model\": {}",
    "not numbers": "seed: .nan\ntrain: {lr: .inf, eps: -.INF, clip: .NaN}",
    "numbers at the edge": "train: {lr: 1e400, eps: 1e-400, clip: -0, weight_decay: -0.0}",
    "huge integers": f"seed: {2**63}\nmodel: {{depth: -{2**64}}}\ntrain: {{steps: {10**39}}}",
    "other bases": "seed: 0x7fffffff\nmodel: {depth: 0o17}\ntrain: {steps: 0b11, eval_every: 010}",
    "numbers of YAML 1.1": "seed: 1_0\nmodel: {depth: 1:30}\ntrain: {lr: 1.e3, eps: +.1e-3}",
    "keys that are no words": "1: a\nnull: b\n[x]: c\n{y: z}: d\ntrue: e\n1.5: f\n~: g",
    "keys that are numbers": "model: {1: 2}\ntrain: {lr_factors: {1: 2, null: 3}}\ntask: {3: 4}",
    "letters that look alike": "mоdel: {depth: 6}\nmodel: {dерth: 6}\nＳeed: 1\nseeԁ: 2",
    "joined letters": "se\u200bed: 1\nse\u00aded: 1\nse\u2060ed: 1\nseed\u0301: 2",
    "control characters": "".join(f"k{i}: '{chr(i)}'\n" for i in range(32)),
    "control characters of C1": "".join(f"k{i}: {chr(i)}\n" for i in range(127, 160)),
    "carriage returns and line feeds": "seed: 1\r\nmodel:\r\n  depth: 2\r\n  d_model: x\r\n",
    "carriage returns alone": "seed: 1\rmodel:\r  depth: x\r",
    "tabs for spaces": "model:\n\tdepth: 2\ntrain:\n  lr:\t1\n\t\n  \tsteps: 3",
    "a byte order mark": b"\xef\xbb\xbfseed: x",
    "a byte order mark inside": b"seed: 1\n\xef\xbb\xbfmodel: {}",
    "UTF-16, big end": b"\xfe\xff" + "seed: 1".encode("utf-16-be"),
    "UTF-16 without a mark": "seed: 1".encode("utf-16-le"),
    "overlong UTF-8": b"seed: \xc0\xb1\nname: \xe0\x80\xaf",
    "a surrogate as bytes": b"name: \xed\xa0\x80",
    "beyond Unicode": b"name: \xf5\x80\x80\x80",
    "64 KiB": b"seed: 1 #" + b"x" * (64 * 1024 - 9),
    "64 KiB and one byte": b"seed: 1 #" + b"x" * (64 * 1024 - 8),
    "16 levels": "task: " + "{x: " * 15 + "1" + "}" * 15,
    "17 levels": "task: " + "{x: " * 16 + "1" + "}" * 16,
    "folded and kept": "name: >-\n  a\n  b\nmodel: |+\n\n\n",
    "a comment and nothing": "# only this",
    "escapes": 'name: "\\x1b\\u202e\\U0010ffff\\N\\_\\L\\P\\e"',
    "keys of space": "' ': 1\n'.': 2\n'..': 3\n'[key]': 4",
}


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
