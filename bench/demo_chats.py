"""python -m longdraft.bench.demo_chats --out recipes/demo/chats.jsonl

Writes the chats that the demo's draft trains on: the target's own greedy answers to questions made from the lists below. None
of them is asked in the demo.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from longdraft.bench.demo_text import training_documents
from longdraft.draft_models.repetition import ALLOWED, repeated_share
from longdraft.schema import Settings

THINGS = (
    "rain", "volcanoes", "the moon", "bees", "whales", "coffee", "bread", "bicycles", "airplanes", "earthquakes", "the ocean",
    "electricity", "magnets", "music", "chess", "football", "dreams", "sleep", "vaccines", "the human heart", "dinosaurs",
    "penguins", "rainbows", "batteries", "the internet", "computers", "robots", "glass", "paper", "gold", "the desert",
    "the Roman Empire", "the printing press", "Japan", "Brazil", "New York", "mountains", "rivers", "snow", "the sun",
)  # fmt: skip
CONCEPTS = (
    "recursion", "a dictionary in Python", "a for loop", "a database index", "an operating system", "a compiler", "HTTP",
    "a hash function", "version control", "unit testing", "a stack", "a queue", "binary search", "sorting", "a class in Python",
    "an exception in Python", "a thread", "encryption", "machine learning", "a neural network", "an API", "caching",
)  # fmt: skip
ABOUT_THINGS = (
    "What is interesting about {}? Name three things.",
    "Explain {} to a child.",
    "Write a short story about {}.",
    "Why do people care about {}?",
    "Give me five tips on how to learn about {}.",
    "Write a short poem about {}.",
)
ABOUT_CONCEPTS = (
    "What is {}?",
    "Explain {} with an example.",
    "When should I use {}, and when not?",
    "Write a short paragraph about {} for beginners.",
)
ABOUT_TEXTS = (
    "Summarize the following text in two sentences.\n\n{}",
    "What is the following text about?\n\n{}",
)
TEXTS, TEXT_CHARACTERS = 40, 1200


class ChatSettings(Settings):
    """Generate the demo's training chats with the demo's model."""

    out: str = Field(description="JSONL file to write")
    new_tokens: int = Field(128, ge=1, description="longest answer; an answer that is cut off is kept as it is")
    batch: int = Field(32, ge=1, description="questions answered at once")


def questions() -> list[str]:
    """Every question, in a fixed order."""
    asked = [form.format(thing) for thing in THINGS for form in ABOUT_THINGS]
    asked += [form.format(concept) for concept in CONCEPTS for form in ABOUT_CONCEPTS]
    texts = [text[:TEXT_CHARACTERS] for _, text in training_documents()[:TEXTS]]
    return asked + [ABOUT_TEXTS[i % len(ABOUT_TEXTS)].format(text) for i, text in enumerate(texts)]


def answers(model: Any, tokenizer: Any, asked: Sequence[str], new_tokens: int, batch: int) -> Iterator[tuple[str, str]]:
    """Questions with their greedy answers, shortest prompts first."""
    import torch

    rendered = sorted(
        (tokenizer.apply_chat_template(chat(q), tokenize=False, add_generation_prompt=True), q) for q in asked
    )
    rendered.sort(key=lambda pair: len(pair[0]))
    for begin in range(0, len(rendered), batch):
        part = rendered[begin : begin + batch]
        inputs = tokenizer(
            [text for text, _ in part], add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
        )
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
        texts = tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        yield from ((question, text) for (_, question), text in zip(part, texts, strict=True))


def chat(question: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": question}]


def main(argv: Sequence[str] | None = None) -> int:
    """Generate and write the chats."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from longdraft.models import demo_model_folder
    from longdraft.options import parse_all

    settings = parse_all(ChatSettings, sys.argv[1:] if argv is None else argv, "longdraft bench demo_chats")
    folder = demo_model_folder(print)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = questions()
    with Path(settings.out).open("w") as file:
        found = answers(model, tokenizer, asked, settings.new_tokens, settings.batch)
        for number, (question, answer) in enumerate(found, 1):
            if repeated_share(tokenizer(answer).input_ids) > ALLOWED:  # a loop teaches loops
                continue
            turns = [*chat(question), {"role": "assistant", "content": answer}]
            file.write(json.dumps({"conversations": turns}) + "\n")
            print(f"{number}/{len(asked)}", end="\r", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
