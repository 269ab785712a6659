"""What a device can hold: catalogue, live probe, caching-allocator model and a simulated device."""
