"""What each strategy keeps on each of two ranks."""
