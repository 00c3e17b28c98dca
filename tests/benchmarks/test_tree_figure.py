"""The figure of a draft tree: what it shows of a tree, and that the zoo's trees can be drawn."""

import re
from itertools import pairwise
from xml.etree import ElementTree

from benchmarks.harness.recorded_trees import RecordedTree, recorded
from benchmarks.tree_figure import PROMPT, SHAPE, chosen, draw

TREE = RecordedTree(
    texts=("(", "self", "a<b", "\n  ", "path"), parents=(-1, 0, 0, 1, 2), path=(0, 2, 4), own=")"
)


def test_a_figure_has_a_box_for_each_node_and_marks_the_accepted_path() -> None:
    svg = draw(TREE)
    root = ElementTree.fromstring(svg)
    kinds = [each.get("class") for each in root if each.tag.endswith("rect")]
    assert [kinds.count(kind) for kind in ("accepted", "node", "own")] == [3, 2, 1]
    assert svg.count('class="taken"') == 3 and svg.count('class="edge"') == 2
    assert "a&lt;b" in svg and "⏎␣␣" in svg and "4 drafts, 2 accepted" in svg


def test_no_two_boxes_of_a_figure_overlap() -> None:
    boxes = re.findall(r'<rect class="(?!page)\w+" x="(\d+)" y="(\d+)"', draw(TREE))
    assert len(set(boxes)) == 6


def test_a_path_of_later_children_is_chosen_before_a_longer_one_of_first_children() -> None:
    longer = RecordedTree(("a", "b", "c", "d"), (-1, 0, 1, 2), (0, 1, 2, 3), "e")
    assert chosen([longer, TREE]) is TREE


def test_recorded_trees_are_those_of_the_engine_and_their_paths_its_text() -> None:
    trees = recorded(PROMPT, SHAPE, 4)
    for tree, after in pairwise(trees):
        assert len(tree.texts) == 17 and len(tree.parents) == 17
        assert all(tree.parents[node] == before for before, node in pairwise(tree.path))
        assert after.texts[0] == tree.own
    assert any(len(tree.path) > 1 for tree in trees)
