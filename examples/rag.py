"""Answers from notes: retrieve, rerank, generate, with built-in models only.

    python examples/rag.py
    python examples/rag.py "How many shells does Lucy have now?"

1. Index: the encoder turns each note into a vector, once.
2. Retrieve: the notes whose vectors are the most similar to the question's. This is fast, because
   each text is read alone.
3. Rerank: the reranker reads the question and each retrieved note together. This is slower and
   more exact. A score below one half means that the note does not answer the question.
4. Answer: the generator reads the best note and the question.

The built-in models are tiny and know the English of children's stories. The generator can add and
subtract what a note says; questions of another form get fluent nonsense. With larger models, the
same lines work for texts of any kind.
"""

from __future__ import annotations

import sys

import numpy as np

from octavo import LLM, SamplingParams, SentenceEncoder

NOTES = [
    "Mia has 7 apples. She finds 2 more.",
    "Mia has 9 shells. She gives away 3.",
    "Lucy has 8 shells. She buys 5 more.",
    "Tom has 10 books. He sells 4.",
    "Tom has 3 apples. He gets 6 more.",
    "Ben has 6 coins. He loses 1.",
    "Ben has moved to Oslo.",
    "Lucy got a rabbit and named it Pip.",
    "Mia is very fond of trains.",
    "Tom wants to be a baker.",
    "Anna just turned 7.",
    "A frog eats flies.",
]
QUESTIONS = [
    "How many apples does Mia have now?",
    "How many shells does Lucy have now?",
    "How many books does Tom have now?",
    "How many coins does Anna have now?",  # no note says it
]
RETRIEVED = 3
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def retrieve(encoder: SentenceEncoder, index: np.ndarray, question: str) -> list[str]:
    """Return the notes that are the most similar to the question, the best first."""
    similarity = encoder.similarity(encoder.encode_query(question), index)[0]
    return [NOTES[i] for i in np.argsort(-similarity)[:RETRIEVED]]


def rerank(reranker: LLM, question: str, notes: list[str]) -> tuple[float, str]:
    """Return the best score from 0 to 1, and its note."""
    outputs = reranker.score(question, notes, use_tqdm=False)
    return max(zip((output.outputs.score for output in outputs), notes, strict=True))


def answer(generator: LLM, note: str, question: str) -> str:
    """Return the generator's answer to a question about a note."""
    message = {"role": "user", "content": f"{note} {question}"}
    return generator.chat([message], GREEDY, use_tqdm=False)[0].outputs[0].text


def main(questions: list[str]) -> None:
    with (
        SentenceEncoder("octavo/stories-encoder", max_model_len=128) as encoder,
        LLM("octavo/stories-reranker", max_model_len=256) as reranker,
        LLM("octavo/stories", max_model_len=256) as generator,
    ):
        index = encoder.encode_document(NOTES)
        for question in questions:
            found = retrieve(encoder, index, question)
            score, note = rerank(reranker, question, found)
            print(f"{question}\n  retrieved: {' | '.join(found)}\n  best, {score:.2f}: {note}")
            if score < 0.5:
                print("  answer: no note answers this")
            else:
                print(f"  answer: {answer(generator, note, question)}")


if __name__ == "__main__":
    main(sys.argv[1:] or QUESTIONS)
