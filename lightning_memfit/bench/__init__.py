"""Benchmarks and scaling runs: experiments of named rows, each measured in a process of its own."""
