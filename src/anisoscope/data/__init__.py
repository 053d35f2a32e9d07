"""Reading text, audio and images from files or datasets, tokenising and batching them; and the embedded corpus."""
