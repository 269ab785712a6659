"""GPT-2 XL for two optimizer steps on a CPU."""
