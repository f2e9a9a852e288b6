"""Configuration: frozen dataclasses are the one definition of every key (type, default, meaning)."""
