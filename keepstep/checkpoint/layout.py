"""Names inside a checkpoint folder of layout `full`."""

from __future__ import annotations

LAYOUT = "full"
LAYOUT_VERSION = 1

ACTOR = "actor/pytorch_model.bin"
OPTIMIZER = "actor/optimizer.pt"
SCHEDULER = "actor/scheduler.pt"
REF = "ref/pytorch_model.bin"
TRAINER_STATE = "trainer_state.json"
MANIFEST = "manifest.json"
CONFIG = "config.yaml"
TOKENIZER_DIR = "tokenizer"
ENGINE_STATE = "rollout/engine_state.json"
ROLLOUT_DIR = "rollout"

TENSOR_FILES = (ACTOR, OPTIMIZER, SCHEDULER, REF)


def required_files(has_reference: bool = True) -> tuple[str, ...]:
    """Files without which a checkpoint cannot be resumed from."""
    return (ACTOR, OPTIMIZER, SCHEDULER, *((REF,) if has_reference else ()), TRAINER_STATE)
