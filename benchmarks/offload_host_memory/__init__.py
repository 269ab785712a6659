"""Host memory that ZeRO takes on the CPU and from disk, predicted and measured."""
