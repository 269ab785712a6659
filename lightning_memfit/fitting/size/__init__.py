"""The micro-batch size that fits: predicted, then verified by trial steps."""
