"""Live bytes of a full fine-tuning step of GPT-2 XL on a CPU, with and without gradients kept."""
