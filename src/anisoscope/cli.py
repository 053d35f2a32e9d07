"""The entry point of the command line, `anisoscope.cli:main` and `python -m anisoscope.cli`; see commands.app."""

from anisoscope.commands.app import app as app
from anisoscope.commands.app import main as main

if __name__ == "__main__":
    main()
