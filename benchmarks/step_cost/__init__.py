"""What a steady step costs the host: this package's techniques beside the peers' own."""
