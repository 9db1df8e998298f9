"""Train a LoRA adapter with PEFT, for any causal language model of Hugging Face, on a CPU.

    python examples/train_adapter.py MODEL CHATS.jsonl FOLDER

MODEL is a folder or a hub id with a chat template. A line of CHATS is a JSON object:
{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}.
Needs `pip install peft`.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer


def encode(tokenizer, messages):
    """Return the tokens of a conversation, and the same with -100 before its last answer."""
    prompt = tokenizer.apply_chat_template(
        messages[:-1], tokenize=False, add_generation_prompt=True
    )
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    if not text.startswith(prompt):
        raise SystemExit("The chat template does not go on from a prompt to its answer.")
    before = tokenizer(prompt, add_special_tokens=False).input_ids
    answer = tokenizer(text.removeprefix(prompt), add_special_tokens=False).input_ids
    return torch.tensor(before + answer), torch.tensor([-100] * len(before) + answer)


def loss_of(model, rows):
    """Return the mean loss of the answers; what fills up a row is after it, and has no effect."""
    tokens = pad_sequence([ids for ids, _ in rows], batch_first=True)
    targets = pad_sequence([labels for _, labels in rows], batch_first=True, padding_value=-100)
    logits = model(tokens).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("chats", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--chats-per-step", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    chats = [json.loads(line)["messages"] for line in args.chats.read_text().splitlines()]
    encoded = [encode(tokenizer, chat) for chat in chats]
    heldout, train = encoded[::10], [it for i, it in enumerate(encoded) if i % 10]

    def measure():
        with torch.no_grad():
            return loss_of(model, heldout).item()

    before = measure()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    rng = random.Random(0)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - step / args.steps)
        loss_of(model, rng.choices(train, k=args.chats_per_step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"held-out loss {before:.3f} before, {measure():.3f} after")
    model.save_pretrained(args.folder)


if __name__ == "__main__":
    main()
