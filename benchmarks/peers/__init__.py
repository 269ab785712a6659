"""Other tools, each of which trains an experiment's row as its users would write it: one file per tool."""
