"""Bytes that a layer of BERT-large keeps for backward, per sample: `python benchmarks/estimator/saved_bytes.py`.

It needs torch 1.10 or later and transformers, nothing of this package, so that it runs with the versions of 2022, too.
Tensors are counted by storage in fp32 on the CPU; two layers against one.
"""

import torch
import transformers

SEQUENCE = 512


def saved(num_layers: int) -> dict:
    """Sizes of the storages that a forward pass of one sample saves, by address, weights left out."""
    is_old = torch.__version__.startswith("1.")
    config = transformers.BertConfig(
        hidden_size=1024,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        intermediate_size=4096,
        **({} if is_old else {"attn_implementation": "eager"}),
    )
    model = transformers.BertForSequenceClassification(config).train()
    weights = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept, sizes = [], {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)  # its address belongs to no other tensor while it lives
        if tensor.data_ptr() not in weights:
            storage = tensor.storage() if is_old else tensor.untyped_storage()
            sizes[storage.data_ptr()] = len(storage) * tensor.element_size() if is_old else storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=torch.randint(1000, (1, SEQUENCE)), labels=torch.zeros(1, dtype=torch.long))
    return sizes


if __name__ == "__main__":
    more = sum(saved(2).values()) - sum(saved(1).values())
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{versions}: {more / 2**20:.1f} MiB per layer and sample")
