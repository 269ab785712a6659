"""The micro-batch size that fits: predicted, and corrected by what the first steps take."""
