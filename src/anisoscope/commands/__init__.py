"""The command line: one module per command, and the shared steps that run, evaluate claims and write the report."""
