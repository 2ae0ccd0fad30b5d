"""The tile maps of `plan`: each tile against the oracle's mask, each key block with one owner."""

import dataclasses
from math import ceil

import pytest
import torch
from cases import sample
from reference import visible

from flashattn_ext import _plan_gpus
from flashattn_ext.planning import Gpu, Plan, plan

pytest.importorskip("flashattn_ext._host")

SMALL = Gpu("small", 90, 5)  # so that there are few shares
WINDOWS = ((-1, -1), (-1, 0), (0, 0), (7, 3), (64, -1), (200, 0), (-1, 100), (300, 40))
GROUPS = ((1, 1), (6, 2), (8, 1), (20, 1), (34, 2), (4, 4))


@pytest.fixture(autouse=True)
def default_build(monkeypatch):
    """All head dims, whatever this build has."""
    monkeypatch.setattr(_plan_gpus, "BUILD", {})


def call_of(seed, **call):
    """What `sample` draws, without its number."""
    return call


def planned(heads, **call) -> Plan:
    return plan(heads=heads[0], heads_kv=heads[1], **{"gpu": SMALL, "head_dim": 64, **call})


def mask(made, tile):
    """(queries of the tile, keys of its sequence): who sees whom."""
    problem = made.problem
    sq, sk = problem.queries[tile.sequence], problem.keys[tile.sequence]
    assert tile.keys == sk and tile.queries.stop <= sq
    i, j = torch.tensor(tile.queries)[:, None], torch.arange(sk)[None, :]
    return visible(i, j, sq, sk, *problem.window)


def expected_states(made, tile, block_keys):
    """A key past the end of its sequence is seen by nobody."""
    missing = tile.key_blocks * block_keys - tile.keys
    seen = torch.nn.functional.pad(mask(made, tile), (0, missing)).unflatten(1, (-1, block_keys))
    some, whole = seen.any(dim=2).any(dim=0), seen.all(dim=2).all(dim=0)
    pairs = zip(some.tolist(), whole.tolist(), strict=True)
    return [
        "clean" if all_of_it else "masked" if any_of_it else "skipped"
        for any_of_it, all_of_it in pairs
    ]


def check_parts(tile, states, grid):
    """Needed key blocks have one thread block each, in order; a thread block has a part only once,
    and there is one even where no key is seen."""
    needed = [n for n, state in enumerate(states) if state != "skipped"]
    assert [n for part in tile.parts for n in range(part.begin, part.end)] == needed
    owners = [part.thread_block for part in tile.parts]
    assert owners and len(set(owners)) == len(owners) and owners == sorted(owners)
    assert all(0 <= x < grid[0] and 0 <= y < grid[1] for x, y in owners)
    assert all(part.begin < part.end for part in tile.parts[1:])


def check(made):
    """All maps of a plan: their tiles, and that these are all rows of the call once."""
    rows = set()
    maps = made.tile_maps()
    assert [tile_map.launch for tile_map in maps] == list(made.tiled_launches)
    for tile_map in maps:
        rows_of_tile, block_keys = tile_map.launch.tile
        for tile in tile_map.tiles:
            assert len(tile.heads) == tile_map.launch.packed_heads
            assert len(tile.heads) * len(tile.queries) <= rows_of_tile
            assert tile.key_blocks == ceil(tile.keys / block_keys)
            states = [tile.state(n) for n in range(tile.key_blocks)]
            assert states == expected_states(made, tile, block_keys), tile
            check_parts(tile, states, tile_map.launch.grid)
            group = made.problem.heads // made.problem.heads_kv
            assert tile.heads.start // group == (tile.heads.stop - 1) // group
            mine = {(tile.sequence, q, h) for q in tile.queries for h in tile.heads}
            assert not mine & rows
            rows |= mine
        check_shares(tile_map)
    queries = enumerate(made.problem.queries)
    assert rows == {
        (n, q, h) for n, sq in queries for q in range(sq) for h in range(made.problem.heads)
    }


