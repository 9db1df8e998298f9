"""vLLM's own tests of its OpenAI server, run against Octavo.

    python -m benchmarks.conformance --out table.md

fetches vLLM's source distribution with pip, takes the tests out of it, runs those that ask a
server with an Octavo one behind them (`shim.py` stands in for their fixture), and prints a table:
which pass, which ask for a feature that is not there yet and were refused with a sentence that
says so, and which differ for another reason, one of those in `expected.toml`. A failure that is
not in that file makes the exit status 1. None of vLLM's files are kept here.
"""
