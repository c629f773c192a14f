"""Block tables, as the scheduler's side keeps them."""

from types import SimpleNamespace

from kvjax.groups import CacheLayout, FullAttention, GroupSpec, Recurrent, SlidingWindow
from kvjax.serving.vllm.tracked import Tracked, load_tables

LAYOUT = CacheLayout(
    [
        GroupSpec("full0", FullAttention(), 16, block_bytes=4),
        GroupSpec("sliding1", SlidingWindow(20), 8, block_bytes=4),
        GroupSpec("state2", Recurrent(), 8, block_bytes=4),
    ]
)


SLOTS = {"state2"}


def tracked(num_computed, num_scheduled, blocks):
    made = Tracked(SimpleNamespace(num_preemptions=0))
    made.begin(blocks, num_computed, num_scheduled)
    return made


def lists(tables):
    return {name: table.tolist() for name, table in tables.items()}


def test_what_vllm_may_have_freed_is_not_stored():
    """Ids of blocks that left the window stay in the tables: vLLM tells of new ones only."""
    one = tracked(0, 32, [[1, 2], [3, 4, 5, 6], [0]])
    assert lists(one.store_tables(LAYOUT, 32, SLOTS))["sliding1"] == [3, 4, 5, 6], "all that the first step wrote"
    one.step([[7, 8], [9, 10, 11, 12], []], 32, 32)
    assert lists(one.store_tables(LAYOUT, 64, SLOTS))["sliding1"] == [-1, 4, 5, 6, 9, 10, 11, 12], (
        "from 13 on, as 32 needs"
    )
    one.step(None, 64, 1)
    assert lists(one.store_tables(LAYOUT, 64, SLOTS)) == {
        "full0": [1, 2, 7, 8],
        "sliding1": [-1, -1, -1, -1, -1, 10, 11, 12],
        "state2": [-1] * 8,
    }


def test_a_state_is_stored_only_from_where_the_step_ended():
    one = tracked(0, 32, [[1, 2], [3, 4, 5, 6], [0]])
    assert lists(one.store_tables(LAYOUT, 32, SLOTS))["state2"] == [-1, -1, -1, 0]
    assert lists(one.store_tables(LAYOUT, 24, SLOTS))["state2"] == [-1, -1, -1], "the slot holds the state at 32"
    one.step(None, 32, 3)
    assert lists(one.store_tables(LAYOUT, 35, SLOTS))["state2"] == [-1, -1, -1, -1, -1], "no block ends at 35"


def test_states_in_blocks_are_in_the_block_that_ends_there():
    one = tracked(0, 32, [[1, 2], [3, 4, 5, 6], [0, 0, 0, 8]])
    assert lists(one.store_tables(LAYOUT, 32, ()))["state2"] == [-1, -1, -1, 8]
    one.step([[], [], [9]], 32, 1)
    assert lists(one.store_tables(LAYOUT, 32, ()))["state2"] == [-1, -1, -1, -1], "vLLM frees it some steps later"
    assert lists(one.store_tables(LAYOUT, 33, ()))["state2"] == [-1, -1, -1, -1, -1]
    tables = load_tables(LAYOUT, [[1, 2, 9], [0, 4, 5, 6], [0, 0, 0, 7]], 32, ())
    assert lists(tables)["state2"] == [-1, -1, -1, 7]


def test_a_load_goes_to_all_blocks_but_null_ones():
    tables = load_tables(LAYOUT, [[1, 2, 9], [0, 4, 5, 6], [7]], 32, SLOTS)
    assert lists(tables) == {"full0": [1, 2, 9], "sliding1": [-1, 4, 5, 6], "state2": [-1, -1, -1, 0]}


def test_a_preempted_request_has_no_blocks_and_may_store_again():
    one = tracked(0, 32, [[1, 2], [3, 4, 5, 6], [0]])
    one.admitted, one.stores = True, False
    assert not one.lost_its_blocks
    one.request.num_preemptions = 1
    assert one.lost_its_blocks
    one.forget_blocks()
    assert (one.tables, one.computed, one.admitted, one.stores, one.lost_its_blocks) == (None, 0, False, True, False)
