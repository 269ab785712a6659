"""Other tools, doing the training of an experiment's row as their users write it: one file a tool."""
