"""The analysis of a measured step: what it computes, and where – in the training process, or in one of its own."""
