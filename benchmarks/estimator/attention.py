"""Which attention kernel this CUDA device takes, and which one the emulation says."""

import torch
import torch.nn.functional as F

from lightning_memfit.profile.dispatch import choose_attention


def main() -> None:
    """Print one line per case."""
    capability = torch.cuda.get_device_capability()
    print(torch.__version__, torch.cuda.get_device_name(), capability)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for head in (64, 80, 128, 100):
            for masked in (False, True):
                for length in (512, 1000):
                    query, key, value = (
                        torch.randn(2, 4, length, head, device="cuda", dtype=dtype, requires_grad=True)
                        for _ in range(3)
                    )
                    mask = torch.zeros(2, 1, length, length, device="cuda", dtype=dtype) if masked else None
                    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=not masked)
                    taken = type(out.grad_fn).__name__
                    expected = choose_attention(query, key, value, mask, 0.0, capability, False)
                    print(f"{dtype} head {head} length {length} mask {masked}: takes {taken}, emulated {expected}")


if __name__ == "__main__":
    main()
