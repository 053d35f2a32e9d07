"""One file, one protocol of a paper, built only from the parts below it."""
