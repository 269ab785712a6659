"""The memory of devices: catalogue, live probe, caching-allocator model, simulated device, checks of the machine."""
