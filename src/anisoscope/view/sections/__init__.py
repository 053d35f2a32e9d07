"""The sections of report pages, made from rows of the table."""
