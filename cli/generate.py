"""`memfit generate`: continue a text with a trained model."""

import argparse


def main(argv: list[str]) -> int:
    """Print a prompt and its continuation."""
    parser = argparse.ArgumentParser(prog="memfit generate", description="Continue a text with a trained model.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--ckpt_path", metavar="FILE", help="checkpoint written by `memfit fit`")
    source.add_argument("--folder", help="Hugging Face folder, as `memfit export` writes it")
    parser.add_argument("--prompt", default="", help="text to continue (default: start a new document)")
    parser.add_argument("--tokenizer", help="hub name or folder (default: the one the checkpoint was trained with)")
    parser.add_argument("--max_new_tokens", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--top_k", type=int, default=50, help="sample from this many tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.folder and arguments.tokenizer:
        parser.error("--folder has its own tokenizer: leave --tokenizer out")

    import torch

    from lightning_memfit.models.sampling import check_sampling, continue_text

    from .trained import load_exported, load_trained

    limits = (arguments.max_new_tokens, arguments.temperature, arguments.top_k)
    check_sampling(*limits)  # before a model is read
    if arguments.folder:
        network, tokenizer = load_exported(arguments.folder)
    else:
        network, tokenizer = load_trained(arguments.ckpt_path, arguments.tokenizer)
    torch.manual_seed(arguments.seed)
    print(continue_text(network, tokenizer, arguments.prompt, *limits))
    return 0
