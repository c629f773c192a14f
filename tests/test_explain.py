"""Explanations against the slow model, and the sentences of known cases."""

import pytest
from hypothesis import given

from kvjax import ChunkedLocal, FullAttention, Recurrent, Scratch, SlidingWindow, explain_hit, longest_hit
from kvjax.explain import GroupExplanation, ranges_text
from tests.oracles import law
from tests.oracles.layouts import cut, group, instances, lists, random_instance, seeded


def explained(instance):
    return explain_hit(
        instance.chunking,
        instance.num_tokens,
        instance.present,
        device_tokens=instance.device_tokens,
        resume_multiple=instance.resume_multiple,
    )


def resident(instance):
    """What is where, by the slow model."""
    on_device = law.held_by_device(instance.chunking, instance.device_tokens)
    return law.union(law.held_by_chunks(instance.chunking, instance.present), on_device), on_device


def floor(instance):
    prefixes = set(law.device_prefix(instance.chunking, instance.device_tokens).values())
    return prefixes.pop() if len(prefixes) == 1 else 0


def listed(ranges):
    return [i for first, last in ranges for i in range(first, last + 1)]


def cached_parts(explanation, instance):
    """Each cached group's explanation, with its spec and its tokens per chunk."""
    parts = {part.name: part for part in explanation.groups}
    return [(parts[spec.name], spec, tokens) for spec, tokens in law.cached_groups(instance.chunking)]


def runs(positions):
    """Ascending integers as maximal closed intervals."""
    found = []
    for position in positions:
        if found and position == found[-1][1] + 1:
            found[-1] = (found[-1][0], position)
        else:
            found.append((position, position))
    return found


@given(instances())
def test_the_hit_is_that_of_longest_hit_and_of_the_slow_model(instance):
    explanation = explained(instance)
    expected = law.longest_hit(
        instance.chunking, instance.num_tokens, instance.present, instance.device_tokens, instance.resume_multiple
    )
    hit = explanation.hit
    assert (hit.hit_tokens, lists(hit.load), hit.limited_by) == expected
    assert [part.name for part in explanation.groups] == list(instance.chunking.layout.names)


@given(instances())
def test_restorable_intervals_near_the_hit_equal_brute_force(instance):
    explanation, (has, _) = explained(instance), resident(instance)
    hit = explanation.hit.hit_tokens
    for part, spec, _ in cached_parts(explanation, instance):
        positions = [
            p
            for p in range(instance.num_tokens + 1)
            if law.required(spec.kind, spec.lookahead_tokens, p) <= has[spec.name]
        ]
        intervals = runs(positions)
        at = max(i for i, (first, _) in enumerate(intervals) if first <= hit)
        assert list(part.restorable) == intervals[at : at + 4]


@given(instances())
def test_a_group_alone_allows_what_it_can_restore(instance):
    explanation, (has, _) = explained(instance), resident(instance)
    for part, spec, _ in cached_parts(explanation, instance):
        allowed = [
            p
            for p in range(0, instance.num_tokens, instance.resume_multiple)
            if law.required(spec.kind, spec.lookahead_tokens, p) <= has[spec.name]
        ]
        assert part.alone == max(*allowed, floor(instance)) >= explanation.hit.hit_tokens


@given(instances())
def test_readings_equal_the_slow_model(instance):
    explanation, (_, on_device) = explained(instance), resident(instance)
    for part, spec, tokens in cached_parts(explanation, instance):
        for reading in (part.at_hit, part.at_next):
            if reading is None:
                continue
            back = 1 if isinstance(spec.kind, Recurrent) else 0
            needs = law.needed(spec.kind, reading.position)
            requires = law.required(spec.kind, spec.lookahead_tokens, reading.position)
            assert {t + back for t in range(*reading.needed_tokens)} == needs
            assert {t + back for t in range(*reading.required_tokens)} == requires
            assert {t + back for t in range(*reading.device_tokens)} == needs & on_device[spec.name]
            assert listed(reading.chunks) == law.chunks_with(requires, spec.kind, tokens)
            assert listed(reading.load_chunks) == law.chunks_with(needs - on_device[spec.name], spec.kind, tokens)
        assert listed(part.at_hit.load_chunks) == explanation.hit.load[spec.name].tolist()


