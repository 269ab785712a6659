"""One file per technique: its Lightning face and its record."""
