"""Drawings: what is shown, in which order, and that hostile token text stays text."""

import xml.etree.ElementTree as ElementTree

import numpy as np

from eagle4.tree import draw

PARENT = [-1, 0, 0, 1, 1, 2, -1]
LABELS = ["the", " cat", " dog", " sat", "\n", "</svg><script>", "unused"]
SCORES = np.log([1, 0.6, 0.2, 0.3, 0.1, 0.05, 1.0])
SVG = "{http://www.w3.org/2000/svg}"


def test_text_tree():
    drawn = draw.ascii(PARENT, [*LABELS[:5], "runs", "unused"], SCORES, path=[1, 3, -1, -1])
    assert drawn.splitlines() == [
        "> the       1.000 *",
        "├─ ·cat     0.600 *",
        "│  ├─ ·sat  0.300 *",
        "│  └─ ⏎     0.100",
        "└─ ·dog     0.200",
        "   └─ runs  0.050",
    ]


def test_text_tree_without_scores_or_path():
    assert draw.ascii([-1, 0], ["a", "b"]).splitlines() == ["> a  *", "└─ b"]
    assert draw.ascii([-1], ["alone"]) == "> alone *"


def test_docstring_drawing():
    drawn = draw.ascii([-1, 0, 1, 0], ["the", "cat", "sat", "dog"], np.log([1, 0.6, 0.3, 0.2]), [1])
    doc = [
        line.split() for line in (draw.ascii.__doc__ or "").splitlines() if line.strip()[:1] in tuple(">├│└")
    ]
    assert [line.split() for line in drawn.splitlines()] == [line for line in doc if line]


def test_svg_is_well_formed_and_colours_the_accepted_path():
    root = ElementTree.fromstring(draw.svg(PARENT, LABELS, SCORES, path=np.array([1, 4, -1])))
    groups = root.findall(f"{SVG}g")
    kinds = [g.get("class") for g in groups]
    assert kinds == ["root", "accepted", "rejected", "rejected", "accepted", "rejected"]
    texts = [[t.text for t in g.findall(f"{SVG}text")] for g in groups]
    assert texts[1] == ["·cat", "0.600"]
    assert texts[5][0] == "</svg><script>"
    assert root.find(f".//{SVG}script") is None
    fills = {g.get("class"): g.find(f"{SVG}rect").get("fill") for g in groups}
    assert len(set(fills.values())) == 3
    assert len(root.findall(f"{SVG}path")) == 5


def test_svg_boxes_do_not_overlap_and_stay_inside():
    rng = np.random.default_rng(0)
    parent = [-1] + [int(rng.integers(0, n)) for n in range(1, 30)]
    root = ElementTree.fromstring(draw.svg(parent, ["word" * (n % 7) for n in range(30)], np.zeros(30)))
    boxes = [tuple(float(r.get(k)) for k in ("x", "y", "width", "height")) for r in root.iter(f"{SVG}rect")]
    width, height = float(root.get("width")), float(root.get("height"))
    for i, (x, y, w, h) in enumerate(boxes):
        assert x >= 0
        assert y >= 0
        assert x + w <= width + 1
        assert y + h <= height + 1
        for a, b, c, d in boxes[:i]:
            assert x + w <= a or a + c <= x or y + h <= b or b + d <= y
    assert {g.get("class") for g in root.iter(f"{SVG}g")} == {"root", "node"}


def test_long_labels_are_shortened():
    assert draw.svg([-1], ["x" * 40]).count("x" * 17 + "…") == 1


def test_control_characters_cannot_break_a_drawing():
    hostile = ["\x00\x1b", "a\r\nb"]
    text = ElementTree.fromstring(draw.svg([-1, 0], hostile)).find(f"{SVG}g/{SVG}text")
    assert text is not None
    assert text.text == "��"
    assert draw.ascii([-1, 0], hostile).splitlines() == ["> ��    *", "└─ a�⏎b"]


def test_mask_grid():
    mask = [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    assert draw.mask_ascii(mask).splitlines() == ["   0 1 2", "0  x . .", "1  x x .", "2  x . x"]
    root = ElementTree.fromstring(draw.mask_svg(mask))
    fills = [r.get("fill") for r in root.findall(f"{SVG}rect")]
    assert np.array_equal(np.array(fills).reshape(3, 3) == fills[0], np.array(mask, bool))
