"""Raw tokens of every width are read right in their layout, and refused in every other."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from deepstack.base.errors import ConfigError
from deepstack.tasks import Task, build_task
from deepstack.tasks.token_files import Reading, read_tokens
from deepstack.tasks.token_layouts import Layout

WIDTHS = ("uint8", "uint16", "uint32", "int32", "int64")
LAYOUTS = [layout for layout in get_args(Layout) if layout != "llm.c"]
VOCABULARIES = (2, 16, 65, 256, 1000, 50_257, 65_000, 128_256, 2_000_000)
REFUSED = r"seems to hold|found token|no whole number"


def tokens_of(vocabulary: int, kind: str) -> NDArray[np.int64]:
    random = np.random.default_rng(vocabulary)
    if kind == "frequent":  # few tokens are most of the text, as in a language
        return np.minimum(random.zipf(1.2, 12_000) - 1, vocabulary - 1)
    return random.integers(0, vocabulary, 12_000)


def build(path: Path, **options: Any) -> Task:
    options = {"path": str(path), **options}
    return build_task("tokens", options, seq_len=8, seed=0, family="decoder")


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("width", WIDTHS)
def test_tokens_are_read_right_or_refused(width: str, vocabulary: int, tmp_path: Path) -> None:
    if vocabulary - 1 > np.iinfo(width).max:
        pytest.skip("no such tokens")
    path = tmp_path / "a.bin"
    for kind in ("uniform", "frequent"):
        tokens = tokens_of(vocabulary, kind)
        tokens.astype(np.dtype(width).newbyteorder("<")).tofile(path)
        right = np.dtype(width).itemsize
        for layout in LAYOUTS:
            read = 2 if layout == "auto" else np.dtype(layout).itemsize
            # Uniform bytes are also uniform tokens of two bytes, so that the layout decides.
            alike = {("uint8", 256, 2), ("uint16", 65_000, 1)}
            if kind == "uniform" and (width, vocabulary, read) in alike:
                continue
            if read == right:
                (part,) = read_tokens(str(path), Reading(layout)).parts
                assert np.array_equal(part.tokens, tokens)
                continue
            with pytest.raises(ConfigError, match=REFUSED) as e:
                build(path, layout=layout)
            if "seems to hold" in str(e.value):
                name = "uint32" if width == "int32" else width
                assert f"task.layout={name}, or write .npy" in str(e.value)


@pytest.mark.parametrize("count", [600, 2_000, 8_000])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_few_thousand_bytes_tell_letters_from_wider_tokens(
    vocabulary: int, count: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.bin"
    for kind in ("uniform", "frequent"):
        tokens = tokens_of(vocabulary, kind)[:count]
        if vocabulary in (16, 65):
            tokens.astype("u1").tofile(path)
            with pytest.raises(ConfigError, match=r"hold uint8 .*; give task\.layout=uint8,"):
                build(path)
        if vocabulary <= 2**16:
            tokens.astype("<u2").tofile(path)
            assert build(path, layout="uint16").data["tokens"] == count


def test_a_hint_leads_to_the_right_tokens(tmp_path: Path) -> None:
    """65 tokens as int64, for which uint32 would give a 0 after each."""
    path, tokens = tmp_path / "c.bin", tokens_of(65, "uniform")
    tokens.astype("<i8").tofile(path)
    for layout in ("auto", "uint16", "uint32", "int32"):
        with pytest.raises(ConfigError, match=r"hold int64 .*; give task\.layout=int64,"):
            build(path, layout=layout)
    assert build(path, layout="int64").data["tokens"] == len(tokens)


def test_npy_without_a_header_is_raw_tokens(tmp_path: Path) -> None:
    """OLMo writes them so."""
    path, tokens = tmp_path / "part-0-00000.npy", tokens_of(50_257, "frequent")
    tokens.astype("<u2").tofile(path)
    with pytest.raises(ConfigError, match=r"no header of \.npy; for raw tokens, .*layout=uint16"):
        build(path)
    assert build(path, layout="uint16").data["tokens"] == len(tokens)
    with pytest.raises(ConfigError, match=r"hold uint16 and not uint32; give task.layout=uint16"):
        build(path, layout="uint32")
    np.save(path, tokens)
    assert build(path, layout="uint16").data["tokens"] == len(tokens)  # the header decides


@pytest.mark.parametrize(
    ("code", "width"), [(1, "uint8"), (4, "int32"), (5, "int64"), (8, "uint16")]
)
def test_the_index_beside_a_bin_states_its_type(code: int, width: str, tmp_path: Path) -> None:
    """Megatron writes an .idx beside each .bin: magic, version 1, type, …"""
    tokens = tokens_of(200, "frequent")
    for name in "ab":
        tokens.astype(width).tofile(tmp_path / f"{name}.bin")
        index = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([code]) + b"\0" * 40
        (tmp_path / f"{name}.idx").write_bytes(index)
    for path in (tmp_path, tmp_path / "*.bin"):
        assert build(path).data["tokens"] == 2 * len(tokens)
    (tmp_path / "b.idx").write_bytes(index.replace(bytes([code]) + b"\0" * 40, bytes([6])))
    with pytest.raises(ConfigError, match=r"b\.idx: found the type 6 of tokens; allowed 1: uint8"):
        build(tmp_path)
