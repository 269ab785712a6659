"""Support for offloading to disk with DeepSpeed: run folders, preflight, sizes, tuning, a watch on free space."""
