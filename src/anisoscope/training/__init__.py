"""Small encoders and decoders trained from scratch: text to tokens, batches, checkpoints; resumable at any moment."""
