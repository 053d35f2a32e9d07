"""The sections of pages: what each shows, from rows of the table."""
