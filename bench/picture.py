"""Common parts of the documents' pictures: SVG that is readable on white and on GitHub's dark background."""

from xml.sax.saxutils import escape

WIDTH = 760


def frame(height, title, subtitle, parts):
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        text(16, 26, title, 15, "600"),
        text(16, 46, subtitle, 12),
        *parts,
        "</svg>",
    ])


def text(x, y, words, size, weight="400", anchor="start"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
            f'text-anchor="{anchor}" fill="#1f2328">{escape(words)}</text>')


def level(left, right, y, words):
    """Draws a line across the picture, with its label at the left."""
    line = f'<line x1="{left}" x2="{right}" y1="{y:.0f}" y2="{y:.0f}" stroke="#e3e5e8"/>'
    return f"{line}\n{text(left - 8, y + 4, words, 12, anchor='end')}"


def curves(named, right, ours):
    """Draws a curve for each name, from its colour and points; the names follow the ends, from `right` on. `ours` is emphasized."""
    out, ends = [], []
    for name, (colour, points) in named.items():
        width = 3.5 if name == ours else 2
        line = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        ends.append([points[-1][1], name, colour])
    # The names must not overlap.
    ends.sort()
    for before, after in zip(ends, ends[1:]):
        after[0] = max(after[0], before[0] + 16)
    for y, name, colour in ends:
        out.append(f'<circle cx="{right + 14}" cy="{y:.0f}" r="4" fill="{colour}"/>')
        out.append(text(right + 24, y + 4, name, 13, "600" if name == ours else "400"))
    return out
