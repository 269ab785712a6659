"""Float32 masters on the host, against torchao's offloaded optimizer."""
