"""Pages of docs/results, written from the tables that lie there; `tools/results.py` is the command."""
