"""Run the notebooks from their sources, each in a fresh kernel; a cell that fails, warns or names a folder of this
machine fails the run.

python notebooks/run.py               all of them; nothing is written
python notebooks/run.py 01 05 --write these, and keep the executed copies in notebooks/executed

EAGLE4_FAST=1 in the environment runs smaller sizes that show the same.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from eagle4.files import write_atomic

HERE = Path(__file__).resolve().parent
LARGEST = 1_000_000  # bytes of an executed copy
TIMEOUT_S = 1800  # a cell
WIDGET = "application/vnd.jupyter.widget-view+json"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", help="first letters of the notebooks to run, like 01")
    parser.add_argument("--write", action="store_true", help="keep the executed copies")
    options = parser.parse_args()
    chosen = [p for p in sorted(HERE.glob("0*.py")) if p.name.startswith(tuple(options.only) or "0")]
    if not chosen:
        print(f"error: no notebook begins with {' or '.join(options.only)}", file=sys.stderr)
        return 2
    failed = 0
    for source in chosen:
        begun = time.monotonic()
        try:
            book = executed(source)
            faults = list(faults_of(book))
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            book, faults = None, [str(error)]
        failed += bool(faults)
        print(f"{source.name}: {'failed' if faults else 'ok'}, {time.monotonic() - begun:.0f} s", flush=True)
        for fault in faults:
            print(fault, file=sys.stderr)
        if options.write and book is not None and not faults:
            write_atomic(HERE / "executed" / f"{source.stem}.ipynb", nbformat.writes(book) + "\n")
    return 1 if failed else 0


def executed(source: Path) -> nbformat.NotebookNode:
    """The notebook of a jupytext source with its outputs. Raises CellExecutionError where a cell fails."""
    book = jupytext.read(source)
    for number, cell in enumerate(book.cells):
        cell["id"] = f"cell-{number}"  # the same in every run
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    client = NotebookClient(
        book,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        extra_arguments=["--log-level=40"],  # else every start warns that TCP is not encrypted
        record_timing=False,
        resources={"metadata": {"path": str(HERE)}},
    )
    client.execute()
    # Sliders live only in a running kernel.
    book.metadata.pop("widgets", None)
    for cell in (c for c in book.cells if c.cell_type == "code"):
        cell.outputs = [o for o in cell.outputs if WIDGET not in o.get("data", {})]
    return book


def faults_of(book: nbformat.NotebookNode) -> Iterator[str]:
    """What must not be in a copy that people read: warnings, folders of this machine, too many bytes."""
    private = {str(HERE.parent), str(Path.home()), sys.prefix, tempfile.gettempdir()} - {"/"}
    for number, cell in enumerate(book.cells):
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                yield f"cell {number} wrote to stderr: {output['text'].strip()[:500]}"
            yield from (f"cell {number} shows the folder {p}" for p in sorted(private) if p in str(output))
    size = len(nbformat.writes(book))
    if size > LARGEST:
        yield f"{size} bytes are more than {LARGEST}"


if __name__ == "__main__":
    sys.exit(main())
