"""What precision techniques do to the loss."""
