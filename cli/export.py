"""`memfit export`: turn a checkpoint into a Hugging Face folder."""

import argparse


def main(argv: list[str]) -> int:
    """Write weights, configuration and tokenizer into a new folder."""
    parser = argparse.ArgumentParser(
        prog="memfit export",
        description="Write a Hugging Face folder that `from_pretrained` loads: weights, configuration and tokenizer.",
    )
    parser.add_argument("--ckpt_path", required=True, metavar="FILE", help="checkpoint written by `memfit fit`")
    parser.add_argument("--folder", required=True, help="new or empty folder to write")
    parser.add_argument("--tokenizer", help="hub name or folder (default: the one the checkpoint was trained with)")
    parser.add_argument("--adapters_only", action="store_true", help="write a peft folder of the adapters alone")
    arguments = parser.parse_args(argv)

    from lightning_memfit.models.trained import export_adapters, export_folder

    from .trained import end_with_answers, load_trained, load_verified

    if arguments.adapters_only:
        folder = export_adapters(load_verified(arguments.ckpt_path), arguments.folder)
        print(f"Adapters: {folder}\nLoad them with `peft.PeftModel.from_pretrained(network, {str(folder)!r})`.")
        return 0

    trained = load_trained(arguments.ckpt_path, arguments.tokenizer)
    end_with_answers(trained)
    folder = export_folder(trained.network, arguments.folder, trained.tokenizer)
    kind = type(trained.network).__name__
    print(f"Model and tokenizer: {folder}\nLoad it with `transformers.{kind}.from_pretrained({str(folder)!r})`.")
    return 0
