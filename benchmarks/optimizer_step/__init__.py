"""What one optimizer step costs: time, bytes of state, bytes of scratch memory."""
