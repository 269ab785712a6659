"""What one training step allocates, frees and computes, found without a GPU and without the memory."""