def check_shares(tile_map):
    """Equal shares of a list: as many as the plan says, each of one stretch of that size; the last
    one of each member of a team may be smaller."""
    shares = tile_map.launch.shares
    if shares is None:
        return
    taken = {}
    for tile in tile_map.tiles:
        for part in tile.parts:
            x, _ = part.thread_block
            blocks = part.end - part.begin if tile.key_blocks else 1
            taken[x] = taken.get(x, 0) + blocks
    assert len(tile_map.tiles) == shares.tiles
    assert sorted(taken) == list(range(shares.busy))
    filled_up = shares.entries - sum(taken.values())
    if filled_up:  # tiles are few: entries without a key block, up to a multiple of 2 or 4
        assert filled_up <= 3 * shares.tiles < 3 * tile_map.launch.grid[0]
        assert all(taken[x] <= shares.size for x in taken)
    else:
        assert all(taken[x] == shares.size for x in range(shares.busy - shares.team))
        assert len({taken[x] for x in range(shares.busy - shares.team, shares.busy)}) == 1
    assert sum(len(tile.parts) > 1 for tile in tile_map.tiles) == shares.cut


@pytest.mark.parametrize(
    "call",
    sample(
        45,
        seed=70,
        kind=call_of,
        lengths=(
            {"batch": 2, "seqlen_q": 300, "seqlen_k": 300},
            {"batch": 1, "seqlen_q": 5, "seqlen_k": 400},
            {"batch": 2, "seqlen_q": 290, "seqlen_k": [100, 0]},
            {"batch": 4, "seqlen_q": [0, 1, 129, 300], "seqlen_k": [9, 64, 65, 310]},
            {"batch": 3, "seqlen_q": [257, 3, 40], "seqlen_k": [128, 700, 0]},
        ),
        window_size=WINDOWS,
        heads=GROUPS,
        head_dim=(32, 64, 128, 160, 192, 256),
        gpu=("A100", SMALL),
    ),
    ids=str,
)
def test_prefill(call):
    made = planned(**call)
    check(made)
    assert [launch.role for launch in made.tiled_launches] == ["prefill"]


@pytest.mark.parametrize(
    "call",
    sample(
        96,
        seed=71,
        kind=call_of,
        lengths=(
            {"batch": 3, "seqlen_q": 1, "seqlen_k": [1000, 0, 300]},
            {"batch": 9, "seqlen_q": 1, "seqlen_k": [40] * 8 + [900]},
            {"batch": 2, "seqlen_q": 3, "seqlen_k": 500, "new_tokens": 3},
            {"batch": 2, "seqlen_q": 150, "seqlen_k": [200, 640]},
            {"batch": 5, "seqlen_q": [1, 150, 0, 5, 20], "seqlen_k": [700, 333, 64, 64, 1]},
            {"batch": 2, "seqlen_q": [1, 2], "seqlen_k": [90, 700], "max_seqlen_q": 400},
        ),
        splits=(
            {}, {}, {"num_splits": 1}, {"num_splits": 3}, {"num_splits": 40}, {"split_size": 192},
        ),
        window_size=WINDOWS,
        heads=GROUPS,
        head_dim=(64, 128, 160, 256),
        cache=("contiguous", 16),
        gpu=("L4", SMALL, "H200"),
    ),
    ids=str,
)  # fmt: skip
def test_over_a_cache(call):
    check(planned(**call))


def test_all_kinds_of_launches_are_met():
    """The calls above are drawn at random."""
    roles, splits = set(), set()
    for seqlen_q in (1, 3, 8, 150):
        for number in (0, 1, 3):
            made = planned(
                (8, 1), batch=1, seqlen_q=seqlen_q, seqlen_k=900, cache=16, num_splits=number
            )
            check(made)
            roles |= {launch.role for launch in made.tiled_launches}
            splits |= {launch.splits for launch in made.tiled_launches}
    assert roles == {"decode", "wide decode", "short chunk", "chunk"} and {None, 3} <= splits


