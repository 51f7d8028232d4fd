"""Names of modules that are equal over depths."""

from collections.abc import Callable

import pytest
from torch import nn

from deepstack.tools.coordinates.stacks import find_stacks, names_of, outline_of


def names(build: Callable[[int], nn.Module], *depths: int) -> dict[int, dict[str, str]]:
    """Return depth -> path -> name, of the modules that have a name."""
    outlines = {depth: outline_of(build(depth)) for depth in depths}
    stacks = find_stacks(outlines)
    return {
        depth: {
            path: key
            for path, keys in names_of(outline, stacks).keys.items()
            for key in keys
            if path
        }
        for depth, outline in outlines.items()
    }


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(4), nn.Linear(4, 4)


class Listed(nn.Module):
    """Layers in a ModuleList, as in nanoGPT."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))


class Attributes(nn.Module):
    """Layers as attributes, beside other modules."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        for i in range(depth):
            self.add_module(f"layer{i}", Block())
        self.head = nn.Linear(4, 5)


def sequence(depth: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 4), *(Block() for _ in range(depth)), nn.ReLU(), nn.Linear(4, 2)
    )


def alternating(depth: int) -> nn.Module:
    layers = [part for _ in range(depth) for part in (nn.Linear(4, 4), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(4, 2))


def test_layers_of_a_list_become_first_middle_and_late() -> None:
    found = names(Listed, 4, 16)
    for depth, places in {4: (0, 2, 3), 16: (0, 8, 12)}.items():
        for place, word in zip(places, ("first", "middle", "late"), strict=True):
            assert found[depth][f"blocks.{place}.map"] == f"blocks.{word}.map"
        assert found[depth]["embed"] == "embed"
        assert sum(name.endswith("map") for name in found[depth].values()) == 3


def test_each_name_has_the_same_share_of_layers_before_it() -> None:
    found = names(Listed, 2, 6, 10)
    for depth, paths in found.items():
        share = {
            key: int(path.split(".")[1]) / depth for path, key in paths.items() if "map" in path
        }
        assert share == {"blocks.first.map": 0, "blocks.middle.map": 0.5}


@pytest.mark.parametrize("depths", [(4, 8), (2, 4, 12)])
def test_modules_before_and_after_the_layers_keep_their_names(depths: tuple[int, ...]) -> None:
    for depth, found in names(sequence, *depths).items():
        assert found["0"] == "0" and found["1.map"] == "first.map"
        assert found[str(depth + 1)] == "-2" and found[str(depth + 2)] == "-1"
    for found in names(Attributes, *depths).values():
        assert found["layer0.map"] == "first.map"
        assert found["embed"] == "embed" and found["head"] == "head"


def test_a_layer_of_two_parts_is_one_layer() -> None:
    found = names(alternating, 4, 8)
    assert found[8]["8"] == "middle.0" and found[8]["9"] == "middle.1"
    assert found[4]["4"] == "middle.0" and found[8]["16"] == found[4]["8"] == "-1"


def test_without_layers_that_depend_on_depth_every_path_is_a_name() -> None:
    assert names(Listed, 4)[4] == {path: path for path in names(Listed, 4)[4]}
