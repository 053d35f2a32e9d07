"""Cleaning enwik8 beside merely reading it: processor time of both, in one run, on one core.

    python benchmarks/enwik8_cleaning.py /path/to/enwik8.gz

Processor time, not wall time: whoever else is at work on the machine does not count. The text is written to a
temporary folder, as `anisoscope data enwik8` does it. Bar: well under a minute.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from record import record

from anisoscope.data.enwik8 import FINGERPRINT, prepare_enwik8
from anisoscope.data.markup import read_raw


def main(path: str) -> None:
    start = time.process_time()
    size = sum(len(block) for block in read_raw(path))
    read = time.process_time() - start
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        made = prepare_enwik8(path, Path(folder) / "enwik8")
        whole = time.process_time() - start
        assert made.stats["raw"]["as_expected"], "not the true enwik8, or other rules"
    figures = {"read_s": read, "clean_s": whole, "clean_over_read": whole / read, "megabytes_per_s": size / whole / 1e6}
    record(
        "Cleaning enwik8",
        about="All 100 MB from gzip to text, ids and statistics (processor seconds of one core). Fingerprint of what "
        f"came out: {FINGERPRINT[:16]}….",
        command="python benchmarks/enwik8_cleaning.py enwik8.gz",
        figures=figures,
        bars={"clean_s": "well under 60"},
    )


if __name__ == "__main__":
    main(sys.argv[1])
