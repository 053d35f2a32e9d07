"""Training of small models from scratch: prepared data, batches, models, checkpoints; resumable at any step."""
