"""Host memory that ranks take on the CPU: what strategies keep, peaks under ZeRO, and DeepSpeed's buffers."""
