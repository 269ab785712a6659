"""Non-public parts of Lightning and DeepSpeed that these callbacks need."""
