"""What commands print: where it goes and how wide it is, progress, verdicts."""
