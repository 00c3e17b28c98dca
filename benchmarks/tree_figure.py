"""A figure of a real draft tree: the zoo's EAGLE-3 head on a few lines of code.

    python -m benchmarks.tree_figure [--output docs/images/draft-tree.svg]

Of the rounds after the prompt it shows one with a long accepted path that a chain would not have
had. Needs no GPU."""

import argparse
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

from benchmarks.harness.recorded_trees import RecordedTree, recorded

PROMPT = '''import json
from pathlib import Path


class Settings:
    """Settings that are read from a JSON file."""

    def __init__(self, path):
        self.path = Path(path)
        self.values = {}

    def load(self):
        """Read all values from the file."""
        with open(self.path, encoding="utf-8") as file:
            self.values = json.load(file)

    def save(self):
        """Write all values to the file."""'''
SHAPE = {
    "max_draft_len": 5,
    "use_dynamic_tree": True,
    "dynamic_tree_max_topK": 4,
    "max_total_draft_tokens": 16,
}
ROUNDS = 24
COLUMN, ROW, LEFT, TOP, BOX = 142.0, 30.0, 16.0, 52.0, (112.0, 22.0)
STYLE = """\
text{font:12px ui-monospace,monospace;fill:#1f2328}
.title{font:13px system-ui,sans-serif}
.page{fill:#ffffff}
.node{fill:#f6f8fa;stroke:#8b949e}
.accepted{fill:#dafbe1;stroke:#2da44e;stroke-width:2}
.own{fill:#ddf4ff;stroke:#2f81f7;stroke-width:2}
.edge{stroke:#8b949e;fill:none}
.taken{stroke:#2da44e;stroke-width:2;fill:none}
@media(prefers-color-scheme:dark){
text{fill:#e6edf3}
.page{fill:#0d1117}
.node{fill:#161b22}
.accepted{fill:#12361f}
.own{fill:#0c2d6b}
}"""

Place = tuple[float, float]


def chosen(trees: list[RecordedTree]) -> RecordedTree:
    """A path that leaves the first children, then the longest, then that with the most letters."""

    def leaves(tree: RecordedTree) -> bool:
        first = {parent: node for node, parent in reversed([*enumerate(tree.parents)])}
        return any(first[tree.parents[node]] != node for node in tree.path[1:])

    def letters(tree: RecordedTree) -> int:
        return sum(map(str.isalpha, "".join(tree.texts[node] for node in tree.path[1:])))

    return max(trees, key=lambda tree: (leaves(tree), len(tree.path), letters(tree)))


def draw(tree: RecordedTree) -> str:
    """Depth from left to right, children below each other; the accepted path is green, the target's
    own token blue."""
    own = len(tree.texts)  # one node more
    parents = [*tree.parents, tree.path[-1]]
    places = _places(parents)
    depth = max(x for x, _ in places)
    width, height = depth + BOX[0] + LEFT, max(y for _, y in places) + ROW + 8
    title = (
        f"{len(tree.texts) - 1} drafts, {len(tree.path) - 1} accepted, and the target's own token"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<style>{STYLE}</style>",
        '<rect class="page" width="100%" height="100%"/>',
        f'<text class="title" x="{LEFT:.0f}" y="26">{title}</text>',
    ]
    for node, parent in enumerate(parents):
        if parent >= 0:
            taken = node == own or node in tree.path
            parts.append(_edge(places[parent], places[node], "taken" if taken else "edge"))
    for node, text in enumerate([*tree.texts, tree.own]):
        kind = "own" if node == own else "accepted" if node in tree.path else "node"
        parts += _box(places[node], text, kind)
    return "\n".join([*parts, "</svg>", ""])


def _places(parents: list[int]) -> list[Place]:
    """Every leaf has a row; a node stands in the row of its first child."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    rows, places = [0], [(0.0, 0.0)] * len(parents)

    def place(node: int, depth: int) -> None:
        row = rows[0]
        places[node] = LEFT + depth * COLUMN, TOP + row * ROW
        for child in children[node]:
            place(child, depth + 1)
        rows[0] += not children[node]

    place(0, 0)
    return places


def _edge(start: Place, end: Place, kind: str) -> str:
    x0, y0, x1, y1 = start[0] + BOX[0], start[1] + BOX[1] / 2, end[0], end[1] + BOX[1] / 2
    middle = (x0 + x1) / 2
    curve = f"M{x0:.0f} {y0:.0f}C{middle:.0f} {y0:.0f} {middle:.0f} {y1:.0f} {x1:.0f} {y1:.0f}"
    return f'<path class="{kind}" d="{curve}"/>'


def _box(place: Place, text: str, kind: str) -> Iterator[str]:
    x, y = place
    size = f'width="{BOX[0]:.0f}" height="{BOX[1]:.0f}" rx="4"'
    yield f'<rect class="{kind}" x="{x:.0f}" y="{y:.0f}" {size}/>'
    shown = text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    shown = shown if len(shown) <= 14 else shown[:13] + "…"
    yield f'<text x="{x + 6:.0f}" y="{y + 15:.0f}">{escape(shown)}</text>'


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("docs/images/draft-tree.svg"))
    args = parser.parse_args(argv)
    tree = chosen(recorded(PROMPT, SHAPE, ROUNDS))
    args.output.write_text(draw(tree), encoding="utf-8")
    print(f"{args.output}: accepted {''.join(tree.texts[node] for node in tree.path[1:])!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
