"""A picture as SVG text, the same for the same input on every machine."""

from html import escape

INK, GREY, PALE = "#1c2733", "#8796a5", "#e9edf1"
BLUE, LIGHT_BLUE, GREEN, RED, AMBER = "#2171b5", "#9ecae1", "#4a9c5d", "#d62728", "#e0972f"


class Picture:
    """Shapes on white, in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str):
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, edge: str = "none", dash: str = ""):
        """Draws a rectangle with slightly round corners."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="2" fill="{fill}" '
            f'stroke="{edge}" stroke-width="1.5"{dashed}/>'
        )

    def text(self, x: float, y: float, text: str, *, at: str = "start", size: int = 13, fill: str = INK):
        """Writes a line; `at` says which of its ends, or its `middle`, is at `x`. `y` is its baseline."""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{at}" font-size="{size}" fill="{fill}">{escape(text)}</text>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, stroke: str = INK, dash: str = "", head: bool = False
    ):
        """Draws a line, with an arrow's head at its second end if asked for."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        arrow = ' marker-end="url(#head)"' if head else ""
        self._parts.append(
            f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" stroke="{stroke}" '
            f'stroke-width="1.5"{dashed}{arrow}/>'
        )

    def svg(self) -> str:
        """Returns the file."""
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
            f'font-family="system-ui, sans-serif">\n<title>{escape(self._title)}</title>\n'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" fill="white"/>\n'
        )
        return head + "\n".join(self._parts) + "\n</svg>\n"


class Axis:
    """Places of numbers on a horizontal axis.

    Args:
        left: of the axis, in pixels.
        width: in pixels.
        most: the number at its right end; the one at its left is 0.
    """

    def __init__(self, left: float, width: float, most: float):
        self.left, self.width, self.most = left, width, most

    def x(self, number: float) -> float:
        """Returns where a number is."""
        return self.left + self.width * number / self.most

    def draw(self, picture: Picture, y: float, step: int, label: str):
        """Draws the axis at `y` with a number at each multiple of `step`."""
        picture.line(self.left, y, self.left + self.width, y, stroke=GREY)
        for number in range(0, int(self.most) + 1, step):
            picture.line(self.x(number), y, self.x(number), y + 5, stroke=GREY)
            picture.text(self.x(number), y + 19, f"{number:,}", at="middle", size=12, fill=GREY)
        picture.text(self.left + self.width, y + 36, label, at="end", size=12, fill=GREY)


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
