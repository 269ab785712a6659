"""What offloading to disk needs around DeepSpeed: run folders, preflight, sizes, tuning, a watch on free space."""
