"""A zoo of small modules of every kind, whose predicted peaks are compared with the true ones."""
