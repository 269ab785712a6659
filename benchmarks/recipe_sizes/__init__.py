"""What the recipes that people come for need with each model, for `memfit recipes`."""
