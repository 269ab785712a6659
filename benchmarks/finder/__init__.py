"""Sizes of micro-batches that are found, beside those of Lightning's `BatchSizeFinder`."""
