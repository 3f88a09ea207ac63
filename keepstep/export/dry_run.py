"""Whether config, generation config and tokenizer of a model can be written out at all: asked before the first step.

python -m keepstep.export.dry_run < {"model": folder}     the last line of the output is the answer
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from keepstep.errors import first_line

GENERATION_CONFIG = "generation_config.json"


def problem(model: str) -> str | None:
    """What an export would fail with, e.g. a temperature beside `do_sample: false`; None: it can be written."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        with tempfile.TemporaryDirectory() as target:
            AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False).save_pretrained(target)
            AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False).save_pretrained(target)
            if (Path(model) / GENERATION_CONFIG).is_file():
                GenerationConfig.from_pretrained(model, local_files_only=True).save_pretrained(target)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def answer(request: dict[str, Any]) -> dict[str, Any]:
    found = problem(request["model"])
    if found is None:
        return {"ok": True}
    return {
        "problem": f"An export of {request['model']} would fail: {found}",
        "remedy": "Mend the model's folder now: at the end of the run it is too late.",
    }


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
