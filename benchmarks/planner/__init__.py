"""Plans of one model for many devices, and how good plans are."""
