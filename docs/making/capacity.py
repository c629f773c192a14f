"""What 64 GiB of host memory hold of published models, counted by the code of `kvjax plan`."""

from pathlib import Path

from kvjax.chunking import resolve_chunking
from kvjax.cli.plan import describe
from kvjax.configs import layout_from_config
from kvjax.packing import GRANULE_BYTES

from .svg import BLUE, GREY, LIGHT_BLUE, Axis, Picture

CONFIGS = Path(__file__).parents[2] / "tests" / "models" / "hub"
HOST_BYTES = 64 * 2**30
MODELS = {
    "Gemma-3-27b": "gemma-3-27b",
    "Gemma-4-12B": "gemma-4-12B",
    "gpt-oss-20b": "gpt-oss-20b",
    "Llama-4-Scout": "llama-4-scout",
    "DeepSeek-V4-Flash": "deepseek-v4-flash",
    "Llama-3.1-8B (full alone)": "llama-3.1-8b",
}


def tokens_held(config: str) -> dict[str, int]:
    """Returns the longest request that fits, in tokens, by choice of checkpoints, as `kvjax plan` prints it.

    Args:
        config: the name of a model's config, below `tests/models/hub`.
    """
    layout = layout_from_config(CONFIGS / f"{config}.json", dtype="bfloat16")
    plan = describe(resolve_chunking(layout), GRANULE_BYTES["cpu"], HOST_BYTES)
    return {name: held["tokens"] for name, held in plan["host_by_checkpoints"].items() if held}


def capacity() -> str:
    """Returns the picture: one pair of bars for each model."""
    held = {name: tokens_held(config) for name, config in MODELS.items()}
    most = max(tokens.get("every", 0) for tokens in held.values())
    picture = Picture(860, 96 + 52 * len(held), "Tokens that 64 GiB of host memory hold")
    axis = Axis(200, 560, most)
    for row, (name, tokens) in enumerate(held.items()):
        y = 20 + row * 52
        picture.text(10, y + 24, name)
        by_law = tokens.get("every", tokens["end"])
        for offset, number, fill in ((0, tokens["dense"], LIGHT_BLUE), (19, by_law, BLUE)):
            picture.box(axis.left, y + offset, max(1.0, axis.x(number) - axis.left), 16, fill)
            picture.text(axis.x(number) + 6, y + offset + 13, f"{number:,}", size=12)
    y = 30 + 52 * len(held)
    picture.box(10, y, 14, 14, LIGHT_BLUE)
    picture.text(30, y + 12, "every chunk of every group", size=12)
    picture.box(240, y, 14, 14, BLUE)
    picture.text(260, y + 12, "what the law asks for, with checkpoints as by default", size=12)
    note = "tokens of the longest request in 64 GiB; bfloat16, one rank, 16 tokens per block (kvjax plan)"
    picture.text(10, y + 40, note, size=12, fill=GREY)
    return picture.svg()
