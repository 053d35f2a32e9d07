"""Measuring by several processes: those of one training that measure together, and jobs elsewhere, one a model."""
