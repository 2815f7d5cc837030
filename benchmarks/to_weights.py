"""Makes a local Hugging Face model folder (bfloat16 safetensors and tokenizer) from a GGUF file, for vLLM.

    python benchmarks/to_weights.py MODEL.gguf FOLDER

Needs `torch`, `transformers`, `accelerate` and `gguf` (pip install the last two beside vLLM). Quantized weights are
dequantized: the folder's model computes what the GGUF's does, up to bfloat16.
"""

import argparse
from pathlib import Path

import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM

from to_tokenizer import build


def main() -> None:
    """Convert one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    loaded = AutoModelForCausalLM.from_pretrained(str(args.gguf.parent), gguf_file=args.gguf.name, dtype=torch.bfloat16)
    # What was loaded believes that it is still quantized, and would not be saved.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(args.folder)
    build(GGUFReader(args.gguf)).save_pretrained(args.folder)
    print(f"{args.folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters in bfloat16")


if __name__ == "__main__":
    main()