@given(instances())
def test_missing_tokens_and_chunks_equal_the_slow_model(instance):
    explanation, (has, _) = explained(instance), resident(instance)
    for part, spec, tokens in cached_parts(explanation, instance):
        if explanation.next_tokens is None:
            assert (part.at_next, part.missing_chunks, part.missing_tokens) == (None, (), ())
            continue
        lacks = law.required(spec.kind, spec.lookahead_tokens, explanation.next_tokens) - has[spec.name]
        back = 1 if isinstance(spec.kind, Recurrent) else 0
        assert {t + back for start, stop in part.missing_tokens for t in range(start, stop)} == lacks
        assert all(start < stop for start, stop in part.missing_tokens)
        assert listed(part.missing_chunks) == law.chunks_with(lacks, spec.kind, tokens)


@given(instances())
def test_the_groups_with_missing_chunks_are_those_that_limit(instance):
    explanation = explained(instance)
    assert tuple(part.name for part in explanation.groups if part.missing_chunks) == explanation.hit.limited_by
    assert (explanation.next_tokens is None) == (explanation.hit.limited_by == ())
    assert (explanation.reason == "missing") == (explanation.next_tokens is not None)


@given(instances())
def test_the_missing_chunks_are_enough_and_none_is_too_many(instance):
    """With all of them the next candidate can be resumed from; without any one of them it cannot."""
    explanation = explained(instance)
    if explanation.next_tokens is None:
        return
    missing = {part.name: listed(part.missing_chunks) for part in explanation.groups if part.missing_chunks}

    def hit_with(added):
        present = {
            name: [*instance.present.get(name, ()), *added.get(name, ())] for name in {*instance.present, *added}
        }
        return longest_hit(
            instance.chunking,
            instance.num_tokens,
            present,
            device_tokens=instance.device_tokens,
            resume_multiple=instance.resume_multiple,
        ).hit_tokens

    assert hit_with(missing) == explanation.would_hit_tokens >= explanation.next_tokens
    for name, chunks in missing.items():
        for chunk_idx in chunks:
            short = missing | {name: [c for c in chunks if c != chunk_idx]}
            assert hit_with(short) != explanation.next_tokens


@given(instances())
def test_where_no_larger_hit_is_possible_the_reason_is_true(instance):
    explanation = explained(instance)
    if explanation.next_tokens is not None:
        return
    total, hit = instance.num_tokens, explanation.hit.hit_tokens
    assert explanation.would_hit_tokens is None
    assert explanation.sentence.startswith("No larger hit is possible")
    complete = law.held_by_chunks(instance.chunking, law.complete_chunks(instance.chunking, total))
    could = law.union(resident(instance)[0], complete)
    larger = [p for p in range(hit + 1, total) if not law.refusing(instance.chunking, could, p)]
    stuck = {
        name for name in could if all(name in law.refusing(instance.chunking, could, p) for p in range(hit + 1, total))
    }
    match explanation.reason:
        case "last_token":
            assert hit == total - 1 or (stuck and all(total in could[name] for name in stuck))
        case "resume_multiple":
            assert larger
            assert not stuck
            assert all(p % instance.resume_multiple for p in larger)
        case "incomplete":
            assert stuck
            assert all(f"group {name!r}" in explanation.sentence for name in stuck)
        case "no_common":
            assert not larger
            assert not stuck
        case _:
            raise AssertionError(explanation.reason)


def part_of(explanation, name):
    return next(part for part in explanation.groups if part.name == name)


def test_groups_that_disagree_are_told_apart():
    """B1. Full attention has 2 chunks of 16, states are at 16, 48 and 80: the hit is 16, not 80."""
    chunking = cut(group("full", FullAttention(), 16), group("state", Recurrent(), 16))
    found = explain_hit(chunking, 97, {"full": [0, 1], "state": [0, 2, 4]})
    assert (found.hit.hit_tokens, found.hit.limited_by) == (16, ("state",))
    assert (found.next_tokens, found.would_hit_tokens, found.reason) == (32, 32, "missing")
    assert found.sentence == "The hit would be 32 if group 'state' had chunk 1 (the state at 32)."
    assert part_of(found, "full").restorable == ((0, 32),)
    assert part_of(found, "full").alone == 32
    assert part_of(found, "state").restorable == ((16, 16), (48, 48), (80, 80))
    assert part_of(found, "state").alone == 80
    assert part_of(found, "state").missing_chunks == ((1, 1),)

    better = explain_hit(chunking, 97, {"full": [0, 1], "state": [0, 1, 2, 4]})
    assert better.hit.hit_tokens == 32
    assert better.sentence == "The hit would be 48 if group 'full' had chunk 2."


