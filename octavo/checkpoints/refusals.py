"""Reasons why Octavo does not compute some architectures."""

from __future__ import annotations

import re

_EXPERTS = "it is a mixture of experts of a kind that Octavo does not compute"
_KINDS = {
    r"^nomic-bert-moe$": "its GGUF files lack the bias of the experts, so its vectors would be "
    "others; use the checkpoint that names NomicBertModel",
    r"^t5(encoder)?$": "GGUF files of T5 are not read; use the checkpoint that names "
    "T5ForConditionalGeneration",
    r"Classification$|Reward|ForRegression": "it is a classifier of a family that Octavo "
    "does not have",
    r"^ChatGLM": "it needs custom code, which Octavo never runs; use the checkpoint that names "
    "GlmForCausalLM",
    r"MaskedLM|PreTraining|QuestionAnswering|(?<!LMHead)Model$": "it is an encoder, which makes "
    "vectors of a text, of a family that Octavo does not have",
    r"Whisper|Speech|Audio|CTC$|Voice|Moonshine|ASR": "it processes sound, and Octavo's "
    "models process text",
    r"^(T5|Bart|MBart|Pegasus|Marian|NllbMoe|FSMT|BlenderBot|Led|LED|ProphetNet)": "it is an "
    "encoder-decoder of a family that Octavo does not have",
    r"^(DeepseekV32|GlmMoeDsa|Glm5Next|Qwen4Exp|MiniMaxM3)": "its attention chooses tokens "
    "with an indexer (sparse attention), which Octavo does not compute",
    r"^DeepseekV4": "it has compressed keys and values, and hyper-connections, which Octavo does "
    "not compute",
    r"Diffusion": "it writes a block of tokens in several steps (diffusion), and Octavo's models "
    "write one token after the other",
    r"^(Step[35]|Longcat|Mellum|KimiK3)": _EXPERTS,
    r"ForConditionalGeneration|Vision|VL|Llava|Image": "it processes images or other media, and "
    "Octavo's models process text",
    r"[Mm]oe|MoE|DeepseekV|Dbrx": _EXPERTS,
    r"Zamba": "its layers share blocks, which Octavo does not compute",
    r"Mamba|Jamba|RWKV|Rwkv|Bamba|RecurrentGemma|FalconH1|Lfm[23]|Hybrid|Next": "it has "
    "recurrent layers of a kind that Octavo does not compute",
}
"""Reasons by patterns of Hugging Face's names of architectures; the first one counts."""
_GGUF_NAMES = {
    "deepseek32": "DeepseekV32ForCausalLM",
    "deepseek4": "DeepseekV4ForCausalLM",
    "glm-dsa": "GlmMoeDsaForCausalLM",
    "glm5-next": "Glm5NextForConditionalGeneration",
    "kimi-k3": "KimiK3ForConditionalGeneration",
    "minimax-m3": "MiniMaxM3SparseForConditionalGeneration",
    "neo-bert": "NeoBertModel",
    "qwen4exp": "Qwen4ExpForCausalLM",
    "step35": "Step3p5ForCausalLM",
}
"""Hugging Face's names of architectures that GGUF files name otherwise."""


def reason_of_refusal(architecture: str) -> str | None:
    """Return the reason why an architecture is not computed; None: no reason is known.

    Args:
        architecture: its name in config.json's `architectures`, or in `general.architecture`.
    """
    name = _GGUF_NAMES.get(architecture, architecture)
    return next((kind for pattern, kind in _KINDS.items() if re.search(pattern, name)), None)