def owners(tile_map):
    return [[part.thread_block for part in tile.parts] for tile in tile_map.tiles]


def test_the_heaviest_tile_of_a_sequence_starts_first():
    (tile_map,) = planned((1, 1), batch=2, seqlen_q=300, seqlen_k=300, causal=True).tile_maps()
    assert owners(tile_map) == [[(n, 0)] for n in (2, 1, 0, 5, 4, 3)]
    assert [len(tile.queries) for tile in tile_map.tiles] == [128, 128, 44] * 2


def test_given_splits_by_hand():
    made = planned((2, 2), batch=1, seqlen_q=1, seqlen_k=500, cache=16, num_splits=3)
    (tile_map,) = made.tile_maps(heads=[1])
    (tile,) = tile_map.tiles
    # 8 blocks of 64 keys, of which the last has 52; head 1 is the second tile
    assert [(p.thread_block, p.begin, p.end) for p in tile.parts] == [
        ((1, 0), 0, 3), ((1, 1), 3, 6), ((1, 2), 6, 8),
    ]  # fmt: skip
    assert [tile.state(n) for n in range(8)] == ["clean"] * 7 + ["masked"]
    fixed = planned((2, 2), batch=1, seqlen_q=1, seqlen_k=500, cache=16, split_size=192)
    assert [(p.begin, p.end) for p in fixed.tile_maps()[0].tiles[0].parts] == [
        (0, 3), (3, 6), (6, 8),
    ]  # fmt: skip


def test_a_choice_is_a_part_of_the_whole():
    made = planned(
        (8, 2), batch=5, seqlen_q=[1, 150, 1, 5, 40], seqlen_k=[700, 333, 64, 200, 90], cache=16
    )
    for whole, some in zip(
        made.tile_maps(), made.tile_maps(sequences=[4, 0, 1], heads=[5]), strict=True
    ):
        expected = [t for t in whole.tiles if t.sequence in (0, 1, 4) and 5 in t.heads]
        assert expected and list(some.tiles) == expected


@pytest.mark.parametrize(
    "choice, message",
    [
        ({"sequences": [2]}, "sequences: expected ints from 0 to 1, got 2"),
        ({"sequences": [-1]}, "sequences: expected ints from 0 to 1, got -1"),
        ({"sequences": 0}, "sequences: expected None or a list of ints, got 0"),
        ({"heads": [3]}, "heads: expected ints from 0 to 2, got 3"),
        ({"heads": [True]}, "heads: expected ints from 0 to 2, got True"),
    ],
)
def test_choices_that_do_not_fit(choice, message):
    made = planned((3, 3), batch=2, seqlen_q=9, seqlen_k=9)
    with pytest.raises(ValueError, match=message):
        made.tile_maps(**choice)


def test_too_many_parts_are_refused():
    made = planned((128, 128), batch=2**14, seqlen_q=1, seqlen_k=9)
    with pytest.raises(ValueError, match="sequences, heads: more than 1048576 parts of tiles"):
        made.tile_maps()
    (tile_map,) = made.tile_maps(sequences=[2**14 - 1], heads=[127])
    assert owners(tile_map) == [[(2**21 - 1, 0)]]


def test_a_block_that_does_not_exist():
    (tile_map,) = planned((1, 1), batch=1, seqlen_q=4, seqlen_k=130).tile_maps()
    with pytest.raises(IndexError, match="block: expected 0 to 1, got 2"):
        tile_map.tiles[0].state(2)


def test_maps_are_values():
    made = planned((2, 1), batch=1, seqlen_q=4, seqlen_k=4)
    assert made.tile_maps() == made.tile_maps() and hash(made.tile_maps()[0].tiles)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.tile_maps()[0].tiles = ()
