"""Monitors and reports of the memory and time that a run really used."""
