"""What happens when memory runs out in a run: recognising it, rolling back, the ladder, and the reports."""
