"""Datasets and loaders: files to rows, rows to token ids, rows to batches."""
