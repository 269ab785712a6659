"""Peaks of runs on several devices, rank by rank: predicted by a trace in one process, and true of real gloo runs."""
