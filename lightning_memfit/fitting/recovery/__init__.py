"""Recovery when memory runs out in a run: recognising the error, rolling back, recomputation, and the reports."""
