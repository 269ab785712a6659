"""One file per technique: its Lightning class and its record."""
