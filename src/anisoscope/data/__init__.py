"""Text, sounds, pictures and tokens: documents from anywhere, contexts that a model takes, and the corpus that ships."""
