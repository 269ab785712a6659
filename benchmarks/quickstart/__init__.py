"""The quickstart's run, whose report the README shows."""
