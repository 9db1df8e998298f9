"""vLLM's own tests of its OpenAI server, run against Octavo.

    python -m benchmarks.conformance --out table.md

fetches vLLM's source distribution with pip, and runs those of its tests that use a server against
Octavo (`shim.py` replaces their fixture). It prints a table of the tests that pass, those that need
a missing feature and were rejected with a sentence that says so, and those that differ for another
reason of `expected.toml`. A failure that is not in that file makes the exit status 1. None of
vLLM's files are kept here.
"""
