"""Models of transformers, and what they compute with here."""
