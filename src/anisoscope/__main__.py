"""`python -m anisoscope`."""

from anisoscope.cli import main

main()
