"""GPT-2 XL's true architecture, trained for real on a CPU, and the quickstart."""
