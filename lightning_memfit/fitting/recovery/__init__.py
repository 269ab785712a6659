"""Recovery when memory runs out in a run: recognising the error, rolling back, the ladder, and the reports."""
