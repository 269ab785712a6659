"""All private upstream names that the strategies use, grouped by library."""