def test_a_hit_inside_a_block_and_one_that_the_last_token_limits():
    """B3. The device holds 40 tokens of blocks of 16; a full hit of 64 tokens is 63."""
    chunking = cut(group("full", FullAttention(), 16))
    found = explain_hit(chunking, 64, {}, device_tokens=40)
    assert found.hit.hit_tokens == 40
    assert found.sentence == "The hit would be 48 if group 'full' had chunk 2."
    (part,) = found.groups
    assert (part.at_hit.device_tokens, part.at_hit.load_chunks) == ((0, 40), ())
    assert (part.at_next.position, part.at_next.load_chunks) == (41, ((2, 2),))
    assert (part.missing_chunks, part.missing_tokens) == (((2, 2),), ((40, 41),))

    whole = explain_hit(chunking, 64, {"full": range(4)})
    assert (whole.hit.hit_tokens, whole.next_tokens, whole.reason) == (63, None, "last_token")
    assert whole.sentence == (
        "No larger hit is possible: the last token is always recomputed, so a request of 64 tokens resumes at 63 at "
        "most."
    )


def test_a_draft_head_that_looks_ahead_costs_a_block_not_the_hit():
    """B5. Full with a lookahead of one block, and states; all is stored of 33 tokens: the hit is 16, not 0."""
    chunking = cut(group("full", FullAttention(), 16, lookahead_tokens=16), group("state", Recurrent(), 16))
    found = explain_hit(chunking, 33, {"full": [0, 1], "state": [0, 1]})
    assert (found.hit.hit_tokens, found.next_tokens, found.reason) == (16, None, "incomplete")
    assert part_of(found, "full").at_hit.needed_tokens == (0, 16)
    assert part_of(found, "full").at_hit.required_tokens == (0, 32)
    assert part_of(found, "full").at_hit.load_chunks == ((0, 0),)
    assert found.sentence == (
        "No larger hit is possible yet: to resume past 16, group 'full' needs chunk 2 (it looks 16 tokens ahead), "
        "which ends at 48, past the 33 tokens of the request."
    )


def test_only_blocks_in_the_window_are_needed():
    """B8. Full in blocks of 256, a window of 128 in blocks of 64, a hit of 1,024: the last 2 window blocks."""
    chunking = cut(group("full", FullAttention(), 256), group("window", SlidingWindow(128), 64))
    found = explain_hit(chunking, 1281, {"full": range(5), "window": [14, 15, 19]}, resume_multiple=256)
    assert found.hit.hit_tokens == 1024
    window = part_of(found, "window")
    assert window.at_hit.needed_tokens == (897, 1024)
    assert window.at_hit.load_chunks == ((14, 15),)
    assert window.restorable == ((1023, 1024),)
    assert found.sentence == "The hit would be 1,280 if group 'window' had chunk 18."
    assert window.missing_tokens == ((1153, 1216),)


def test_an_attention_chunk_starts_with_nothing_to_read():
    """B9. Attention chunks of 8 in blocks of 4, 13 tokens: nothing is needed at 8, block 2 at 12."""
    chunking = cut(group("scout", ChunkedLocal(8), 4))
    found = explain_hit(chunking, 13, {})
    (part,) = found.groups
    assert (found.hit.hit_tokens, part.restorable) == (8, ((8, 8),))
    assert (part.at_hit.needed_tokens, part.at_hit.chunks) == ((8, 8), ())
    assert found.sentence == "The hit would be 12 if group 'scout' had chunk 2."
    stored = explain_hit(chunking, 13, {"scout": [2]})
    assert (stored.hit.hit_tokens, stored.groups[0].at_hit.load_chunks) == (12, ((2, 2),))


