"""GPT-2 XL for two optimizer steps on a CPU, with parameters and optimizer states on disk."""
