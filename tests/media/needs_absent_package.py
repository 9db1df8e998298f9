"""Module of jobs whose library is not installed."""

import absent_package  # noqa: F401

JOBS = {}