def test_a_state_at_the_very_end_of_a_prompt_is_of_no_use_to_it():
    """D1. States every 1,408 tokens, a prompt of 2,816 fully stored: the state at 2,816 holds its last token."""
    chunking = cut(group("full", FullAttention(), 1408), group("state", Recurrent(), 1408))
    present = {"full": [0, 1], "state": [0, 1]}
    found = explain_hit(chunking, 2816, present)
    assert (found.hit.hit_tokens, found.reason) == (1408, "last_token")
    assert found.sentence == (
        "No larger hit is possible: the next state of group 'state' is at 2,816, the end of the request, whose last "
        "token is always recomputed."
    )
    assert part_of(found, "state").restorable == ((1408, 1408), (2816, 2816))
    assert explain_hit(chunking, 2817, present).hit.hit_tokens == 2816
    assert explain_hit(chunking, 1408, present).hit.hit_tokens == 0


def test_a_state_past_the_request_is_named():
    chunking = cut(group("full", FullAttention(), 4), group("state", Recurrent(), 16))
    found = explain_hit(chunking, 28, {"full": range(7), "state": [0, 1]})
    assert found.reason == "incomplete"
    assert found.sentence == (
        "No larger hit is possible yet: the next state of group 'state' is at 32, past the 28 tokens of the request."
    )


def test_resume_multiple_is_named_where_it_limits():
    chunking = cut(group("full", FullAttention(), 4))
    beyond = explain_hit(chunking, 13, {"full": range(3)}, resume_multiple=8)
    assert (beyond.hit.hit_tokens, beyond.reason) == (8, "resume_multiple")
    assert beyond.sentence == (
        "No larger hit is possible: hits are multiples of 8 (`resume_multiple`), and the next, 16, is past 12, the "
        "largest position of a request of 13 tokens (the last token is always recomputed)."
    )
    at_the_end = explain_hit(chunking, 16, {"full": range(3)}, resume_multiple=8)
    assert (at_the_end.hit.hit_tokens, at_the_end.reason) == (8, "resume_multiple")
    assert "the next, 16, is past 15, the largest position" in at_the_end.sentence
    chunking = cut(group("full", FullAttention(), 4), group("state", Recurrent(), 16))
    between = explain_hit(chunking, 41, {}, resume_multiple=12)
    assert (between.hit.hit_tokens, between.reason) == (0, "resume_multiple")
    assert between.sentence == (
        "No larger hit is possible: hits are multiples of 12 (`resume_multiple`), and none from 12 to 40 could be "
        "restored, even with every complete chunk; 16 could, but is no such multiple."
    )


def test_groups_that_share_no_position_are_named_as_such():
    """Full reaches 12 of the 17 tokens; the only state in reach is at 16."""
    chunking = cut(group("full", FullAttention(), 12), group("state", Recurrent(), 16))
    found = explain_hit(chunking, 18, {})
    assert (found.hit.hit_tokens, found.reason) == (0, "no_common")
    assert found.sentence == (
        "No larger hit is possible yet: even with every chunk that is complete at 18 tokens, no position above 0 can "
        "be restored in all groups."
    )


def test_several_groups_with_something_missing_are_all_named():
    groups = [group("a", FullAttention(), 4), group("b", SlidingWindow(5), 4), group("c", Recurrent(), 8)]
    found = explain_hit(cut(*groups), 17, {"a": [0]})
    assert found.sentence == (
        "The hit would be 8 if group 'a' had chunk 1, group 'b' had chunk 1 and group 'c' had chunk 0 (the state at 8)."
    )


def test_the_hit_with_the_missing_chunks_may_pass_the_next_candidate():
    chunking = cut(group("full", FullAttention(), 16))
    found = explain_hit(chunking, 97, {"full": [0, 2, 3]})
    assert (found.hit.hit_tokens, found.next_tokens, found.would_hit_tokens) == (16, 17, 64)
    assert found.sentence == "The hit would be 64 if group 'full' had chunk 1."


def test_long_lists_of_chunks_are_cut_short_with_their_number():
    assert ranges_text(tuple((i, i) for i in range(0, 40, 2))) == "0, 2, 4, 6, 8, 10, 12, 14, … (20 in all)"
    chunking = cut(group("full", FullAttention(), 1))
    found = explain_hit(chunking, 101, {"full": range(0, 100, 2)}, resume_multiple=100)
    assert found.sentence == "The hit would be 100 if group 'full' had chunks 1, 3, 5, 7, 9, 11, 13, 15, … (50 in all)."


def test_scratch_groups_keep_their_place_and_have_no_part():
    chunking = cut(group("ring", Scratch(), 4), group("full", FullAttention(), 4))
    assert explain_hit(chunking, 9, {}).groups[0] == GroupExplanation("ring", None)


