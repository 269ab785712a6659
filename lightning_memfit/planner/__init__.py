"""Choose the fastest setting that fits, for a module, a global batch and a machine, with reasons."""
