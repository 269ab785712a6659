"""Every technique of the registry on one small model: predicted and measured memory, processor time."""