def test_a_device_prefix_is_a_hit_although_a_lookahead_is_not_there():
    chunking = cut(group("draft", FullAttention(), 4, lookahead_tokens=4))
    found = explain_hit(chunking, 41, {}, device_tokens=10)
    (part,) = found.groups
    assert (found.hit.hit_tokens, part.alone, part.restorable) == (10, 10, ((0, 6),))
    assert found.sentence == "The hit would be 12 if group 'draft' had chunks 2-3."


def test_device_prefixes_of_several_groups_are_told_apart():
    chunking = cut(group("a", FullAttention(), 4), group("b", SlidingWindow(5), 4))
    found = explain_hit(chunking, 33, {"a": range(4)}, device_tokens={"a": 6, "b": 14})
    assert found.hit.hit_tokens == 14
    assert part_of(found, "a").at_hit.device_tokens == (0, 6)
    assert part_of(found, "b").at_hit.device_tokens == (10, 14)
    assert found.sentence == "The hit would be 16 if group 'b' had chunk 3."


def test_intervals_that_are_far_are_whole_and_few():
    """The first spans that are looked at end inside these intervals; neither may cut them."""
    chunking = cut(group("local", SlidingWindow(1024), 16), group("scout", ChunkedLocal(8192), 16))
    present = {"local": [*range(20_000), *range(30_000, 60_000)], "scout": range(10_000)}
    found = explain_hit(chunking, 1_000_000, present)
    assert found.hit.hit_tokens == 958_464
    assert part_of(found, "local").restorable == ((30_000 * 16 + 1023, 960_000),)
    scout = part_of(found, "scout").restorable
    assert scout == ((958_464, 958_464), (966_656, 966_656), (974_848, 974_848), (983_040, 983_040))
    straddling = explain_hit(cut(group("local", SlidingWindow(3), 2)), 9000, {"local": [0, 2, 4, *range(6, 4000)]})
    assert straddling.groups[0].restorable == ((14, 8000),)
    both = cut(group("full", FullAttention(), 16), group("local", SlidingWindow(129), 16))
    present = {"full": range(7), "local": [*range(10), *range(20, 30), *range(40, 50), *range(60, 5000)]}
    above = part_of(explain_hit(both, 1_000_000, present), "local")
    assert above.restorable == ((0, 160), (448, 480), (768, 800), (1088, 80_000))
    low = explain_hit(chunking, 1_000_000, {"local": range(20_000), "scout": range(10_000)})
    assert part_of(low, "scout").restorable[0] == (319_488, 319_488)
    assert part_of(low, "local").restorable == ((0, 320_000),)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_tokens": 0}, "`num_tokens` must be a positive int, got 0"),
        ({"present": {"other": [0]}}, "`present` must name groups of the layout"),
        ({"present": {"a": [0.5]}}, "`present` of group 'a'"),
        ({"device_tokens": 9}, "`device_tokens` must be at most num_tokens - 1 = 8, got 9"),
        ({"resume_multiple": 0}, "`resume_multiple` must be a positive int, got 0"),
        ({"chunking": None}, "`chunking` must be a Chunking"),
    ],
)
def test_bad_arguments_are_refused_as_longest_hit_refuses_them(change, words):
    given = {"chunking": cut(group("a", FullAttention(), 4)), "num_tokens": 9, "present": {}} | change
    with pytest.raises(ValueError, match=r".") as refused:
        explain_hit(**given)
    assert words in str(refused.value)
    with pytest.raises(ValueError, match=r".") as same:
        longest_hit(**given)
    assert str(same.value) == str(refused.value)


def test_every_reason_occurs_among_random_lookups():
    """So that the properties above have looked at all of them."""
    reasons = {explained(random_instance(seeded(seed))).reason for seed in range(1500)}
    assert reasons == {"missing", "last_token", "resume_multiple", "incomplete", "no_common"}


def test_one_group_that_waits_for_a_later_chunk_makes_more_possible_later():
    """Of two groups in the way, one has its next state at the request's end and one past it: not for good."""
    chunking = cut(group("a", Recurrent(), 16), group("b", Recurrent(), 20))
    found = explain_hit(chunking, 16, {})
    assert found.reason == "incomplete"
    assert found.sentence.startswith("No larger hit is possible yet: ")
