"""Models of the comparison, in bfloat16 unless their names say otherwise.

These are random weights in the shapes of released models, one of them in quantized formats, and the
built-in model in two of these shapes with its draft model, for speculative decoding.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from peers.installing import CompareError
from peers.quantized import FORMATS, make_quantized

SHAPES: dict[str, dict[str, Any]] = {
    "toy": {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 1000,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "tinyllama-1.1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
}


_ROOT = Path(__file__).resolve().parents[2]
_WIDENED = {"stories-1.1b": "tinyllama-1.1b", "stories-135m": "smollm2-135m"}


def plain_models(folder: Path) -> list[str]:
    """Return the names of the models that are not quantized."""
    return sorted(
        file.parent.name
        for file in folder.glob("*/config.json")
        if "quantization_config" not in json.loads(file.read_text())
    )


def make_models(folder: Path) -> None:
    """Make the missing models in `folder`.

    Raises:
        CompareError: a model is missing, and so is transformers, which makes it.
    """
    _make_random(folder)
    for form in FORMATS:
        target = folder / f"tinyllama-1.1b-{form}"
        if not target.exists():
            make_quantized(folder / "tinyllama-1.1b", target, form)
    draft = folder / "stories-draft"
    if not draft.exists():
        shutil.copytree(_ROOT / "octavo" / "builtin" / "stories-draft", draft)
    for name, shape in _WIDENED.items():
        if not (folder / name).exists():
            part = folder / f"part-{name}"
            words = ["--shape", shape, "--keep-vocabulary", "--out", str(part.resolve())]
            subprocess.run([sys.executable, "-m", "training.widen", *words], cwd=_ROOT, check=True)
            part.rename(folder / name)


def _make_random(folder: Path) -> None:
    """Make the models of random weights: seeded, each with a tokenizer."""
    missing = [name for name in SHAPES if not (folder / name / "config.json").exists()]
    if not missing:
        return
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
    except ModuleNotFoundError as error:
        raise CompareError(
            f"Making the models {', '.join(missing)} needs {error.name}; install it "
            "(pip install '.[dev]')."
        ) from None

    for name in missing:
        part = folder / f"part-{name}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        torch.manual_seed(0)
        config = LlamaConfig(
            **SHAPES[name], max_position_embeddings=4096, bos_token_id=1, eos_token_id=2
        )
        LlamaForCausalLM(config).bfloat16().save_pretrained(part)
        _make_tokenizer(part, SHAPES[name]["vocab_size"])
        part.rename(folder / name)


def _make_tokenizer(folder: Path, size: int) -> None:
    """Make a byte-level BPE tokenizer of exactly `size` tokens, trained on Python's own library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [*sorted(library.glob("*.py")), *sorted(library.glob("*/*.py"))][:700]
    tokenizer.train([str(file) for file in files], trainer)
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(size - tokenizer.get_vocab_size())])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096}
    names = dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **names}))
