"""One HTML page of what runs measured: tables, figures, decisions, trees. It opens offline.

python -m experiments.report runs/2026-11-30/22-46-57_benchmark_308d8a
python -m experiments.report runs/<a sweep> runs/<a load run> out=page.html

A folder may be a run of benchmark, load, replay or draw, or hold several (a sweep, a day). Without `out` the page is
page.html in the first folder.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from eagle4.errors import BadInput
from eagle4.files import write_atomic
from eagle4.page import render
from eagle4.runs import read_runs

USAGE = "python -m experiments.report runs/<folder> [more folders] [out=page.html]"


def main(arguments: Sequence[str]) -> Path:
    """Writes the page and returns its path. Raises BadInput for a folder or file that cannot be read or written."""
    outs = [a.removeprefix("out=") for a in arguments if a.startswith("out=")]
    folders = [a for a in arguments if not a.startswith("out=")]
    if not folders:
        raise BadInput(f"no run folder given; use: {USAGE}")
    if len(outs) > 1:
        raise BadInput(f"out is given {len(outs)} times; give one page to write")
    out = Path(outs[0] if outs else Path(folders[0]) / "page.html")
    if out.suffix not in (".html", ".htm"):
        raise BadInput(f"out={out} is no page; give a file that ends in .html")
    page = render(read_runs(folders))
    try:
        write_atomic(out, page)
    except OSError as error:
        raise BadInput(f"{out} can't be written ({error.strerror}); give another out=page.html") from error
    return out


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        sys.exit()
    try:
        print(main(sys.argv[1:]))
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
