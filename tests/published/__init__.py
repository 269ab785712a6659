"""Modules that people published, with the techniques of this package: `python -m tests.published`."""
