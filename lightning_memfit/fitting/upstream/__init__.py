"""Private names of upstream's that fitting uses, one module per library."""
