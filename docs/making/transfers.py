"""The picture of the three ways across the memory spaces."""

from .svg import AMBER, BLUE, GREEN, GREY, INK, LIGHT_BLUE, PALE, Picture

_HOST, _MIDDLE, _DEVICE = 20, 290, 640
_WIDTH, _HEIGHT = 180, 44


def three_ways() -> str:
    """Returns the picture."""
    picture = Picture(860, 438, "Staged, direct and fused transfers")
    picture.text(_HOST, 24, "host memory", fill=GREY)
    picture.text(_DEVICE, 24, "device memory", fill=GREY)
    picture.line(_DEVICE - 20, 34, _DEVICE - 20, 426, stroke=GREY, dash="4 4")

    _way(picture, 40, "staged", "few large arrays cross at a time; works everywhere")
    _box(picture, _HOST, 62, LIGHT_BLUE, "host pool: units")
    _box(picture, _MIDDLE, 62, AMBER, "staging, pinned")
    _box(picture, _DEVICE, 62, BLUE, "staging ← pack ← blocks")
    _arrow(picture, _DEVICE, _MIDDLE + _WIDTH, 84, "one bulk copy")
    _arrow(picture, _MIDDLE, _HOST + _WIDTH, 84, "host copies")

    _way(
        picture, 150, "direct", "one kernel between staging and pinned pool; on CPUs straight between blocks and units"
    )
    _box(picture, _HOST, 172, LIGHT_BLUE, "host pool: units, pinned")
    _box(picture, _DEVICE, 172, BLUE, "staging ← pack ← blocks")
    _arrow(picture, _DEVICE, _HOST + _WIDTH, 194, "units, in place")

    _way(picture, 260, "fused", "within your own jitted step, layer by layer")
    _box(picture, _HOST, 300, LIGHT_BLUE, "rows of this step", height=116)
    for layer in range(3):
        y = 300 + layer * 42
        picture.box(_DEVICE, y, _WIDTH, 32, PALE)
        picture.text(_DEVICE + _WIDTH / 2, y + 21, f"layer {layer}: attention, mlp", at="middle", size=12)
        _arrow(picture, _HOST + _WIDTH, _DEVICE, y + 10)
        _arrow(picture, _DEVICE, _HOST + _WIDTH, y + 24)
    picture.text((_HOST + _WIDTH + _DEVICE) / 2, 302, "→ restored blocks, before it reads them", at="middle", size=11)
    picture.text((_HOST + _WIDTH + _DEVICE) / 2, 424, "← finished blocks, after it wrote them", at="middle", size=11)
    return picture.svg()


def _way(picture: Picture, y: float, name: str, told: str):
    picture.text(_HOST, y + 14, name, size=14, fill=GREEN)
    picture.text(_HOST + 60, y + 14, told, size=12, fill=GREY)


def _box(picture: Picture, x: float, y: float, fill: str, text: str, *, height: float = _HEIGHT):
    picture.box(x, y, _WIDTH, height, fill)
    picture.text(x + _WIDTH / 2, y + height / 2 + 5, text, at="middle", fill="white" if fill == BLUE else INK)


def _arrow(picture: Picture, x1: float, x2: float, y: float, text: str = ""):
    picture.line(x1, y, x2, y, head=True)
    if text:
        picture.text((x1 + x2) / 2, y - 6, text, at="middle", size=11)
