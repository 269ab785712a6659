"""Plain torch: adapters beside frozen weights, and frozen weights in 4 or 8 bits."""
