"""Prompt files: what is read, what is refused and where, and how a limit chooses."""

import gzip
import json

import pytest

from eagle4.errors import BadInput
from eagle4.prompts import Prompt, load_prompts


def line(i, category="code", suite="s", **fields) -> str:
    record = {"id": f"{suite}/{i}", "suite": suite, "category": category, "turns": [f"turn {i}"]}
    return json.dumps({**record, **fields})


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_fields_are_read_and_others_ignored(tmp_path):
    extra = {"license": "MIT", "reference": ["r"], "meta": {"k": 1}, "mood": None}
    file = write(tmp_path / "a.jsonl", line(1, turns=["é\u2028 one", "two"], **extra), "", line(2, "math"))
    expected = [Prompt("s/1", "s", "code", ("é\u2028 one", "two")), Prompt("s/2", "s", "math", ("turn 2",))]
    assert load_prompts(str(file)) == expected
    with gzip.open(tmp_path / "a.jsonl.gz", "wt", encoding="utf-8") as zipped:
        zipped.write(file.read_text(encoding="utf-8"))
    assert load_prompts([tmp_path / "a.jsonl.gz"]) == expected


def test_training_files_name_a_source_instead_of_a_suite(tmp_path):
    record = {"id": "x/1", "source": "x", "category": "qa", "turns": ["t"], "license": "MIT"}
    assert load_prompts(write(tmp_path / "t.jsonl", json.dumps(record))) == [Prompt("x/1", "x", "qa", ("t",))]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{not json", "not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ('{"id": "s/2", "suite": "s", "category": "c"}', "field 'turns' is missing"),
        ('{"id": "s/2", "suite": "s", "turns": ["x"]}', "field 'category' is missing"),
        ('{"id": "s/2", "category": "c", "turns": ["x"]}', "field 'suite' is missing"),
        (line(2, id=7), "field 'id' must be a non-empty string, got 7"),
        (line(2, category=""), "field 'category' must be a non-empty string"),
        (line(2, turns="x"), "field 'turns' must be a non-empty list of strings"),
        (line(2, turns=[]), "field 'turns' must be a non-empty list of strings"),
        (line(2, turns=["x", 3]), "turn 2 must be a string, got 3"),
        (line(2, turns=["x", " \n"]), "turn 2 is empty"),
        (line(2, turns=["\ud83d"]), "half a surrogate pair"),
        (line(1), r"id 's/1' is also at .*a\.jsonl:1; ids must be unique"),
    ],
)
def test_faults_are_named_with_file_and_line(tmp_path, bad, message):
    file = write(tmp_path / "a.jsonl", line(1), "", bad, line(9))
    with pytest.raises(BadInput, match=message) as caught:
        load_prompts(str(file))
    assert str(caught.value).startswith(f"{file}:3: ")
    assert "\n" not in str(caught.value)


def test_ids_are_unique_over_all_files(tmp_path):
    files = [write(tmp_path / "a.jsonl", line(1)), write(tmp_path / "b.jsonl", line(2), line(1))]
    with pytest.raises(BadInput, match=r"b\.jsonl:2: id 's/1' is also at .*a\.jsonl:1"):
        load_prompts(files)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(BadInput, match=r"no such prompt file: .*none\.jsonl"):
        load_prompts(tmp_path / "none.jsonl")
    with pytest.raises(BadInput, match="no such prompt file"):
        load_prompts(tmp_path)
    with pytest.raises(BadInput, match=r"a\.jsonl holds no prompt"):
        load_prompts(write(tmp_path / "a.jsonl", "", " "))
    (tmp_path / "b.jsonl").write_bytes(b'{"id": "\xff"}')
    with pytest.raises(BadInput, match=r"b\.jsonl cannot be read"):
        load_prompts(tmp_path / "b.jsonl")
    write(tmp_path / "c.jsonl.gz", line(1))
    with pytest.raises(BadInput, match=r"c\.jsonl\.gz cannot be read"):
        load_prompts(tmp_path / "c.jsonl.gz")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(line(1).encode() * 99)[:-9])
    with pytest.raises(BadInput, match=r"d\.jsonl\.gz cannot be read"):
        load_prompts(tmp_path / "d.jsonl.gz")
    with pytest.raises(BadInput, match="no prompt file is named"):
        load_prompts([])


@pytest.fixture
def mixed(tmp_path):
    first = write(
        tmp_path / "a.jsonl", *(line(i, "code") for i in range(4)), line(4, "math"), line(5, "math")
    )
    second = write(tmp_path / "b.jsonl", *(line(i, "math", "z") for i in range(3)))
    return [first, second]


@pytest.mark.parametrize(
    ("limit", "ids"),
    [
        (1, ["s/0"]),
        (3, ["s/0", "s/4", "z/0"]),
        (5, ["s/0", "s/1", "s/4", "s/5", "z/0"]),
        (8, ["s/0", "s/1", "s/2", "s/4", "s/5", "z/0", "z/1", "z/2"]),
        (99, [f"s/{i}" for i in range(6)] + ["z/0", "z/1", "z/2"]),
        (None, [f"s/{i}" for i in range(6)] + ["z/0", "z/1", "z/2"]),
    ],
)
def test_a_limit_goes_round_the_categories(mixed, limit, ids):
    assert [prompt.id for prompt in load_prompts(mixed, limit)] == ids


def test_per_category(mixed):
    assert [p.id for p in load_prompts(mixed, per_category=1)] == ["s/0", "s/4", "z/0"]
    assert [p.id for p in load_prompts(mixed, limit=4, per_category=2)] == ["s/0", "s/1", "s/4", "z/0"]


@pytest.mark.parametrize("arguments", [{"limit": 0}, {"per_category": -1}])
def test_counts_below_one_are_refused(mixed, arguments):
    with pytest.raises(BadInput, match="must be at least 1"):
        load_prompts(mixed, **arguments)
