"""Pictures of groups, chunks and the law, drawn from what the library's own functions return."""

import kvjax
from kvjax.law import needed

from .svg import BLUE, GREEN, GREY, INK, LIGHT_BLUE, PALE, RED, Axis, Picture

_LEFT, _WIDTH = 190, 640
_LAYOUT = kvjax.CacheLayout(
    [
        kvjax.GroupSpec("full", kvjax.FullAttention(), 16, block_bytes=65536),
        kvjax.GroupSpec("local", kvjax.SlidingWindow(32), 8, block_bytes=163840),
        kvjax.GroupSpec("state", kvjax.Recurrent(), 32, block_bytes=1048576),
    ]
)
_CHUNKING = kvjax.resolve_chunking(_LAYOUT, blocks_per_chunk={"local": 2})
_NUM_TOKENS = 128


def groups() -> str:
    """Returns the picture of three groups, their blocks and their chunks."""
    picture = Picture(860, 270, "Groups, blocks and chunks")
    axis = Axis(_LEFT, _WIDTH, _NUM_TOKENS)
    for row, group in enumerate(_LAYOUT.groups):
        y = 24 + row * 66
        tokens, per_chunk = group.tokens_per_block, _CHUNKING.tokens_per_chunk[row] or 0
        blocks = _CHUNKING.blocks_per_chunk[row]
        picture.text(10, y + 14, f"{group.name}: {type(group.kind).__name__}")
        picture.text(10, y + 32, f"{tokens} tokens, {(group.block_bytes or 0) // 1024} KiB a block", size=11, fill=GREY)
        picture.text(10, y + 46, f"{blocks} block{'s' * (blocks != 1)} a chunk", size=11, fill=GREY)
        for block in range(_NUM_TOKENS // tokens):
            x = axis.x(block * tokens)
            picture.box(x + 2, y + 5, axis.x(tokens) - _LEFT - 4, 26, LIGHT_BLUE)
            picture.text(x + (axis.x(tokens) - _LEFT) / 2, y + 23, str(block), at="middle", size=12)
        for chunk in range(_NUM_TOKENS // per_chunk):
            x = axis.x(chunk * per_chunk)
            picture.box(x + 0.5, y, axis.x(per_chunk) - _LEFT - 1, 36, "none", edge=BLUE)
    axis.draw(picture, 222, 16, "tokens. Filled: a block; framed: a chunk, what is stored, found and loaded")
    return picture.svg()


def law() -> str:
    """Returns the picture of the tokens that each kind needs to compute one token."""
    position = 100
    kinds = (
        ("FullAttention()", kvjax.FullAttention()),
        ("SlidingWindow(32)", kvjax.SlidingWindow(32)),
        ("ChunkedLocal(64)", kvjax.ChunkedLocal(64)),
        ("Recurrent()", kvjax.Recurrent()),
        ("Scratch()", kvjax.Scratch()),
    )
    picture = Picture(860, 300, "What each kind of attention needs")
    axis = Axis(_LEFT, _WIDTH, _NUM_TOKENS)
    for row, (name, kind) in enumerate(kinds):
        y = 22 + row * 42
        start, stop = needed(kind, position)
        picture.text(10, y + 18, name)
        picture.box(axis.x(0), y, axis.width, 26, PALE)
        if isinstance(kind, kvjax.Recurrent):
            picture.box(axis.x(position) - 5, y, 10, 26, BLUE)
            picture.text(axis.x(position) - 12, y + 18, f"one state, at {stop}", at="end", size=12)
        elif stop > start:
            picture.box(axis.x(start), y, axis.x(stop) - axis.x(start), 26, BLUE)
            picture.text(axis.x(stop) - 8, y + 18, f"[{start}, {stop})", at="end", size=12, fill="white")
        else:
            picture.text(axis.x(position) - 12, y + 18, "nothing", at="end", size=12)
    picture.line(axis.x(position), 12, axis.x(position), 236, stroke=RED, dash="4 3")
    picture.text(axis.x(position) + 6, 20, f"P = {position}", size=12, fill=RED)
    axis.draw(picture, 240, 16, f"tokens that must be in the cache to compute token {position}")
    return picture.svg()


def restorable() -> str:
    """Returns the picture of what given chunks restore: intervals, their intersection, the hit and its load set."""
    present = {"full": [0, 1, 2, 3, 4, 5, 6], "local": [1, 2, 3, 4, 5, 6], "state": [1, 2]}
    num_tokens = 125
    hit = kvjax.longest_hit(_CHUNKING, num_tokens, present)
    picture = Picture(860, 350, "Restorable positions and the hit")
    axis = Axis(_LEFT, _WIDTH, _NUM_TOKENS)
    for row, group in enumerate(_LAYOUT.groups):
        y, tokens = 22 + row * 70, _CHUNKING.tokens_per_chunk[row] or 0
        picture.text(10, y + 18, group.name)
        for chunk in range(_NUM_TOKENS // tokens):
            x, width = axis.x(chunk * tokens), axis.x(tokens) - _LEFT
            loaded, there = chunk in hit.load[group.name], chunk in present[group.name]
            fill = BLUE if loaded else LIGHT_BLUE if there else PALE
            picture.box(x + 1, y, width - 2, 26, fill)
            picture.text(x + width / 2, y + 18, str(chunk), at="middle", size=12, fill="white" if loaded else INK)
        _intervals(picture, axis, y + 34, kvjax.restorable(_only(row), num_tokens, {group.name: present[group.name]}))
        picture.text(10, y + 42, "can be resumed from", size=11, fill=GREY)
    _intervals(picture, axis, 246, kvjax.restorable(_CHUNKING, num_tokens, present))
    picture.text(10, 254, "in all groups", size=13)
    picture.line(axis.x(hit.hit_tokens), 12, axis.x(hit.hit_tokens), 270, stroke=RED, dash="4 3")
    picture.text(axis.x(hit.hit_tokens) + 6, 272, f"hit: {hit.hit_tokens}", size=13, fill=RED)
    axis.draw(picture, 284, 16, f"tokens of a request of {num_tokens}")
    for x, fill, text in (
        (10, BLUE, "loaded"),
        (110, LIGHT_BLUE, "on the host"),
        (240, PALE, "absent"),
        (330, GREEN, "positions that can be resumed from"),
    ):
        picture.box(x, 322, 14, 14, fill)
        picture.text(x + 20, 334, text, size=12)
    return picture.svg()


def _only(group_idx: int) -> kvjax.Chunking:
    """The chunking of one of the groups alone."""
    layout = kvjax.CacheLayout([_LAYOUT.groups[group_idx]], tokens_per_hash=_CHUNKING.tokens_per_hash)
    return kvjax.resolve_chunking(layout, blocks_per_chunk=_CHUNKING.blocks_per_chunk[group_idx])


def _intervals(picture: Picture, axis: Axis, y: float, positions: kvjax.Restorable):
    for first, last in zip(positions.firsts.tolist(), positions.lasts.tolist(), strict=True):
        picture.box(axis.x(first) - 2, y, axis.x(last) - axis.x(first) + 4, 10, GREEN)
