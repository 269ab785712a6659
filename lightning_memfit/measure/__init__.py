"""Monitors and reports of what a run really used."""
