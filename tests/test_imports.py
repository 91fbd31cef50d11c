"""The flow of imports, where compilation happens, what an import may cost, and how long a file may be."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "eagle4").rglob("*.py"))
}
# Data flows one way: a module may import what stands before it. A package stands for all modules in it, unless
# one of them is listed by its own dotted name.
ORDER = """
    errors files types specs policy_spec compilation fingerprint tokenizer text
    dataset_prompts prompts nn target tree sampling verify
    retrieval drafters checkpoint harness calibration state prefill decode forward_cost tree_cost answer methods
    draft_cost round_cost cost_table load_cost watch serve metrics summary bench report
    runs page_figure page_plots page_cost page_tables page report_cost
    recording record replay oracle ablation report_reliability train interop tracking
    run_specs schemas sweeps conf pricing
"""
FLOW = ORDER.split()
MAY_COMPILE = ("eagle4.decode", "eagle4.serve", "eagle4.train.step")
HEAVY = ("matplotlib", "torch", "transformers", "wandb")
MOST_LINES = 320


def imports(source: str, modules=tuple(FILES)) -> set[str]:
    """Every eagle4 module that a source imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return {name for name in found if name.partition(".")[0] == "eagle4"}


def place(module: str) -> int:
    """Where a module stands in the flow: by its own name, or by that of its nearest listed package."""
    name = module.removeprefix("eagle4").removeprefix(".")
    while name:
        if name in FLOW:
            return FLOW.index(name)
        name = name.rpartition(".")[0]
    assert module == "eagle4", f"{module} has no place in FLOW: add it where it belongs"
    return -1


def against_the_flow(module: str, source: str) -> list[str]:
    return [f"{module} imports {other}" for other in sorted(imports(source)) if place(other) > place(module)]


def compiles(source: str) -> bool:
    """Whether a source mentions jax.jit, under whatever name it imports it."""
    tree = ast.parse(source)
    taken = (
        n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module.partition(".")[0] == "jax"
    )
    names = {alias.name for node in taken for alias in node.names}
    return "jit" in names or any(isinstance(n, ast.Attribute) and n.attr == "jit" for n in ast.walk(tree))


def test_imports_follow_the_flow():
    assert [line for name, path in FILES.items() for line in against_the_flow(name, path.read_text())] == []


def test_no_modules_import_each_other():
    graph = {name: imports(path.read_text()) for name, path in FILES.items()}
    assert set(graphlib.TopologicalSorter(graph).static_order()) >= set(FILES)


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("eagle4.nn.block", "from eagle4 import decode", ["eagle4.nn.block imports eagle4.decode"]),
        ("eagle4.text", "def f():\n  import eagle4.target.hub", ["eagle4.text imports eagle4.target.hub"]),
        ("eagle4.tree.grow", "import eagle4.conf as c", ["eagle4.tree.grow imports eagle4.conf"]),
        ("eagle4.decode", "from eagle4 import sampling, verify\nimport eagle4.decode_nothing_like_it", None),
        ("eagle4.decode", "import jax\nfrom eagle4.tree import draw", []),
    ],
)  # fmt: skip
def test_the_flow_is_really_checked(module, source, wrong):
    if wrong is None:
        with pytest.raises(AssertionError, match="has no place in FLOW"):
            against_the_flow(module, source)
    else:
        assert against_the_flow(module, source) == wrong


def test_only_three_modules_compile():
    found = {name for name, path in FILES.items() if compiles(path.read_text())}
    assert found <= set(MAY_COMPILE)
    assert "eagle4.decode" in found
    for planted in ("import jax as j\n@j.jit\ndef f(x): ...", "from jax import jit", "f = jax.jit(g)"):
        assert compiles(planted)
    assert not compiles('"""jax.jit is called elsewhere."""\njitter = 1')


def test_importing_every_module_loads_nothing_heavy():
    code = f"""
import importlib, sys
for name in {list(FILES)}:
    importlib.import_module(name)
    heavy = [m for m in {HEAVY} if m in sys.modules]
    assert not heavy, f"{{name}} imports {{heavy}}"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_files_stay_readable_in_one_sitting():
    paths = [*FILES.values(), *(ROOT / "experiments").glob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}
