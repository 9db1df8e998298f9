"""Word error rate of a transcript."""

import re


def words(text):
    """Return the words of an English text, in lower case and without punctuation."""
    text = text.lower().replace("mr.", "mister").replace("mrs.", "misses")
    return re.findall(r"[a-z0-9']+", text.replace("-", " "))


def num_word_errors(reference, hypothesis):
    """Return the least number of inserted, missing and changed words (Levenshtein's distance)."""
    theirs = words(hypothesis)
    row = list(range(len(theirs) + 1))
    for i, word in enumerate(words(reference), 1):
        last, row = row, [i]
        for j, other in enumerate(theirs, 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (word != other)))
    return row[-1]
