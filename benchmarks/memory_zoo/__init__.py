"""Predicted against true peaks of small modules of every kind on the CPU: `python -m benchmarks.memory_zoo`."""
