"""Which micro-batch size fits: predicted, tried, and checked against what the loss allows."""
