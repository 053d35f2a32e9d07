"""Run the tutorials and keep their outputs, without what differs from run to run.

python tools/notebooks.py docs/tutorials
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient


def executed(path: Path) -> Any:
    """The notebook with the outputs of a run in its own folder; an error in a cell is raised."""
    book = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(path.parent)}}
    NotebookClient(book, timeout=600, kernel_name="python3", resources=place).execute()
    return book


def tidy(book: Any) -> Any:
    """Leave out what says nothing: progress and warnings on stderr, times, counts of executions."""
    for cell in book.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
            for each in cell.outputs:
                each.pop("execution_count", None)
                if each.output_type == "execute_result":
                    each.execution_count = None
    return book


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).glob("*.ipynb")):
        nbformat.write(tidy(executed(path)), path)
        print(path.name)
