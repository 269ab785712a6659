"""Everything that needs a CUDA device, in one restartable command."""
