"""Text, sounds, pictures and tokens: data from anywhere, contexts that a model takes, and the corpus that ships."""
