"""Any bytes as a configuration give a configuration or one message, and soon."""

import multiprocessing
import os
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path
from unittest.mock import patch

import pytest
from helpers import ROOT
from helpers.bad_configs import BAD, GOOD, HOSTILE
from helpers.command_line import typed
from helpers.sampling import turn

from deepstack import config as conf
from deepstack.base.errors import ConfigError

LIMIT = 3.0  # seconds of CPU time; a text of 6,000 keys takes 0.5
MEGABYTES = 60  # above the 40 of a command that reads nothing

SYNTAX = [
    b"&a ", b"*a", b"<<: ", b"!!python/object/apply:os.system ", b"!x ", b"---\n", b"...\n",
    b"%YAML 1.1\n", b"? ", b"- ", b": ", b"[", b"]", b"{", b"}", b"|\n", b">\n", b"'", b'"', b"#",
    b",", b"\t", b"\r\n", b"\r", b"\0", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80",
    b"\xe2\x80\xa8", b"\xc2\x85", b".nan", b"-.inf", b"1e400", b"-0", b"0x10", b"0o17", b"010",
    b"1_000", b"9" * 50, b"null", b"~", b"on", b"yes", b"\\u0000", b"\x1b[31m", b"\xe2\x80\xae",
    "𝕕epth".encode(), "dеpth".encode(),
]  # fmt: skip


def encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def mutated(dice: random.Random, good: list[bytes]) -> bytes:
    """A valid configuration after a few accidents: pieces deleted, repeated, replaced or put in."""
    data = bytearray(dice.choice(good))
    for _ in range(dice.randrange(1, 6)):
        at = dice.randrange(len(data) + 1)
        length = dice.choice([0, dice.randrange(40)])
        opening = dice.choice([b"[", b"{a: ", b"- ", b"? ", b"[{", b"a:\n ", b"'[", b"!x ["])
        letter = dice.choice([b"9", b"a", b".", b"-", b"\\", b"'", b" ", b"_", "é".encode()])
        pieces = [b"", dice.choice(SYNTAX), data[at : at + 40] * 50, dice.randbytes(1)]
        pieces += [opening * dice.choice([3, 17, 2000]), letter * dice.choice([100, 60_000])]
        data[at : at + length] = dice.choice(pieces)
    return bytes(data[: 64 * 1024 + dice.choice([-5, 0, 1, 2])])


def cases(dice: random.Random) -> Iterator[bytes]:
    """Without end: mutated configurations, random bytes and pieces of syntax."""
    files = sorted((ROOT / "configs").glob("*.yaml"))
    good = [GOOD.encode(), *(file.read_bytes() for file in files)]
    while True:
        yield mutated(dice, good)
        yield mutated(dice, good)
        yield dice.randbytes(dice.choice([3, 30, 300, 3000]))
        yield b"".join(dice.choices(SYNTAX, k=dice.randrange(1, 40)))


def answer(data: bytes, overrides: Sequence[str] = ()) -> str:
    """The message that a text gets, '' for a configuration; anything else is raised."""
    message = ""
    for read in (conf.parse_config, conf.parse_study):
        try:
            read(data, "f.yaml", overrides)
        except ConfigError as error:
            message = str(error)
            assert message and len(message) < 20_000
            assert message.replace("\n", "").isprintable()
            lines = message.splitlines()
            assert overrides or all(line.startswith(("f.yaml", "...")) for line in lines)
    return message


@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 700), *(pytest.param(n, 10_000, marks=turn(n, 2)) for n in (1, 2))],
)
def test_any_bytes_are_a_configuration_or_get_a_message(seed: int, count: int) -> None:
    answers, slowest = [], 0.0
    for data in islice(cases(random.Random(seed)), count):
        begin = time.process_time()
        answers.append(answer(data))
        slowest = max(slowest, time.process_time() - begin)
    assert "" in answers and any(answers)
    assert slowest < 2 * LIMIT  # two readings of a text


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_soon(name: str) -> None:
    begin = time.process_time()  # of this process: the machine may be busy with others
    answer(encoded(HOSTILE[name]))
    assert time.process_time() - begin < 10  # what grows with the square would take minutes


def test_any_override_is_a_setting_or_gets_a_message() -> None:
    dice = random.Random(0)
    pieces = [*map(bytes.decode, SYNTAX[:20]), "model", "depth", "sweep", "seed", "1", "=", "a.b"]
    for _ in range(400):
        text = "".join(dice.choices(pieces, k=dice.randrange(1, 30)))
        answer(b"", [text, f"model.depth={text}", f"{text}=1"])


TRAIN = ["train", "f.yaml", "--out", "out"]
SWEEP = ["sweep", "f.yaml", "--out", "out"]


def forbid_torch(folder: Path) -> None:
    """Prepare a process: work in the folder, and let the import of torch fail."""
    os.chdir(folder)
    patch.dict(sys.modules, torch=None).start()
    import_module("pandas")  # else the first text that is accepted imports it
    typed("check", "nothing.yaml")  # imports and caches, the same for every text


def message_of_command(words: list[str], data: bytes) -> str:
    """Run a command on a text in bounded time and memory.

    Return its message, '' if the text is accepted and the command needs torch.
    """
    Path("f.yaml").write_bytes(data)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEGABYTES * 10**6
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    begin = time.process_time()
    done = typed(*words)
    assert time.process_time() - begin < LIMIT, data
    assert os.listdir() == ["f.yaml"], data
    if isinstance(done.exception, ImportError) and done.exception.name == "torch":
        return ""
    message = str(done.output)
    assert done.exit_code == 2 and message.startswith("deepstack: f.yaml"), (data, message)
    assert message.replace("\n", "").isprintable() and message.count("\n") <= 21
    return message


def messages_of(texts: Sequence[tuple[list[str], bytes]], folder: Path) -> list[str]:
    """Run a command on each text, in one process that has not imported torch."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, forbid_torch, (folder,)) as process:
        return list(process.map(message_of_command, *zip(*texts, strict=True)))


@pytest.mark.slow
def test_bad_and_hostile_texts_through_the_command_line(tmp_path: Path) -> None:
    """Both tables and a sample of the fuzz."""
    bad = [(TRAIN, encoded(text)) for text, _ in BAD.values()]
    texts = [*map(encoded, HOSTILE.values()), *islice(cases(random.Random(8)), 1000)]
    messages = messages_of([*bad, *zip(cycle([TRAIN, TRAIN, SWEEP]), texts)], tmp_path)
    assert all(messages[: len(bad)])
    assert sum(map(bool, messages)) > 0.8 * len(messages)


GRID = f"sweep: {{grid: {{seed: {[*range(3200)]}, train.steps: {[*range(1, 3201)]}}}}}"
ABSURD = [
    (TRAIN, "model: {depth: 1000000000}", "allowed an integer from 1 to 1000000"),
    (TRAIN, "model: {depth: 1000000, d_model: 65536}", "a run of about"),
    (TRAIN, "train: {batch_size: 1048576}\ntask: {seq_len: 65536}", "a run of about"),
    (SWEEP, GRID, "found 10,240,000 runs"),
]


def test_absurd_sizes_are_refused_with_an_estimate(tmp_path: Path) -> None:
    texts = [(words, text.encode()) for words, text, _ in ABSURD]
    for message, (_, text, part) in zip(messages_of(texts, tmp_path), ABSURD, strict=True):
        assert part in message, text
