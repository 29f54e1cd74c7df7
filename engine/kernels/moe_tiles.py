"""The tiles of the products of a mixture of experts, by the bits of a weight: the fastest in measurements."""

from __future__ import annotations

import math
from typing import NamedTuple

from engine.kernels.moe_route import Form, form_for


class Tile(NamedTuple):
    """The tile of weights of a program: `n` rows (gate_up: n gate rows and n up rows), `k` columns at a time. `stages`:
    the number of tiles that are loaded ahead."""

    n: int
    k: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """The tiles of the two products."""

    rows: int  # pairs in a tile
    narrow: bool  # True: the product is transposed: its rows are weights, its few columns are pairs
    gate_up: Tile
    down: Tile


FEW_PAIRS = Tiles(32, True, Tile(64, 128, 4, 4), Tile(128, 64, 4, 4))
# (the largest number of pairs of an expert, if all experts get equally many; the tiles)
SIXTEEN_BITS = (
    (10, Tiles(16, True, Tile(64, 128, 4, 4), Tile(128, 128, 4, 3))), (20, FEW_PAIRS),
    (48, Tiles(64, False, Tile(128, 64, 4, 3), Tile(128, 64, 4, 4))),
    (math.inf, Tiles(128, False, Tile(128, 64, 8, 4), Tile(256, 64, 8, 4))),
)
EIGHT_BITS = (  # gate_up rounds its result in groups of its n columns; down takes a group at a time
    (10, Tiles(16, True, Tile(128, 128, 4, 3), Tile(128, 128, 4, 4))),
    (20, FEW_PAIRS),
    (128, Tiles(64, False, Tile(128, 128, 8, 3), Tile(128, 128, 8, 4))),
    (math.inf, Tiles(64, False, Tile(64, 128, 4, 4), Tile(128, 64, 4, 6))),
)


FOUR_BITS = (  # k: words of a row that are loaded at a time
    (10, Tiles(16, True, Tile(64, 64, 4, 4), Tile(64, 64, 4, 3))),
    (20, Tiles(32, True, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3))),
    (64, Tiles(64, True, Tile(64, 64, 4, 2), Tile(128, 64, 8, 2))),
    (math.inf, Tiles(128, True, Tile(128, 32, 8, 3), Tile(128, 32, 8, 4))),
)
BY_BITS = {4: FOUR_BITS, 8: EIGHT_BITS, 16: SIXTEEN_BITS}


def tiles_for(tokens: int, per_token: int, experts: int, bits: int = 16) -> Tiles:
    """Returns the tiles for a number of tokens and for weights of so many bits."""
    per_expert = tokens * per_token / experts
    return next(tiles for most, tiles in BY_BITS[bits] if per_expert <= most)


def forms(most: int, hidden: int, experts: int, per_token: int, bits: int = 16) -> list[int]:
    """Returns one step size, in tokens, for each form of the kernels that steps of up to `most` tokens use."""
    found: dict[tuple[Tiles, Form], int] = {}
    for tokens in range(1, most + 1):
        tiles = tiles_for(tokens, per_token, experts, bits)
        found.setdefault((tiles, form_for(tokens, hidden, experts, per_token, tiles.rows)), tokens)
    return list(found.values())
