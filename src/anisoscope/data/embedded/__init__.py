"""The corpus that ships with the package, a cleaned slice of enwik8; see `LICENSE-corpus.md` for its licence."""
