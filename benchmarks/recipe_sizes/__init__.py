"""What the recipes for chats and documents need with each model, for `memfit recipes`."""
