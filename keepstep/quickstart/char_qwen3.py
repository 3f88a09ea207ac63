"""A character-level Qwen3 of 0.3 M parameters with a brief supervised warm start. Run as a process of its own:

python -m keepstep.quickstart.char_qwen3 FOLDER
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from keepstep.quickstart.arithmetic import ALPHABET, problems

SEED = 7
NUM_WARM_START_STEPS = 100
WARM_START_BATCH = 64
WARM_START_LR = 3e-3


def make(folder: Path) -> None:
    """Write the model into `folder`: config, tokenizer and warm-started weights; whole or not at all."""
    import torch

    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    warm_start(model, tokenizer)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    try:
        os.replace(temporary, folder)
    except OSError:
        # Another start made the same model in the same moment.
        shutil.rmtree(temporary)
        if not (folder / "config.json").is_file():
            raise


def build_tokenizer():
    """One token per character of the alphabet, plus padding and end of sequence."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )


def build_model(tokenizer):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )


def warm_start(model, tokenizer) -> None:
    """Supervised steps on random problems, so that GRPO begins with some right answers."""
    import torch

    texts = [prompt + answer for prompt, answer in problems()]
    longest = max(len(text) for text in texts) + 1
    tokens = torch.full((len(texts), longest), tokenizer.pad_token_id)
    for row, text in enumerate(texts):
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        tokens[row, : len(ids)] = torch.tensor(ids)
    # The four characters of the prompt ("a+b=") and the padding are given, not learned.
    labels = tokens.masked_fill(tokens == tokenizer.pad_token_id, -100)
    labels[:, :4] = -100
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_START_LR)
    for _ in range(NUM_WARM_START_STEPS):
        rows = torch.randint(len(texts), (WARM_START_BATCH,), generator=generator)
        logits = model(tokens[rows]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[rows][:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
